// Calls NCCL on its own thread instead of the event loop's, and waits for NCCL's events on other threads.
//
// The loop's thread queues an op and continues. One thread per device takes the ops of all communicators in the order
// of the queue. Ranks that call NCCL's communicators in different orders may wait for each other forever, and the
// program's order is common to all ranks. The thread makes the op's stream wait for the caller's stream, calls NCCL,
// and records an event. CUDA may hold the thread while its queue is full. This does not hold the loop. A caller gives
// up a communicator on another thread.
//
// A second thread per device polls the first event of each stream. So a short op costs no sleep and wake-up, and a call
// that CUDA holds does not delay ops that have ended. If an event does not fire within `spin`, a thread of its stream
// sleeps on it. CUDA lets a thread sleep on one event, and streams must not wait for each other. That thread continues
// until its stream is empty, so long ops cost no CPU time. The thread that sees an event fire adds the op to its port's
// list. It makes the port's descriptor readable once for the whole list.
//
// One lock guards everything. No function of CUDA or NCCL is called under it, and no thread waits for the interpreter's
// lock under it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "launcher/event_pool.hpp"
#include "launcher/gpu_api.hpp"

namespace aiocomms {

using LaunchClock = std::chrono::steady_clock;

// One call of an op. Its numbers are those of NCCL. The `count` of a copy is in bytes.
struct LaunchCall {
  enum What { kCopy, kAllReduce, kReduce, kBroadcast, kAllGather, kReduceScatter, kSend, kRecv };

  What what;
  const void* send;
  void* recv;
  std::size_t count;
  int dtype;
  int op;
  int peer;
};

struct LaunchOutcome {
  // kAsleep belongs to no op. It reports that a thread sleeps on unfinished ops, or soon will.
  enum Kind { kDone, kNccl, kCuda, kDropped, kAsleep };

  std::uint64_t id = 0;
  Kind kind = kDone;
  int code = 0;
};

struct LaunchPort;

// A queued op. The lock guards all its fields, except those that the launching thread reads during NCCL's call.
struct LaunchWork;

// A communicator of NCCL and its own stream.
struct CommLine {
  CommLine(std::shared_ptr<LaunchPort> port, GpuStream stream, NcclComm comm)
      : port(std::move(port)), stream(stream), comm(comm) {}

  const std::shared_ptr<LaunchPort> port;
  const GpuStream stream;
  const NcclComm comm;
  std::deque<std::shared_ptr<LaunchWork>> pending;  // called, and not known to have ended
  std::size_t queued = 0;                           // queued ops whose call of NCCL has not returned
  bool cut = false;                                 // NCCL is not called any more
  bool slept_on = false;                            // the line's thread handles its pending ops
  bool has_thread = false;
  std::condition_variable wake;  // for its thread
};

struct LaunchWork {
  std::uint64_t id;
  std::uint64_t number;  // among all ops of the launcher
  std::shared_ptr<CommLine> line;
  std::shared_ptr<PooledEvent> after;
  std::shared_ptr<PooledEvent> end;
  std::vector<LaunchCall> calls;
  bool called = false;
};

// The outcomes for one user of a launcher, in the order in which the launcher saw them.
struct LaunchPort {
  LaunchPort();
  LaunchPort(const LaunchPort&) = delete;
  LaunchPort& operator=(const LaunchPort&) = delete;
  ~LaunchPort();

  int fd;
  bool readable = false;
  bool told_asleep = false;  // since the user last took outcomes
  bool lost = false;         // NCCL is not called any more, because a call has failed or the user has given up
  bool closed = false;       // the user has closed the port
  std::uint64_t ids = 0;
  std::vector<LaunchOutcome> ended;
  std::vector<std::weak_ptr<CommLine>> lines;
  std::unordered_map<std::uint64_t, std::shared_ptr<LaunchWork>> works;
};

class Launcher : public std::enable_shared_from_this<Launcher> {
 public:
  using Patience = std::optional<std::chrono::duration<double>>;  // none: without a limit

  Launcher(const GpuApi& api, int device, std::chrono::microseconds spin);
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  std::shared_ptr<LaunchPort> open();
  std::shared_ptr<CommLine> add(const std::shared_ptr<LaunchPort>& port, GpuStream stream, NcclComm comm);

  // The text of an op's failure.
  std::string cuda_error(int code) const { return CudaFailure(api_, code, "a collective or message").what(); }

  // Records an event at the present end of a stream, on the caller's thread.
  std::shared_ptr<PooledEvent> mark(GpuStream stream);
  // Makes a stream wait for a mark, on the caller's thread.
  void join(GpuStream stream, const PooledEvent& mark) const;
  // Queues an op, and never waits for CUDA or NCCL. Returns the op's number on its port.
  std::uint64_t launch(const std::shared_ptr<CommLine>& line, std::shared_ptr<PooledEvent> after,
                       std::vector<LaunchCall> calls);
  // Makes a stream wait for an op. It waits until NCCL was called for the op, and CUDA does the rest.
  void wait_stream(LaunchPort& port, std::uint64_t id, GpuStream stream);

  // The ops that have ended since the last call. It makes the descriptor unreadable.
  std::vector<LaunchOutcome> take(LaunchPort& port);

  // Stops calls of NCCL for a line, and drops its queued ops. It returns at once, on any thread.
  void cut(CommLine& line);
  // The same for all lines of a port.
  void cut(LaunchPort& port);
  // Waits until no op of a line is queued or in NCCL's call. Returns false after `patience`.
  bool settle(CommLine& line, Patience patience);
  // Waits until NCCL was called for all earlier ops of any port, or this port is cut.
  void settle_all(LaunchPort& port);
  // Waits until all ops of a line, or of a port, have ended.
  void drain(CommLine& line);
  void drain(LaunchPort& port);
  // Drops the queued ops of a port, and closes its descriptor. A thread of its lines ends with the op that it sleeps
  // on.
  void close(LaunchPort& port);
  // Ends the threads. A thread that CUDA or NCCL holds is left behind, and ends when it is released.
  void end(Patience patience);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using LinePtr = std::shared_ptr<CommLine>;
  using WorkPtr = std::shared_ptr<LaunchWork>;

  template <typename Ready>
  bool wait(Lock& lock, Patience patience, Ready ready);
  void enter_thread() const;
  void start(void (Launcher::*run)(LinePtr), LinePtr line);
  void run_calls(LinePtr);
  void run_looks(LinePtr);
  void run_sleep(LinePtr line);
  void issue(Lock& lock);
  void look(Lock& lock);
  bool look_at(Lock& lock, const LinePtr& line);
  void pause(Lock& lock, const std::atomic<unsigned>& news, int looks);
  void hand_to_sleepers();
  LaunchOutcome call(LaunchWork& work) const;
  LaunchOutcome call_nccl(const LaunchWork& work) const;
  int call_one(const LaunchWork& work, const LaunchCall& call) const;
  int query(GpuEvent event) const;
  void tell(LaunchPort& port, LaunchOutcome outcome);
  void tell_asleep(LaunchPort& port);
  void conclude(const WorkPtr& work, LaunchOutcome outcome);
  void conclude_head(CommLine& line, int code);
  void drop_queued(const CommLine* line, const LaunchPort* port);
  bool over(const CommLine& line) const;

  const GpuApi api_;
  const int device_;
  const std::chrono::microseconds spin_;
  const std::shared_ptr<EventPool> events_;

  std::mutex mutex_;
  std::condition_variable given_;   // for the calling thread
  std::condition_variable called_;  // for the polling thread
  std::condition_variable moved_;   // for threads that wait for progress
  std::deque<WorkPtr> queue_;
  std::atomic<unsigned> news_given_ = 0;  // counters, which a spinning thread reads without the lock
  std::atomic<unsigned> news_called_ = 0;
  std::vector<LinePtr> looked_at_;  // lines with pending ops and no thread that sleeps on them
  std::uint64_t numbers_ = 0;
  std::uint64_t calling_ = 0;  // The number of the op in NCCL's call. 0: none.
  LaunchClock::time_point active_since_{};
  bool started_ = false;
  bool ending_ = false;
  int threads_ = 0;
};

}  // namespace aiocomms
