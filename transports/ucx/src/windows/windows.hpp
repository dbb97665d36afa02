// One-sided operations. Memory of a rank on this host is mapped into this process and used directly; for any other UCX
// reads and writes it. A signal is a message behind all that was put before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/group.hpp"
#include "engine/request.hpp"
#include "net/copy.hpp"
#include "net/network.hpp"
#include "windows/ordering.hpp"

namespace aiocomms {

class Windows {
 public:
  // device: users' memory is a device's: no pointer to it is followed here.
  Windows(Network& network, bool device) : network_(network), device_(device) {}

  // See Engine::map_window and so on. std::out_of_range: there is no such window, or the bytes do not lie within.
  std::string map(Group& group, std::uint64_t window, void* data, std::size_t bytes, bool remote);
  void open(Group& group, std::uint64_t window, int rank, void* mapped, const std::string& rkey, std::uint64_t address,
            std::size_t bytes);
  void close(Group& group, std::uint64_t window);

  // Where the bytes lie that an op is about.
  struct Place {
    std::uint64_t window;
    int rank;
    std::uint64_t offset;
    std::size_t bytes;
  };
  void put(Operation* op, const Place& place, const void* data);
  void put_signal(Operation* op, const Place& place, const void* data);  // both, the signal behind the put
  void get(Operation* op, const Place& place, void* data);
  // Equal runs of bytes, each from its own place to its own.
  struct Runs {
    std::uint64_t window;
    int rank;
    std::size_t bytes;                   // of a run
    std::vector<std::uint64_t> offsets;  // in the rank's part
    std::vector<std::uint64_t> starts;   // in this rank's memory; as many
  };
  void put_v(Operation* op, const Runs& runs, const std::byte* data);
  void get_v(Operation* op, const Runs& runs, std::byte* data);
  void change_atomically(Operation* op, const Place& place, bool swap, std::uint64_t a, std::uint64_t b);
  void signal(Operation* op, std::uint64_t window, int rank);
  void wait_signal(Operation* op, std::uint64_t window, int rank);
  void flush(Operation* op, std::uint64_t window, int rank);  // -1: every rank's
  // Take back a wait that no signal has ended; null if one has.
  Request* withdraw_wait(Group& group, std::uint64_t window, int rank, Ticket ticket);

  // ------------------------------------------------------------------------------------------ what the others have
  // sent
  void accept_signal(Group& group, const Header& header);
  void serve_atomic(Group& group, const Header& header, const void* payload);
  void end_atomic(Group& group, const Header& answer) noexcept;
  // A rank has closed the communicator: nobody waits for its signals any more.
  void end_waits(Group& group, int rank) noexcept;

  // ---------------------------------------------------------------------------------------------------------- progress
  // One piece of the first copy. Returns whether there was one.
  bool advance_jobs() noexcept { return !jobs_.empty() && advance_job(); }
  // Operations begin whose turn it is. Returns whether one did.
  bool advance_lanes() noexcept;
  bool has_jobs() const { return !jobs_.empty(); }
  // Whether operations have not begun yet: nobody tells of room for them.
  bool has_waiting_ops() const { return !waiting_.empty(); }

  // The communicator is lost: nothing of it is moved on any more. It is closed: UCX may still hold something of it.
  void release(Group& group) noexcept;
  void close_lanes(Group& group) noexcept;
  // The engine closes.
  void destroy_keys() noexcept;

 private:
  // What is copied without a look at anything else: a post may wait for so long for the engine's lock.
  static constexpr std::size_t kStep = 64 * 1024;

  // A copy, and what is done after it. Jobs are done one after the other.
  struct Job {
    Operation* op;
    Copy copy;
    std::function<void(Operation*)> then;  // ends the op
    std::vector<Copy> more = {};           // the op's other copies, the next one last
  };
  // Who waits for the answer to an atomic, and where the value goes that it brings.
  struct Question {
    Group* group;
    int rank;
    Pending* pending;
    std::uint64_t* value;
  };

  Window::Part& part_of(Group& group, std::uint64_t window, int rank);
  Window::Part& part_of(Group& group, const Place& place);
  Window::Part& part_of(Group& group, const Runs& runs);
  template <typename Then>
  void copy(Operation* op, Copy copy, const Then& then);
  void copy_all(Operation* op, std::vector<Copy> copies);
  void put_far(Group& group, Pending* pending, const Place& place, const void* data);
  void get_far(Group& group, Pending* pending, const Place& place, void* data);
  template <typename Far>
  void move_far(Operation* op, const Runs& runs, const Far& far);
  void send_signal(Group& group, Pending* pending, std::uint64_t window, int rank);
  bool advance_job() noexcept;
  Lane& lane_to(Group& group, int rank);
  void enqueue(Lane& lane, Lane::Op op) noexcept;  // it ends where there is no memory
  bool advance_lane(Lane& lane) noexcept;
  void ask_atomic(Operation* op, int rank, std::uint64_t window, const Atomic& what);

  Network& network_;
  const bool device_;
  std::deque<Job> jobs_;
  std::list<Lane> lanes_;       // that stay where they are: UCX knows some of them
  std::vector<Lane*> waiting_;  // those with ops that have not begun
  std::unordered_map<std::uint64_t, Question> questions_;
  std::uint64_t last_question_ = 0;
};

}  // namespace aiocomms
