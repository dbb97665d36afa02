// The engine of one rank: a worker, control connections and a thread. It serves all communicators of the rank.
//
// Its peers are other engines, which join and leave. The ranks of a communicator, and of all communicators split from
// it, are a family. They introduce themselves to each other when the first communicator forms.
//
// The loop's thread posts an op and spins for a moment, because the op may complete at once. Later the loop moves the
// op on while it polls, or the engine's own thread does. That thread sleeps while there is nothing to do, and waits
// while the loop is active. It takes over when the loop has not come for Pacer::kLoopAway. One lock guards everything.
// The thread yields it to the loop, and so do other threads that post (elsewhere.hpp).
//
// The engine owns its parts and connects them. Each part has its own header and its own test.
//
// Any thread may call the engine. A call that throws changes nothing. It throws std::bad_alloc, std::out_of_range or
// std::invalid_argument for invalid arguments, or std::runtime_error after the close. Any other exception makes the
// communicator fail (failure.hpp).
#pragma once

#include <unistd.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/closing.hpp"
#include "engine/groups.hpp"
#include "engine/held.hpp"
#include "engine/inbox.hpp"
#include "engine/lanes.hpp"
#include "engine/messages.hpp"
#include "engine/notes.hpp"
#include "engine/offers.hpp"
#include "engine/pacer.hpp"
#include "engine/peer.hpp"
#include "engine/priority_lock.hpp"
#include "engine/reports.hpp"
#include "engine/request.hpp"
#include "engine/schedules.hpp"
#include "net/clock.hpp"
#include "net/control.hpp"
#include "net/cuda_thread.hpp"
#include "net/worker.hpp"
#include "windows/windows.hpp"

namespace aiocomms {

class Engine : private Inbox::Owner {
 public:
  // number: this engine's own number. device: see Worker. If the device is a GPU, the engine uses the calling thread's
  // context.
  Engine(int number, const std::vector<std::pair<std::string, std::string>>& options,
         std::optional<ucs_memory_type_t> device);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int number() const { return number_; }
  const std::string& address() const { return address_; }  // the worker's address
  void start();
  // Introduces a peer by a new number, or this engine to itself. Both engines must know each other before either sends.
  // cores: the cores that this host's ranks may use. An engine first introduces itself to itself, without a limit of
  // cores.
  void introduce(int peer, Introduction introduction, int cores);
  // Ends the connections to peers that share no communicator with this rank any more. sound: waits at most `patience`
  // seconds until the peers have received everything. Returns whether UCX holds nothing of the peers any more.
  bool part(const std::vector<int>& peers, bool sound, double patience) noexcept;
  int fileno() const { return reports_.fileno(); }
  bool ready() const { return reports_.ready(); }
  bool parks() const { return pacer_.parks(); }  // see Pacer

  // ----------------------------------------------------------------------------------------------------- communicators
  std::uint32_t add_group(int rank, std::vector<int> peers);
  // segment: shared memory of this host's ranks, not taken over. -1: this rank is alone on its host. pooled: the memory
  // contains the family's Pool. hosts: the number of each rank's host. readable: the ranks of this host may read each
  // other's memory. in_place: the ranks read large parts of collectives in place. All ranks of a host give the same
  // value.
  void open_group(std::uint32_t group, std::vector<std::uint32_t> their_ids, int segment, bool pooled,
                  std::vector<int> hosts, bool readable, bool in_place);
  bool reads_all(const std::vector<int>& peers);  // whether this rank may read the memory of these peers of its host
  void lose_group(std::uint32_t group);           // stops all activity of the communicator
  void close_group(std::uint32_t group);          // also sends the farewells
  bool send_frame(int peer, const std::string& frame);
  // See Notes: messages of other ranks that are not for the loop.
  int notes_fileno() const { return notes_.fileno(); }
  std::vector<Notes::Note> take_notes();
  std::vector<std::uint64_t> signs(const std::vector<int>& peers);  // see Control
  bool has_let_go(std::uint32_t group, int rank);  // whether a rank of this host has lost the communicator
  std::vector<int> missing(std::uint32_t group);   // the ranks that the running collective waits for
  std::vector<int> missing_in_lane(std::uint32_t group, std::uint64_t lane);
  Ticket under_way_in_lane(std::uint32_t group, std::uint64_t lane);  // 0: the lane is idle
  // See Lanes. These do nothing for a communicator that is closed or lost.
  void give_up_lane(std::uint32_t group, std::uint64_t lane);
  void forget_lane(std::uint32_t group, std::uint64_t lane, int rank);

  // --------------------------------------------------------------------------------------------------------------- ops
  // True: the op is done, and no outcome follows. False: the outcome follows under the caller's ticket.
  bool send(Ticket ticket, std::uint32_t group, const void* data, std::size_t bytes, int dst, int channel,
            std::int64_t tag, int dtype, Held& held = nothing_held);
  bool recv(Ticket ticket, std::uint32_t group, void* data, std::size_t bytes, int src, int channel, std::int64_t tag,
            int dtype, Held& held = nothing_held);
  // The message that a receive would take now. The message stays. Empty: the outcome follows once there is a message.
  // look_on: spin for a moment, because the message may arrive soon, or the message of another probe.
  struct Found {
    std::uint64_t bytes;
    std::uint64_t dtype;
  };
  std::optional<Found> probe(Ticket ticket, std::uint32_t group, int src, int channel, std::int64_t tag, bool look_on);
  // A receive that does not wait. Empty: no message has arrived, and no outcome follows.
  std::optional<bool> take(Ticket ticket, std::uint32_t group, void* data, std::size_t bytes, int src, int channel,
                           std::int64_t tag, int dtype);
  // Withdraws a receive or a probe.
  bool cancel(std::uint32_t group, int src, int channel, std::int64_t tag, Ticket ticket);
  // The part of a too long message that would have fit into a device's buffer. It is returned once, after the outcome.
  std::string head(Ticket ticket);
  // make: Task make(Group&, Unequal&) makes the schedule, before this call returns. Returns when the collective was
  // done, in seconds of the monotonic clock. 0: the outcome follows.
  template <typename Make>
  double collective(Ticket ticket, std::uint32_t id, std::uint64_t fingerprint, const Make& make,
                    Held& held = nothing_held) {
    const auto lock = lock_for_post(held);
    auto op = begin_post(ticket, id);
    Task task = make(op->group, op->unequal);
    // This post may first have to begin another thread's collective, which may be large.
    if (!op->group.schedules.empty()) held.let_go();
    const std::uint64_t began = now_ns();
    schedules_.begin(op->group, {std::move(task), fingerprint, op.get()});
    return static_cast<double>(finish_post(op.release(), began, held)) * 1e-9;
  }
  // The same for a lane's collective. All ranks use the same number for the lane. make: Task make(LaneCalls&,
  // Unequal&).
  template <typename Make>
  double lane_collective(Ticket ticket, std::uint32_t id, std::uint64_t number, std::uint64_t fingerprint,
                         const Make& make, Held& held = nothing_held) {
    const auto lock = lock_for_post(held);
    auto op = begin_post(ticket, id);
    const std::uint64_t began = now_ns();
    add_to_lane<&Lanes::begin>(*op, number, fingerprint, make);
    return static_cast<double>(finish_post(op.release(), began, held)) * 1e-9;
  }

  // ----------------------------------------------------------------------------------------------------------- windows
  // Maps this rank's part of a window. remote: other hosts use it. Returns the key that those hosts need.
  std::string map_window(std::uint32_t group, std::uint64_t window, void* data, std::size_t bytes, bool remote);
  // Opens another rank's part: its mapping or null, the result of its map_window, and its size.
  void open_window(std::uint32_t group, std::uint64_t window, int rank, void* mapped, const std::string& rkey,
                   std::uint64_t address, std::size_t bytes);
  void close_window(std::uint32_t group, std::uint64_t window);
  // Offsets are in bytes. This rank's ops take effect in the order of the calls. std::out_of_range: the window is
  // closed, or the range exceeds it.
  bool put(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset, const void* data,
           std::size_t bytes, Held& held = nothing_held);
  bool put_signal(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset,
                  const void* data, std::size_t bytes, Held& held = nothing_held);
  bool get(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset, void* data,
           std::size_t bytes, Held& held = nothing_held);
  // Equal runs within one op, see Windows::Runs.
  bool put_v(Ticket ticket, std::uint32_t group, const Windows::Runs& runs, const std::byte* data);
  bool get_v(Ticket ticket, std::uint32_t group, const Windows::Runs& runs, std::byte* data);
  // Adds a to an element of 4 or 8 bytes. With swap, it replaces a by b. The outcome carries the old value.
  bool atomic(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset, bool swap,
              std::size_t bytes, std::uint64_t a, std::uint64_t b);
  bool signal(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, Held& held = nothing_held);
  bool wait_signal(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, Held& held = nothing_held);
  bool cancel_wait(std::uint32_t group, std::uint64_t window, int rank, Ticket ticket);
  bool flush(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank);  // -1: every rank's part

  // ---------------------------------------------------------------------------------------------------------- progress
  // The loop calls this to make progress and to collect outcomes.
  void progress(std::vector<Outcome>& outcomes, std::vector<Notice>& notices);
  // The loop has lost collected outcomes, so no communicator can continue.
  void fail(const char* why);
  // Waits until the current owner of the engine's lock has given it up.
  void wait_for_turn() { const std::lock_guard lock(lock_); }
  // Closes the engine. If it is sound, this waits at most `patience` seconds until the peers have received everything.
  void close(bool sound, double patience) noexcept;
  // Stops the engine at the end of the process. Other threads may still call it, and then wait forever. So the engine
  // must never be destroyed.
  void halt() noexcept;

 private:
  friend struct EngineInside;  // of the tests
  friend class Elsewhere;

  // The implementation of Inbox::Owner.
  void handle(Group& group, const Header& header, const void* payload) override;
  bool agrees(Group& group, const Header& header) override;
  void pull(Request* receive, const Header& header, const Offer& offer) override;
  void failed(Group& group) noexcept override { reports_.fail(group); }

  void make_room(std::size_t peers);
  void ask_the_others(int dead);
  std::unique_ptr<Pool> make_pool(const Group& group, const std::vector<int>& local, int segment);
  Group& present(std::uint32_t id);  // std::runtime_error: the engine is closed
  Group& opened(std::uint32_t id);   // The same, but the communicator must also be open.
  template <typename Step>
  void change_lanes(std::uint32_t id, const Step& step);  // Step: void (Lanes&)

  // Makes an op, and reserves room for its outcome.
  std::unique_ptr<Operation> expected(Ticket ticket, Group& group) {
    reports_.make_room();
    return std::make_unique<Operation>(reports_, group, ticket);
  }
  // Also notes the core of this thread.
  std::unique_ptr<Operation> begin_post(Ticket ticket, std::uint32_t id);
  // add: Lanes::begin or Lanes::enqueue.
  template <void (Lanes::*add)(LaneCalls&, Schedule), typename Make>
  void add_to_lane(Operation& op, std::uint64_t number, std::uint64_t fingerprint, const Make& make) {
    Lanes& lanes = lanes_of(op.group);
    LaneCalls& lane = lanes.at(number);
    try {
      (lanes.*add)(lane, {make(lane, op.unequal), fingerprint, &op});
    } catch (...) {
      lanes.forget(lane);
      throw;
    }
  }

  // A post starts its op, and completes it if that takes only a moment. Progress never needs the lock in `held`. So the
  // caller keeps it, except while it waits for the engine's lock or for the op.
  template <typename Start>
  bool post(Ticket ticket, std::uint32_t id, Held& held, const Start& start);
  std::unique_lock<PriorityLock> lock_for_post(Held& held) {
    if (lock_.try_lock_once()) return {lock_, std::adopt_lock};
    held.let_go();
    return std::unique_lock(lock_);
  }
  void start_send(Operation* op, const void* data, std::size_t bytes, int dst, int channel, std::int64_t tag,
                  int dtype);
  void start_recv(Operation* op, void* data, std::size_t bytes, int src, int channel, std::int64_t tag, int dtype);
  // began: the time of the post's call. Returns when the op was done, in ns. 0: it is not done.
  std::uint64_t finish_post(Operation* op, std::uint64_t began, Held& held) noexcept;
  std::uint64_t spin(const Operation& op, std::uint64_t began) noexcept;  // Returns when it last read the clock.
  bool shares_core(const Operation& op) const noexcept;                   // with a rank that this rank may wait for
  void give_core(const Operation& op, const Pacer::Spin& spin) noexcept;
  bool is_sole(const Operation& op) const noexcept;
  bool withdraw(Request* request);

  bool advance() noexcept;  // looks once at everything
  bool waits_for_room() const;
  bool is_quiet() const;
  void run();
  void listen(int timeout_ms, bool worker) noexcept;  // to the control connections
  Pacer::Rest take_turn() noexcept;
  void wake_thread() noexcept;
  // Another thread than the loop's calls this after progress, because the loop may be parked.
  void tell_loop() noexcept {
    if (ready()) reports_.wake_loop();
  }
  // A thread that stops making progress calls this. The sleeping thread does not know of the work that is left.
  void hand_on() noexcept {
    if (pacer_.asleep() && !is_quiet()) wake_thread();
  }
  // Runs a step whose caller cannot receive an exception. Returns whether it succeeded. Otherwise the whole engine has
  // failed.
  template <typename Step>
  bool attempt(const Step& step) noexcept {
    try {
      step();
      return true;
    } catch (...) {
      reports_.fail();
      return false;
    }
  }

  void handle_frame(int peer, std::string frame);
  void handle_end(int peer, bool parted);  // the end of the control connection
  void apply_farewells(int peer);          // those whose messages have all arrived
  void handle_departure(Group& group, int rank, std::uint64_t collectives);
  void lose(Group& group) noexcept;  // releases it after the other ranks can see the loss
  void release(Group& group) noexcept;
  // Waits until the peers have received everything. False: some have not.
  bool await_arrival(const std::vector<int>& peers, const std::function<bool()>& patient) noexcept;
  template <typename Is>
  bool advance_until(const Is& is, const std::vector<int>& peers, const std::function<bool()>& patient) noexcept;
  void stop_thread() noexcept;
  void tear_down(bool sound, const std::function<bool()>& patient) noexcept;

  const int number_;
  std::vector<Peer> peers_;
  PriorityLock lock_;
  Pacer pacer_;
  Reports reports_{pacer_};
  Notes notes_;
  std::unique_ptr<Worker> worker_;
  const std::string address_;
  std::unique_ptr<Control> control_;
  std::unique_ptr<Pool> pool_;  // with the other ranks of this host, if there are any
  Groups groups_;
  Schedules schedules_;
  Offers offers_;
  Inbox inbox_;
  Sender sender_;
  Windows windows_;
  Farewells farewells_;
  bool alone_ = true;                            // no peer is in this process
  int cores_ = std::numeric_limits<int>::max();  // the cores of this host
  bool abroad_ = false;                          // there are peers on other hosts

  std::mutex closing_;
  bool stopping_ = false;
  long switches_ = 0;  // of the posting thread, when it last yielded its core
  const pid_t process_ = getpid();
  std::optional<CudaThread> cuda_;  // if the device is a GPU
  std::thread thread_;
};

}  // namespace aiocomms
