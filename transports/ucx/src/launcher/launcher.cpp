// The launcher's functions for its users' threads.
#include "launcher/launcher.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace aiocomms {
LaunchPort::LaunchPort() : fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

LaunchPort::~LaunchPort() {
  if (fd >= 0) ::close(fd);
}

Launcher::Launcher(const GpuApi& api, int device, std::chrono::microseconds spin)
    : api_(api), device_(device), spin_(spin), events_(std::make_shared<EventPool>(api)) {}

std::shared_ptr<LaunchPort> Launcher::open() { return std::make_shared<LaunchPort>(); }

std::shared_ptr<CommLine> Launcher::add(const std::shared_ptr<LaunchPort>& port, GpuStream stream, NcclComm comm) {
  auto line = std::make_shared<CommLine>(port, stream, comm);
  const Lock lock(mutex_);
  std::erase_if(port->lines, [](const auto& other) { return other.expired(); });
  port->lines.push_back(line);
  return line;
}

std::shared_ptr<PooledEvent> Launcher::mark(GpuStream stream) {
  const OnDevice here(api_, device_);  // The caller's current device may be another one.
  auto event = events_->take();
  if (const int code = api_.event_record(event->event, stream)) throw CudaFailure(api_, code, "recording an event");
  return event;
}

void Launcher::join(GpuStream stream, const PooledEvent& mark) const {
  const OnDevice here(api_, device_);
  if (const int code = api_.stream_wait_event(stream, mark.event, 0)) throw CudaFailure(api_, code, "a stream's wait");
}

std::uint64_t Launcher::launch(const LinePtr& line, std::shared_ptr<PooledEvent> after, std::vector<LaunchCall> calls) {
  auto work = std::make_shared<LaunchWork>();
  work->line = line;
  work->after = std::move(after);
  work->calls = std::move(calls);
  const Lock lock(mutex_);
  LaunchPort& port = *line->port;
  if (!started_) {
    start(&Launcher::run_calls, nullptr);
    start(&Launcher::run_looks, nullptr);
    started_ = true;
  }
  work->id = ++port.ids;
  work->number = ++numbers_;
  port.works.emplace(work->id, work);
  if (line->cut || port.lost || port.closed || ending_) {
    conclude(work, {work->id, LaunchOutcome::kDropped, 0});
  } else {
    queue_.push_back(work);
    ++line->queued;
    news_given_.fetch_add(1, std::memory_order_relaxed);
    given_.notify_one();
  }
  return work->id;
}

void Launcher::wait_stream(LaunchPort& port, std::uint64_t id, GpuStream stream) {
  std::shared_ptr<PooledEvent> end;  // The event is kept alive, so that no other op records it meanwhile.
  {
    Lock lock(mutex_);
    const auto found = port.works.find(id);
    if (found == port.works.end()) return;
    const WorkPtr work = found->second;
    wait(lock, {}, [&] { return work->called || !port.works.contains(id); });
    end = work->end;
  }
  if (end != nullptr) join(stream, *end);
}

std::vector<LaunchOutcome> Launcher::take(LaunchPort& port) {
  const Lock lock(mutex_);
  if (port.readable) {
    std::uint64_t count;
    port.readable = port.fd >= 0 && ::read(port.fd, &count, sizeof count) < 0 && errno == EINTR;
  }
  port.told_asleep = false;
  return std::exchange(port.ended, {});
}

void Launcher::cut(CommLine& line) {
  const Lock lock(mutex_);
  line.cut = true;
  drop_queued(&line, nullptr);
  line.wake.notify_all();
}

void Launcher::cut(LaunchPort& port) {
  const Lock lock(mutex_);
  port.lost = true;
  drop_queued(nullptr, &port);
}

bool Launcher::settle(CommLine& line, Patience patience) {
  Lock lock(mutex_);
  return wait(lock, patience, [&] { return line.queued == 0; });
}

void Launcher::settle_all(LaunchPort& port) {
  Lock lock(mutex_);
  wait(lock, {}, [&, last = numbers_] {
    const bool called = queue_.empty() || queue_.front()->number > last;
    return port.lost || port.closed || (called && (calling_ == 0 || calling_ > last));
  });
}

void Launcher::drain(CommLine& line) {
  Lock lock(mutex_);
  wait(lock, {}, [&] { return line.queued == 0 && line.pending.empty(); });
}

void Launcher::drain(LaunchPort& port) {
  Lock lock(mutex_);
  wait(lock, {}, [&] { return port.works.empty(); });
}

void Launcher::close(LaunchPort& port) {
  const Lock lock(mutex_);
  port.closed = true;
  drop_queued(nullptr, &port);
  port.ended.clear();
  if (port.fd >= 0) ::close(std::exchange(port.fd, -1));
  for (const auto& other : port.lines) {
    if (const LinePtr line = other.lock()) line->wake.notify_all();
  }
  moved_.notify_all();
}

void Launcher::end(Patience patience) {
  {
    Lock lock(mutex_);
    ending_ = true;
    given_.notify_all();
    called_.notify_all();
    wait(lock, patience, [&] { return threads_ == 0; });
    for (const LinePtr& line : std::exchange(looked_at_, {})) {
      for (const WorkPtr& work : std::exchange(line->pending, {}))
        conclude(work, {work->id, LaunchOutcome::kDropped, 0});
    }
  }
  events_->clear();
}

template <typename Ready>
bool Launcher::wait(Lock& lock, Patience patience, Ready ready) {
  if (patience) return moved_.wait_for(lock, *patience, ready);
  moved_.wait(lock, ready);
  return true;
}

}  // namespace aiocomms
