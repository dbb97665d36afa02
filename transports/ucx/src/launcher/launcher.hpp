// The thread that calls NCCL in the event loop's place, and those that sleep on its events.
//
// The loop's thread hands over an op, and goes on. One thread of a device takes the ops in the order in which they were
// handed over, whatever communicator they are of: ranks that call NCCL's communicators in different orders may wait for
// each other for ever, and the program's order is the one that ranks have in common. It makes the op's stream wait for
// the caller's, calls NCCL, and records an event behind. CUDA may hold it there while its queue is full: the loop is
// not held, and whoever gives the communicator up does so on a thread of their own.
//
// A second thread of the device asks the first event of each stream, so that a short op costs no thread's sleep and
// waking, and a call that CUDA holds delays no op that has ended. What has not fired within `spin` is slept on by a
// thread of that stream, for CUDA lets a thread sleep on one event, and streams must not wait for each other; until its
// stream is empty, so that it costs no CPU where ops are long. Who sees an event fire puts the op on its port's list,
// and makes the port's descriptor readable once for all that is on it.
//
// One lock guards all of it. Nothing of CUDA or NCCL is called under it, nor the interpreter's lock waited for.
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

// One call of an op. Its numbers are those of NCCL; `count` of a copy are bytes.
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
  // The last one is of no op: a thread sleeps on what is under way, which is so at the first look or becomes so.
  enum Kind { kDone, kNccl, kCuda, kDropped, kAsleep };

  std::uint64_t id = 0;
  Kind kind = kDone;
  int code = 0;
};

struct LaunchPort;

// An op that was handed over. All but what the launching thread reads while it calls NCCL is guarded by the lock.
struct LaunchWork;

// A communicator of NCCL, with the stream of its own.
struct CommLine {
  CommLine(std::shared_ptr<LaunchPort> port, GpuStream stream, NcclComm comm)
      : port(std::move(port)), stream(stream), comm(comm) {}

  const std::shared_ptr<LaunchPort> port;
  const GpuStream stream;
  const NcclComm comm;
  std::deque<std::shared_ptr<LaunchWork>> pending;  // called, and not known to have ended
  std::size_t queued = 0;                           // handed over, and NCCL's call has not returned
  bool cut = false;                                 // NCCL is not called any more
  bool slept_on = false;                            // its pending ops are its thread's
  bool has_thread = false;
  std::condition_variable wake;  // of its thread
};

struct LaunchWork {
  std::uint64_t id;
  std::uint64_t number;  // of all ops of the launcher
  std::shared_ptr<CommLine> line;
  std::shared_ptr<PooledEvent> after;
  std::shared_ptr<PooledEvent> end;
  std::vector<LaunchCall> calls;
  bool called = false;
};

// What one user of a launcher hears: the ops that have ended, in the order in which that was seen.
struct LaunchPort {
  LaunchPort();
  LaunchPort(const LaunchPort&) = delete;
  LaunchPort& operator=(const LaunchPort&) = delete;
  ~LaunchPort();

  int fd;
  bool readable = false;
  bool told_asleep = false;  // since the user took what has ended
  bool lost = false;         // a call has failed, or the user gives up: NCCL is not called any more
  bool closed = false;       // nobody listens
  std::uint64_t ids = 0;
  std::vector<LaunchOutcome> ended;
  std::vector<std::weak_ptr<CommLine>> lines;
  std::unordered_map<std::uint64_t, std::shared_ptr<LaunchWork>> works;
};

class Launcher : public std::enable_shared_from_this<Launcher> {
 public:
  using Patience = std::optional<std::chrono::duration<double>>;  // none: as long as it takes

  Launcher(const GpuApi& api, int device, std::chrono::microseconds spin);
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  std::shared_ptr<LaunchPort> open();
  std::shared_ptr<CommLine> add(const std::shared_ptr<LaunchPort>& port, GpuStream stream, NcclComm comm);

  // The text of an op's failure.
  std::string cuda_error(int code) const { return CudaFailure(api_, code, "a collective or message").what(); }

  // Record an event at the present end of a stream, on the caller's thread.
  std::shared_ptr<PooledEvent> mark(GpuStream stream);
  // Make a stream wait for a mark, on the caller's thread.
  void join(GpuStream stream, const PooledEvent& mark) const;
  // Hand over an op. Never waits for CUDA or NCCL. Returns the op's number among those of its port.
  std::uint64_t launch(const std::shared_ptr<CommLine>& line, std::shared_ptr<PooledEvent> after,
                       std::vector<LaunchCall> calls);
  // Make a stream wait for an op: wait until NCCL was called for it, then have CUDA do the rest.
  void wait_stream(LaunchPort& port, std::uint64_t id, GpuStream stream);

  // The ops that have ended since the last call. Makes the descriptor unreadable.
  std::vector<LaunchOutcome> take(LaunchPort& port);

  // Call NCCL for a line no more: what is queued is dropped. Returns at once, on any thread.
  void cut(CommLine& line);
  // The same for all lines of a port.
  void cut(LaunchPort& port);
  // Wait until no op of a line waits for NCCL's call or is in it. Returns false if that takes longer.
  bool settle(CommLine& line, Patience patience);
  // Wait until NCCL was called for all that was handed over before, of any port, or this port is cut.
  void settle_all(LaunchPort& port);
  // Wait until all ops of a line, or of a port, have ended.
  void drain(CommLine& line);
  void drain(LaunchPort& port);
  // Drop what a port has, and its descriptor. Threads of its lines end with the op that they sleep on.
  void close(LaunchPort& port);
  // End the threads. One that CUDA or NCCL holds is left behind, and ends when it is let go.
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
  std::condition_variable given_;   // of the calling thread
  std::condition_variable called_;  // of the looking thread
  std::condition_variable moved_;   // of those who wait for it
  std::deque<WorkPtr> queue_;
  std::atomic<unsigned> news_given_ = 0;  // counts, so that who spins need not take the lock to see it
  std::atomic<unsigned> news_called_ = 0;
  std::vector<LinePtr> looked_at_;  // lines with pending ops that no thread of theirs sleeps on
  std::uint64_t numbers_ = 0;
  std::uint64_t calling_ = 0;  // the number of the op for which NCCL is being called; 0: none
  LaunchClock::time_point active_since_{};
  bool started_ = false;
  bool ending_ = false;
  int threads_ = 0;
};

}  // namespace aiocomms
