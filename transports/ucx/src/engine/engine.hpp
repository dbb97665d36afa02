// The engine: one rank's worker, control connections and thread, for a communicator and all that are split from it.
//
// An op is posted on the loop's thread, which looks for a moment whether it can be done at once. What is left is moved
// on by whoever comes by: the loop, while it polls, or the engine's own thread, which sleeps while there is nothing to
// do, waits while the loop is about, and takes over when the loop has not come for kLoopAway. One lock guards all; the
// thread gives way when the loop wants it.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/group.hpp"
#include "engine/pacer.hpp"
#include "engine/priority_lock.hpp"
#include "engine/reports.hpp"
#include "net/control.hpp"
#include "net/cuda_thread.hpp"
#include "net/worker.hpp"
#include "windows/ordering.hpp"

namespace aiocomms {

// A rank leaves a communicator ('B'), or altogether ('E'): it counts once all that it has sent has come.
struct Farewell {
  char kind;
  std::uint32_t order;        // messages sent before
  std::uint32_t group, rank;  // as the receiver knows them
  std::uint64_t collectives;  // that the rank has done

  std::string pack() const;
  static bool unpack(const std::string& frame, Farewell& farewell);
};

struct Peer {
  pid_t pid = 0;       // its process, if that is on this host
  pid_t readable = 0;  // the same, if this process may read its memory
};

class Engine {
 public:
  // rank, size: in the family, that is, the communicator that all others are split from.
  // device: see Worker; and whose thread is to use it, if it is a GPU's.
  Engine(int rank, int size, const std::vector<std::pair<std::string, std::string>>& options,
         std::optional<ucs_memory_type_t> device);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::string address() const { return worker_->address(); }
  // sockets: a connection to each peer, taken over. pids: of peers on this host, else 0.
  // crowded: there are more ranks than cores on this host. cookies: what tells each peer's messages from strangers'.
  void start(const std::vector<std::string>& addresses, std::vector<int> sockets, const std::vector<int>& pids,
             bool crowded, const std::vector<Cookies>& cookies);
  int fileno() const { return reports_.fileno(); }
  bool ready() const { return reports_.ready(); }
  bool bulk() const { return pacer_.bulk(); }

  // ------------------------------------------------------------------------------------------------- communicators
  std::uint32_t add_group(int rank, std::vector<int> peers);
  // segment: shared memory of the ranks in `local`, not taken over; -1: this rank is alone on its host. hosts: by rank.
  // readable: each rank of this host may read each other's memory.
  void open_group(std::uint32_t group, std::vector<std::uint32_t> their_ids, int segment, std::vector<int> hosts,
                  bool readable);
  bool reads_all(const std::vector<int>& peers) const;  // whether this rank may read the memory of those on its host
  void lose_group(std::uint32_t group);                 // nothing of it is moved on any more
  void close_group(std::uint32_t group);                // and the others are told
  bool send_frame(int peer, const std::string& frame) { return control_->send(peer, frame); }
  std::vector<std::uint64_t> signs() { return control_->signs(); }
  bool has_let_go(std::uint32_t group, int rank);  // whether a rank of this host has lost the communicator
  std::vector<int> missing(std::uint32_t group);   // the ranks that the collective under way waits for

  // ------------------------------------------------------------ ops
  // True: done, and nothing else is to be told. False: the outcome follows, under the ticket that the caller gave it.
  bool send(Ticket ticket, std::uint32_t group, const void* data, std::size_t bytes, int dst, int channel,
            std::int64_t tag, int dtype);
  bool recv(Ticket ticket, std::uint32_t group, void* data, std::size_t bytes, int src, int channel, std::int64_t tag,
            int dtype);
  bool cancel(std::uint32_t group, int src, int channel, std::int64_t tag, Ticket ticket);
  // As much of a message that was too long for a device's buffer as would have fit; once, when its outcome is known.
  std::string head(Ticket ticket);
  // make: Task make(Group&, Unequal&), the schedule; called before this returns. Not 0: done, at that second of the
  // monotonic clock. 0: the outcome follows.
  template <typename Make>
  double collective(Ticket ticket, std::uint32_t id, std::uint64_t mark, const Make& make) {
    std::lock_guard lock(lock_);
    Group& where = group(id);
    auto request = new Request(*this, where, ticket);
    return static_cast<double>(begin(where, {make(where, request->unequal), mark, request})) * 1e-9;
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
           std::size_t bytes);
  bool get(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset, void* data,
           std::size_t bytes);
  // Add a to an element of 4 or 8 bytes; or, to swap, replace a by b. The outcome tells what was there.
  bool atomic(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset, bool swap,
              std::size_t bytes, std::uint64_t a, std::uint64_t b);
  bool signal(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank);
  bool wait_signal(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank);
  bool cancel_wait(std::uint32_t group, std::uint64_t window, int rank, Ticket ticket);
  bool flush(Ticket ticket, std::uint32_t group, std::uint64_t window, int rank);  // -1: every rank's

  // ---------------------------------------------------------------------------------------------------------- progress
  // Called by the loop: move things on, and hand over what is done.
  void progress(std::vector<Outcome>& outcomes, std::vector<Notice>& notices);
  // Leave: wait until the peers have got everything, at most `patience` seconds, if the engine is sound; then stop.
  void close(bool sound, double patience);

 private:
  friend struct Request;
  friend struct Outgoing;
  friend struct Incoming;
  friend class Wire;

  // A copy, in pieces; and what is to be done after it. Jobs are done one after the other.
  struct Job {
    std::byte* to;
    const std::byte* from;  // in the memory of process `pid`, if that is not 0
    std::size_t bytes;
    Request* request;
    std::function<void(Request*)> then;  // in place of completing the request
    pid_t pid = 0;
    // Of a message whose sender can help; see offers.cpp.
    int helper = -1;            // its rank, else -1
    std::uint64_t number = 0;   // of its offer
    bool called = false;        // it has been told to
    std::size_t read = 0;       // bytes, from the beginning
    std::uint64_t emptied = 0;  // slots
  };

  // The one decision on device memory. What a user's message carries then is never looked at, copied, offered or mapped
  // here: UCX alone moves it, by its descriptor or a window's key. All else in this file is as ever, for the engine's
  // own memory: barriers, what ranks tell each other of their windows, signals.
  bool on_device(const Header& header) const { return worker_->device() && header.channel < kUserChannels; }
  // What a call of UCX on a user's memory has returned.
  void follow(Request* request, ucs_status_t status, Pending* pending = nullptr);

  Group& group(std::uint32_t id);
  std::uint64_t begin(Group& group, Schedule schedule);
  // began: when its post was called. Returns when it was done, ns; 0: it is not.
  std::uint64_t settle(Request* request, std::uint64_t began = now_ns());
  std::uint64_t spin(const Request& request, std::uint64_t began);  // returns when it last looked at the clock
  void complete(Request* request, Status status, std::uint64_t a = 0, std::uint64_t b = 0);

  bool advance();  // one look at everything
  bool advance_group(Group& group);
  void begin_next(Group& group);
  void end_finished(Group& group);  // the schedules that have come to their end
  void rouse(Group& group);
  void check_mark(Group& group, int source, std::uint64_t collective, std::uint64_t mark);
  void disagree(Group& group, int source, std::uint64_t collective);

  ucs_status_t dispatch(Group& group, int rank, Header header, const void* data, Pending* pending);
  void answered(const Header& header);
  void tell(Group& group, int rank, Channel channel, std::uint64_t number, std::uint64_t value);
  bool may_help(const Group& group, int rank, std::size_t bytes) const;
  bool share(Job& job);
  void called(Group& group, const Header& header);
  bool pour();
  void asked(Group& group, const Header& header, const void* payload);
  void pull(Request* recv, const Header& header, const void* payload);
  void arrived(int peer, const Header& header, const void* payload, void* descriptor);
  void forget_early(int peer);
  bool sensible(const Group& group, int peer, const Header& header, void* descriptor) const;
  void deliver(Group& group, const Header& header, const void* payload, void* descriptor);
  bool stale(Request* recv, const Header& header);
  void take(Request* recv, const Header& header, const void* payload, void* descriptor);
  void came(Request* recv, const Header& header);
  void vouched(Group& group, const Header& header);
  void signalled(Group& group, const Header& header);
  void heard(int peer, std::string frame);
  void obey(int peer);  // the farewells for which all messages have come by now
  void left(Group& group, int rank, std::uint64_t collectives);

  bool act(Request* request, Job job);
  Lane& lane(Group& group, int rank);
  void line_up(Lane& lane, Lane::Op op);
  bool advance_lane(Lane& lane);
  bool advance_lanes();
  void flush_lane(Lane& lane);
  void close_lanes(Group& group);
  bool advance_jobs(std::deque<Job>& jobs);
  bool copy_next(Job& job, std::size_t most);
  void lose(Group& group);  // drop it, after the others can see that
  void drop(Group& group);
  void drop_schedules(Group& group);
  void bury();
  Window::Part& part(std::uint32_t group, std::uint64_t window, int rank);
  Window::Part& part(std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset, std::size_t bytes);

  void run();
  Pacer::Rest take_turn();
  void announce_sleep(bool asleep);
  void wake_thread();
  bool waits_for_room() const;
  bool quiet() const;
  void part_from_peers(const std::function<bool()>& patient);

  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Control> control_;
  int rank_;
  int size_;
  std::vector<Peer> peers_;
  std::vector<std::uint32_t> received_;                   // messages, by peer
  std::vector<std::vector<Farewell>> farewells_;          // that wait for messages, by peer
  std::vector<std::map<std::uint32_t, Message*>> early_;  // messages that overtook others, by peer
  std::vector<bool> awaited_;                             // peers that have not acknowledged this one's farewell yet

  PriorityLock lock_;
  Pacer pacer_;
  Reports reports_{pacer_};
  std::unordered_map<std::uint32_t, std::unique_ptr<Group>> groups_;
  std::vector<Group*> active_;                     // those whose schedule has begun
  std::vector<std::unique_ptr<Group>> lost_;       // closed ones of which UCX still holds something
  std::vector<std::pair<Group*, Event*>> events_;  // that UCX has finished; schedules go on outside its calls
  std::deque<Job> jobs_;                           // on windows
  std::deque<Job> pulls_;                          // of offered messages
  std::list<Lane> lanes_;                          // that stay where they are: UCX knows some of them
  std::vector<Lane*> lined_up_;                    // those with ops that have not begun
  std::uint32_t next_group_ = 0;
  // Who waits for the answer to an offer or an atomic, and where the value goes that it brings.
  struct Asked {
    Group* group;
    Pending* pending;
    std::uint64_t* value;
    // Of an offer:
    int rank = -1;                    // the receiver
    const std::byte* data = nullptr;  // the message
    std::size_t bytes = 0;            // of it, that have not been in slots
    std::uint64_t filled = 0;         // slots
  };
  std::unordered_map<std::uint64_t, Asked> asked_;
  std::uint64_t next_question_ = 0;
  std::deque<std::uint64_t> pours_;  // offers whose receivers have called
  std::size_t moving_ = 0;           // calls of UCX on a device's memory that it has not finished
  bool stopping_ = false;
  pid_t process_ = getpid();
  std::optional<CudaThread> cuda_;  // if the device is a GPU
  std::thread thread_;
};

}  // namespace aiocomms
