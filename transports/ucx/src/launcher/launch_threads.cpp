// The functions of the launcher's own threads.
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <new>
#include <system_error>
#include <thread>

#include "launcher/launcher.hpp"

namespace aiocomms {
namespace {

using Kind = LaunchOutcome::Kind;

// The pause of the polling thread between two looks if no thread could be started to sleep on an event.
constexpr std::chrono::milliseconds kNap{1};
// How often a spinning thread checks for news before it retakes the lock.
constexpr int kLooks = 20;

}  // namespace

void Launcher::enter_thread() const {
  int mode = GpuApi::kThreadLocal;  // Otherwise a call of CUDA on this thread would break a capture of another thread.
  api_.exchange_capture_mode(&mode);
  api_.set_device(device_);  // A later call reports the same error.
}

// Starts a detached thread, because NCCL and CUDA may hold a thread for long. The thread keeps its objects alive.
// Called under the lock.
void Launcher::start(void (Launcher::*run)(LinePtr), LinePtr line) {
  std::thread([self = shared_from_this(), run, line = std::move(line)] {
    pthread_setname_np(pthread_self(), line == nullptr ? "aiocomms nccl" : "aiocomms sleeps");
    self->enter_thread();
    bool goes_on = true;
    while (goes_on) {
      try {
        (self.get()->*run)(line);
        goes_on = false;
      } catch (const std::bad_alloc&) {  // Nothing else is thrown. An op that is lost by this ends with its deadline.
      }
    }
    const Lock lock(self->mutex_);
    --self->threads_;
    self->moved_.notify_all();
  }).detach();
  ++threads_;
}

void Launcher::run_calls(LinePtr) {
  Lock lock(mutex_);
  while (!ending_) {
    if (!queue_.empty()) {
      issue(lock);
    } else if (LaunchClock::now() - active_since_ < spin_) {
      pause(lock, news_given_, kLooks);  // The next op often comes soon, and a sleeping thread wakes late.
    } else {
      given_.wait(lock);
    }
  }
}

void Launcher::run_looks(LinePtr) {
  Lock lock(mutex_);
  while (!ending_) {
    if (!looked_at_.empty()) {
      look(lock);
    } else if (LaunchClock::now() - active_since_ < spin_) {
      pause(lock, news_called_, kLooks);
    } else {
      called_.wait(lock);
    }
  }
}

void Launcher::issue(Lock& lock) {
  const WorkPtr work = queue_.front();
  queue_.pop_front();
  CommLine& line = *work->line;
  LaunchOutcome outcome{work->id, Kind::kDropped, 0};
  if (!line.cut && !line.port->lost) {
    calling_ = work->number;
    lock.unlock();
    outcome = call(*work);
    lock.lock();
    calling_ = 0;
  }
  --line.queued;
  work->called = true;
  active_since_ = LaunchClock::now();
  if (outcome.kind == Kind::kDone) {
    if (line.slept_on) {
      tell_asleep(*line.port);
    } else if (line.pending.empty()) {
      looked_at_.push_back(work->line);
      news_called_.fetch_add(1, std::memory_order_relaxed);
      called_.notify_one();
    }
    line.pending.push_back(work);
  } else {
    conclude(work, outcome);
  }
  moved_.notify_all();
}

void Launcher::look(Lock& lock) {
  bool moved = false;
  for (const LinePtr& line : std::vector(looked_at_)) moved |= look_at(lock, line);
  std::erase_if(looked_at_, [](const LinePtr& line) { return line->pending.empty(); });
  if (moved) {
    active_since_ = LaunchClock::now();
  } else if (LaunchClock::now() - active_since_ >= spin_) {
    hand_to_sleepers();
    if (!looked_at_.empty()) called_.wait_for(lock, kNap);
  } else {
    pause(lock, news_called_, 1);
  }
}

// Concludes the finished ops of a line that this thread polls. Returns whether there was one.
bool Launcher::look_at(Lock& lock, const LinePtr& line) {
  bool moved = false;
  while (!line->pending.empty()) {
    const GpuEvent event = line->pending.front()->end->event;
    lock.unlock();
    const int code = query(event);
    lock.lock();
    if (code == GpuApi::kNotReady) break;
    conclude_head(*line, code);
    moved = true;
  }
  return moved;
}

// Waits without the lock, so that other threads can pass work on.
void Launcher::pause(Lock& lock, const std::atomic<unsigned>& news, int looks) {
  const unsigned seen = news.load(std::memory_order_relaxed);
  lock.unlock();
  for (int look = 0; look < looks && news.load(std::memory_order_relaxed) == seen; ++look) sched_yield();
  lock.lock();
}

void Launcher::hand_to_sleepers() {
  std::erase_if(looked_at_, [this](const LinePtr& line) {
    try {
      if (!line->has_thread) start(&Launcher::run_sleep, line);
    } catch (const std::system_error&) {  // The system allows no more threads.
      return false;
    }
    line->has_thread = line->slept_on = true;
    line->wake.notify_all();
    tell_asleep(*line->port);
    return true;
  });
}

void Launcher::run_sleep(LinePtr line) {
  Lock lock(mutex_);
  while (true) {
    line->wake.wait(lock, [&] { return line->slept_on || over(*line); });
    if (!line->slept_on) break;
    const GpuEvent event = line->pending.front()->end->event;
    lock.unlock();
    const int code = api_.event_synchronize(event);
    lock.lock();
    conclude_head(*line, code);
    // The thread also concludes ops that CUDA has finished meanwhile. The loop is then woken once for all.
    look_at(lock, line);
    line->slept_on = !line->pending.empty();
  }
  line->has_thread = false;
}

bool Launcher::over(const CommLine& line) const {
  return ending_ || line.port->closed || (line.cut && line.queued == 0 && line.pending.empty());
}

LaunchOutcome Launcher::call(LaunchWork& work) const {
  if (const int code = api_.stream_wait_event(work.line->stream, work.after->event, 0)) {
    return {work.id, Kind::kCuda, code};
  }
  const LaunchOutcome outcome = call_nccl(work);
  if (outcome.kind != Kind::kDone) return outcome;
  try {
    work.end = events_->take();
  } catch (const CudaFailure& failure) {
    return {work.id, Kind::kCuda, failure.code};
  }
  const int code = api_.event_record(work.end->event, work.line->stream);
  return {work.id, code ? Kind::kCuda : Kind::kDone, code};
}

// Makes the copies first. Several calls of NCCL form one group.
LaunchOutcome Launcher::call_nccl(const LaunchWork& work) const {
  std::size_t calls = 0;
  for (const LaunchCall& call : work.calls) {
    if (call.what != LaunchCall::kCopy) {
      ++calls;
    } else if (const int code =
                   api_.memcpy_async(call.recv, call.send, call.count, GpuApi::kDeviceToDevice, work.line->stream)) {
      return {work.id, Kind::kCuda, code};
    }
  }
  int status = calls > 1 ? api_.group_start() : 0;
  const bool grouped = calls > 1 && status == 0;
  for (const LaunchCall& call : work.calls) {
    if (status != 0 && status != GpuApi::kNcclInProgress) break;
    if (call.what != LaunchCall::kCopy) status = call_one(work, call);
  }
  if (grouped) {
    const int last = api_.group_end();
    if (status == 0 || status == GpuApi::kNcclInProgress) status = last;
  }
  if (status == GpuApi::kNcclInProgress) status = 0;
  return {work.id, status ? Kind::kNccl : Kind::kDone, status};
}

int Launcher::call_one(const LaunchWork& work, const LaunchCall& call) const {
  const NcclComm comm = work.line->comm;
  const GpuStream stream = work.line->stream;
  switch (call.what) {
    case LaunchCall::kAllReduce:
      return api_.all_reduce(call.send, call.recv, call.count, call.dtype, call.op, comm, stream);
    case LaunchCall::kReduce:
      return api_.reduce(call.send, call.recv, call.count, call.dtype, call.op, call.peer, comm, stream);
    case LaunchCall::kBroadcast:
      return api_.broadcast(call.send, call.recv, call.count, call.dtype, call.peer, comm, stream);
    case LaunchCall::kAllGather:
      return api_.all_gather(call.send, call.recv, call.count, call.dtype, comm, stream);
    case LaunchCall::kReduceScatter:
      return api_.reduce_scatter(call.send, call.recv, call.count, call.dtype, call.op, comm, stream);
    case LaunchCall::kSend:
      return api_.send(call.send, call.count, call.dtype, call.peer, comm, stream);
    case LaunchCall::kRecv:
      return api_.recv(call.recv, call.count, call.dtype, call.peer, comm, stream);
    case LaunchCall::kCopy:
      break;
  }
  return 0;
}

int Launcher::query(GpuEvent event) const {
  const int code = api_.event_query(event);
  // CUDA stores it as this thread's last error, which NCCL would find.
  if (code == GpuApi::kNotReady) api_.last_error();
  return code;
}

void Launcher::conclude_head(CommLine& line, int code) {
  const WorkPtr work = line.pending.front();
  line.pending.pop_front();
  conclude(work, {work->id, code ? Kind::kCuda : Kind::kDone, code});
}

void Launcher::conclude(const WorkPtr& work, LaunchOutcome outcome) {
  LaunchPort& port = *work->line->port;
  if (outcome.kind == Kind::kDone) work->after->fired = work->end->fired = true;
  if (outcome.kind == Kind::kNccl || outcome.kind == Kind::kCuda) port.lost = true;
  port.works.erase(work->id);
  tell(port, outcome);
  moved_.notify_all();
}

void Launcher::tell(LaunchPort& port, LaunchOutcome outcome) {
  if (port.closed) return;
  port.ended.push_back(outcome);
  const std::uint64_t one = 1;
  if (!port.readable) port.readable = ::write(port.fd, &one, sizeof one) == sizeof one;
}

void Launcher::tell_asleep(LaunchPort& port) {
  if (!port.told_asleep) tell(port, {0, Kind::kAsleep, 0});
  port.told_asleep = true;
}

// Drops the queued ops of one line, or of all lines of a port.
void Launcher::drop_queued(const CommLine* line, const LaunchPort* port) {
  std::vector<WorkPtr> dropped;
  std::erase_if(queue_, [&](const WorkPtr& work) {
    const bool drops = work->line.get() == line || work->line->port.get() == port;
    if (drops) dropped.push_back(work);
    return drops;
  });
  for (const WorkPtr& work : dropped) {
    --work->line->queued;
    conclude(work, {work->id, Kind::kDropped, 0});
  }
  moved_.notify_all();
}

}  // namespace aiocomms
