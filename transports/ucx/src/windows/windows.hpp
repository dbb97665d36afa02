// One-sided operations. Memory of a rank on this host is mapped into this process and used directly. UCX reads and
// writes the memory of all other ranks. A signal is a message that follows all earlier puts.
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
  // device: users' memory is a device's, and no pointer to it is followed here.
  Windows(Network& network, bool device) : network_(network), device_(device) {}

  // See Engine::map_window and the methods below it. std::out_of_range: there is no such window, or the range exceeds
  // it.
  std::string map(Group& group, std::uint64_t window, void* data, std::size_t bytes, bool remote);
  void open(Group& group, std::uint64_t window, int rank, void* mapped, const std::string& rkey, std::uint64_t address,
            std::size_t bytes);
  void close(Group& group, std::uint64_t window);

  // The bytes of an op.
  struct Place {
    std::uint64_t window;
    int rank;
    std::uint64_t offset;
    std::size_t bytes;
  };
  void put(Operation* op, const Place& place, const void* data);
  void put_signal(Operation* op, const Place& place, const void* data);  // a put and a signal that follows it
  void get(Operation* op, const Place& place, void* data);
  // Equal runs of bytes, each with its own source and destination.
  struct Runs {
    std::uint64_t window;
    int rank;
    std::size_t bytes;                   // of one run
    std::vector<std::uint64_t> offsets;  // in the rank's part
    std::vector<std::uint64_t> starts;   // in this rank's memory, equally many
  };
  void put_v(Operation* op, const Runs& runs, const std::byte* data);
  void get_v(Operation* op, const Runs& runs, std::byte* data);
  void change_atomically(Operation* op, const Place& place, bool swap, std::uint64_t a, std::uint64_t b);
  void signal(Operation* op, std::uint64_t window, int rank);
  void wait_signal(Operation* op, std::uint64_t window, int rank);
  void flush(Operation* op, std::uint64_t window, int rank);  // -1: every rank's
  // Withdraws a wait that no signal has ended. Null: a signal has ended it.
  Request* withdraw_wait(Group& group, std::uint64_t window, int rank, Ticket ticket);

  // ------------------------------------------------------------------------------------------- messages of other ranks
  void accept_signal(Group& group, const Header& header);
  void serve_atomic(Group& group, const Header& header, const void* payload);
  void end_atomic(Group& group, const Header& answer) noexcept;
  // A rank has closed the communicator. The waits for its signals end.
  void end_waits(Group& group, int rank) noexcept;

  // ---------------------------------------------------------------------------------------------------------- progress
  // Copies one piece of the first copy. Returns whether there was one.
  bool advance_jobs() noexcept { return !jobs_.empty() && advance_job(); }
  // Begins the operations that have their turn. Returns whether one began.
  bool advance_lanes() noexcept;
  bool has_jobs() const { return !jobs_.empty(); }
  // Whether operations have not begun yet. No event announces room for them.
  bool has_waiting_ops() const { return !waiting_.empty(); }

  // release: the communicator is lost, and its operations stop. close_lanes: it is closed, but UCX may still hold its
  // memory.
  void release(Group& group) noexcept;
  void close_lanes(Group& group) noexcept;
  // The engine closes.
  void destroy_keys() noexcept;

 private:
  // The most bytes of one copy. A post may wait for the engine's lock for so long.
  static constexpr std::size_t kStep = 64 * 1024;

  // A copy and its continuation. Jobs run one after the other.
  struct Job {
    Operation* op;
    Copy copy;
    std::function<void(Operation*)> then;  // ends the op
    std::vector<Copy> more = {};           // the op's other copies, the next one last
  };
  // The waiter for an atomic's answer, and the destination of the old value.
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
  void enqueue(Lane& lane, Lane::Op op) noexcept;  // without memory, the op ends with an error
  bool advance_lane(Lane& lane) noexcept;
  void ask_atomic(Operation* op, int rank, std::uint64_t window, const Atomic& what);

  Network& network_;
  const bool device_;
  std::deque<Job> jobs_;
  std::list<Lane> lanes_;       // A list, because UCX keeps pointers to lanes.
  std::vector<Lane*> waiting_;  // lanes with ops that have not begun
  std::unordered_map<std::uint64_t, Question> questions_;
  std::uint64_t last_question_ = 0;
};

}  // namespace aiocomms
