// The engine: a worker, control connections and a thread, for the communicators of one rank.
//
// It has other engines as its peers, who come and go. Those of the ranks of a communicator, and of all that are split
// from it, are a family: they are introduced to each other when the first one forms.
//
// An op is posted on the loop's thread, which spins for a moment in case it can be done at once. What is left is moved
// on by whoever comes by: the loop, while it polls, or the engine's own thread, which sleeps while there is nothing to
// do, waits while the loop is about, and takes over when the loop has not come for Pacer::kLoopAway. One lock guards
// all; the thread gives way when the loop wants it. So do other threads that post (elsewhere.hpp).
//
// The engine owns its parts and knows the way between them. Each part has its own header and its own test.
//
// Any thread may call it, and exceptions come out of the calls alone, with nothing changed: std::bad_alloc,
// std::out_of_range and std::invalid_argument of what is none, std::runtime_error once the engine is closed. What else
// throws, on whatever thread, makes the communicator fail (failure.hpp).
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
  // number: what it calls itself.
  // device: see Worker; and the calling thread's context is used, if it is a GPU's.
  Engine(int number, const std::vector<std::pair<std::string, std::string>>& options,
         std::optional<ucs_memory_type_t> device);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int number() const { return number_; }
  const std::string& address() const { return address_; }  // of its worker
  void start();
  // A peer, by a number that nobody has had, or itself. Both must know each other before either sends anything.
  // cores: that the ranks of this host may use. An engine is introduced to itself first, without cores.
  void introduce(int peer, Introduction introduction, int cores);
  // Part from peers with whom there are no communicators any more; nobody else has to do with them. sound: wait until
  // they have got everything, at most `patience` seconds. Returns whether UCX has nothing of them any more.
  bool part(const std::vector<int>& peers, bool sound, double patience) noexcept;
  int fileno() const { return reports_.fileno(); }
  bool ready() const { return reports_.ready(); }
  bool parks() const { return pacer_.parks(); }  // see Pacer

  // ------------------------------------------------------------------------------------------------- communicators
  std::uint32_t add_group(int rank, std::vector<int> peers);
  // segment: shared memory of the ranks of this host, not taken over; -1: this rank is alone there. pooled: it has the
  // family's Pool in it. hosts: by rank. readable: each rank of this host may read each other's memory. in_place: they
  // read large parts of collectives where they lie; the same on all of them.
  void open_group(std::uint32_t group, std::vector<std::uint32_t> their_ids, int segment, bool pooled,
                  std::vector<int> hosts, bool readable, bool in_place);
  bool reads_all(const std::vector<int>& peers);  // whether this rank may read the memory of those on its host
  void lose_group(std::uint32_t group);           // nothing of it is moved on any more
  void close_group(std::uint32_t group);          // and the others are told
  bool send_frame(int peer, const std::string& frame);
  // See Notes: of what the other ranks say, that which is not for the loop.
  int notes_fileno() const { return notes_.fileno(); }
  std::vector<Notes::Note> take_notes();
  std::vector<std::uint64_t> signs(const std::vector<int>& peers);  // see Control
  bool has_let_go(std::uint32_t group, int rank);  // whether a rank of this host has lost the communicator
  std::vector<int> missing(std::uint32_t group);   // the ranks that the collective under way waits for
  std::vector<int> missing_in_lane(std::uint32_t group, std::uint64_t lane);
  Ticket under_way_in_lane(std::uint32_t group, std::uint64_t lane);  // 0: nothing
  // See Lanes. Of a communicator that is closed or lost there is nothing to do.
  void give_up_lane(std::uint32_t group, std::uint64_t lane);
  void forget_lane(std::uint32_t group, std::uint64_t lane, int rank);

  // ------------------------------------------------------------------------------------------------------------ ops
  // True: done, and nothing else is to be told. False: the outcome follows, under the ticket that the caller gave it.
  bool send(Ticket ticket, std::uint32_t group, const void* data, std::size_t bytes, int dst, int channel,
            std::int64_t tag, int dtype, Held& held = nothing_held);
  bool recv(Ticket ticket, std::uint32_t group, void* data, std::size_t bytes, int src, int channel, std::int64_t tag,
            int dtype, Held& held = nothing_held);
  // What a receive would take now, which stays. Nothing: the outcome follows, once there is a message. look_on: for a
  // moment, in case that there soon is one, or what another probe waits for.
  struct Found {
    std::uint64_t bytes;
    std::uint64_t dtype;
  };
  std::optional<Found> probe(Ticket ticket, std::uint32_t group, int src, int channel, std::int64_t tag, bool look_on);
  // A receive that does not wait. Nothing: no message has come, and there is no outcome.
  std::optional<bool> take(Ticket ticket, std::uint32_t group, void* data, std::size_t bytes, int src, int channel,
                           std::int64_t tag, int dtype);
  // Of a receive or a probe.
  bool cancel(std::uint32_t group, int src, int channel, std::int64_t tag, Ticket ticket);
  // As much of a message that was too long for a device's buffer as would have fit; once, when its outcome is known.
  std::string head(Ticket ticket);
  // make: Task make(Group&, Unequal&), the schedule; called before this returns. Not 0: done, at that second of the
  // monotonic clock. 0: the outcome follows.
  template <typename Make>
  double collective(Ticket ticket, std::uint32_t id, std::uint64_t fingerprint, const Make& make,
                    Held& held = nothing_held) {
    const auto lock = lock_for_post(held);
    auto op = begin_post(ticket, id);
    Task task = make(op->group, op->unequal);
    if (!op->group.schedules.empty()) held.let_go();  // it may have to begin another thread's first, which may be large
    const std::uint64_t began = now_ns();
    schedules_.begin(op->group, {std::move(task), fingerprint, op.get()});
    return static_cast<double>(finish_post(op.release(), began, held)) * 1e-9;
  }
  // The same of a lane, which all ranks call by the same number. make: Task make(LaneCalls&, Unequal&).
  template <typename Make>
  double lane_collective(Ticket ticket, std::uint32_t id, std::uint64_t number, std::uint64_t fingerprint,
                         const Make& make, Held& held = nothing_held) {
    const auto lock = lock_for_post(held);
    auto op = begin_post(ticket, id);
    const std::uint64_t began = now_ns();
    add_to_lane<&Lanes::begin>(*op, number, fingerprint, make);
    return static_cast<double>(finish_post(op.release(), began, held)) * 1e-9;
  }

  // --------------------------------------------------------------------------------------------------------- windows
  // This rank's part. remote: other hosts are to reach it. Returns what they need for that.
  std::string map_window(std::uint32_t group, std::uint64_t window, void* data, std::size_t bytes, bool remote);
  // Another rank's: mapped, or null; what it returned from map_window; and its size.
  void open_window(std::uint32_t group, std::uint64_t window, int rank, void* mapped, const std::string& rkey,
                   std::uint64_t address, std::size_t bytes);
  void close_window(std::uint32_t group, std::uint64_t window);
  // Offsets are in bytes; ops of this rank take effect in the order of the calls. std::out_of_range: the window is
  // closed, or that does not lie within.
  bool put(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset, const void* data,
           std::size_t bytes, Held& held = nothing_held);
  bool put_signal(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset,
                  const void* data, std::size_t bytes, Held& held = nothing_held);
  bool get(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset, void* data,
           std::size_t bytes, Held& held = nothing_held);
  // Equal runs, within one op: see Windows::Runs.
  bool put_v(Ticket ticket, std::uint32_t group, const Windows::Runs& runs, const std::byte* data);
  bool get_v(Ticket ticket, std::uint32_t group, const Windows::Runs& runs, std::byte* data);
  // Add a to an element of 4 or 8 bytes; or, to swap, replace a by b. The outcome tells what was there.
  bool atomic(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset, bool swap,
              std::size_t bytes, std::uint64_t a, std::uint64_t b);
  bool signal(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, Held& held = nothing_held);
  bool wait_signal(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, Held& held = nothing_held);
  bool cancel_wait(std::uint32_t group, std::uint64_t window, int rank, Ticket ticket);
  bool flush(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank);  // -1: every rank's

  // ---------------------------------------------------------------------------------------------------------- progress
  // Called by the loop: move things on, and hand over what is done.
  void progress(std::vector<Outcome>& outcomes, std::vector<Notice>& notices);
  // What was handed over is lost: no communicator can go on.
  void fail(const char* why);
  // Wait until whoever has the engine lock has given way.
  void wait_for_turn() { const std::lock_guard lock(lock_); }
  // Leave: wait until the peers have got everything, at most `patience` seconds, if the engine is sound; then stop.
  void close(bool sound, double patience) noexcept;
  // The process ends, and other threads may still call: they wait for ever, and so the engine must never be destroyed.
  void halt() noexcept;

 private:
  friend struct EngineInside;  // of the tests
  friend class Elsewhere;

  // What the inbox hands on.
  void handle(Group& group, const Header& header, const void* payload) override;
  bool agrees(Group& group, const Header& header) override;
  void pull(Request* receive, const Header& header, const Offer& offer) override;
  void failed(Group& group) noexcept override { reports_.fail(group); }

  void make_room(std::size_t peers);
  void ask_the_others(int dead);
  std::unique_ptr<Pool> make_pool(const Group& group, const std::vector<int>& local, int segment);
  Group& present(std::uint32_t id);  // of an engine that is not closed
  Group& opened(std::uint32_t id);   // the same, and the other ranks are known
  template <typename Step>
  void change_lanes(std::uint32_t id, const Step& step);  // Step: void (Lanes&)

  // An op whose outcome there will be room for.
  std::unique_ptr<Operation> expected(Ticket ticket, Group& group) {
    reports_.make_room();
    return std::make_unique<Operation>(reports_, group, ticket);
  }
  // The same, on the core that this thread is on.
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

  // A post starts its op, and has it finished if that takes no longer than a moment. Whoever moves things on never
  // wants what the caller holds, and so it may be kept but for the waits: for the lock, and for the op.
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
  // began: when its post was called. Returns when the op was done, ns; 0: it is not.
  std::uint64_t finish_post(Operation* op, std::uint64_t began, Held& held) noexcept;
  std::uint64_t spin(const Operation& op, std::uint64_t began) noexcept;  // returns when it last looked at the clock
  bool shares_core(const Operation& op) const noexcept;                   // with a rank that this one may wait for
  void give_core(const Operation& op, const Pacer::Spin& spin) noexcept;
  bool is_sole(const Operation& op) const noexcept;
  bool withdraw(Request* request);

  bool advance() noexcept;  // one look at everything
  bool waits_for_room() const;
  bool is_quiet() const;
  void run();
  void listen(int timeout_ms, bool worker) noexcept;  // to the control connections
  Pacer::Rest take_turn() noexcept;
  void wake_thread() noexcept;
  // What another thread than the loop's does when it has moved things on: the loop may be parked.
  void tell_loop() noexcept {
    if (ready()) reports_.wake_loop();
  }
  // What whoever has moved things on does when it leaves: there may be something left that the thread, which sleeps,
  // has not seen, and of which nobody tells it.
  void hand_on() noexcept {
    if (pacer_.asleep() && !is_quiet()) wake_thread();
  }
  // What is done where nobody can be told of an exception. Returns whether it went well; else all has failed.
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
  void handle_end(int peer, bool parted);  // of the control connection
  void apply_farewells(int peer);          // those for which all messages have come by now
  void handle_departure(Group& group, int rank, std::uint64_t collectives);
  void lose(Group& group) noexcept;  // release it, after the others can see that
  void release(Group& group) noexcept;
  // Wait until these have got all that was sent to them. False: some have not.
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
  std::unique_ptr<Pool> pool_;  // with the ranks of this host, if there are others
  Groups groups_;
  Schedules schedules_;
  Offers offers_;
  Inbox inbox_;
  Sender sender_;
  Windows windows_;
  Farewells farewells_;
  bool alone_ = true;                            // no peer is in this process
  int cores_ = std::numeric_limits<int>::max();  // of this host
  bool abroad_ = false;                          // there are peers on other hosts

  std::mutex closing_;
  bool stopping_ = false;
  long switches_ = 0;  // of the thread that posts, when it last gave its core away
  const pid_t process_ = getpid();
  std::optional<CudaThread> cuda_;  // if the device is a GPU
  std::thread thread_;
};

}  // namespace aiocomms
