// CUDA events that are reused after they have fired.
#pragma once

#include <unistd.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "launcher/gpu_api.hpp"

namespace aiocomms {

// A failed call of CUDA's runtime. The text begins like torch's.
class CudaFailure : public std::runtime_error {
 public:
  CudaFailure(const GpuApi& api, int code, const char* what)
      : std::runtime_error("CUDA error: " + std::string(api.error_string(code)) + " (" + what + ", " +
                           std::to_string(code) + ")"),
        code(code) {}

  const int code;
};

// Makes a device the current one of this thread during the object's life. CUDA makes an event on the current device,
// and records it only on a stream of the same device. The default stream is that of the current device.
class OnDevice {
 public:
  OnDevice(const GpuApi& api, int device) : api_(api) {
    if (const int code = api_.get_device(&before_)) throw CudaFailure(api_, code, "the current device");
    differs_ = before_ != device;
    if (!differs_) return;
    if (const int code = api_.set_device(device)) throw CudaFailure(api_, code, "a change of the device");
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    if (differs_) api_.set_device(before_);
  }

 private:
  const GpuApi& api_;
  int before_ = 0;
  bool differs_ = false;
};

class EventPool;

// An event that returns to its pool when its last owner releases it.
class PooledEvent {
 public:
  PooledEvent(std::shared_ptr<EventPool> pool, GpuEvent event) : event(event), pool_(std::move(pool)) {}
  PooledEvent(const PooledEvent&) = delete;
  PooledEvent& operator=(const PooledEvent&) = delete;
  ~PooledEvent();

  const GpuEvent event;
  bool fired = false;  // guarded by the launcher's lock

 private:
  const std::shared_ptr<EventPool> pool_;
};

// Its lock is always taken last, and no function of CUDA is called under it.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(const GpuApi& api) : api_(api) {}
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  // Runs after the end of its last event and of the launcher. A forked child makes no calls of CUDA.
  ~EventPool() {
    if (getpid() == process_) clear();
  }

  // Call it without the launcher's lock, because it may call CUDA.
  std::shared_ptr<PooledEvent> take() {
    destroy(limbo_);
    GpuEvent event = nullptr;
    {
      const std::lock_guard guard(mutex_);
      if (!idle_.empty()) {
        event = idle_.back();
        idle_.pop_back();
      }
    }
    if (event == nullptr) {
      if (const int code = api_.event_create(&event, GpuApi::kSleepsOn)) throw CudaFailure(api_, code, "a new event");
    }
    return std::make_shared<PooledEvent>(shared_from_this(), event);
  }

  // Takes an event back. An event that may not have fired is destroyed, because a thread may wait for its last record.
  void give_back(GpuEvent event, bool fired) {
    const std::lock_guard guard(mutex_);
    (fired ? idle_ : limbo_).push_back(event);
  }

  void clear() {
    destroy(limbo_);
    destroy(idle_);
  }

 private:
  void destroy(std::vector<GpuEvent>& events) {
    std::vector<GpuEvent> gone;
    {
      const std::lock_guard guard(mutex_);
      gone.swap(events);
    }
    for (GpuEvent event : gone) api_.event_destroy(event);
  }

  const GpuApi api_;
  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::vector<GpuEvent> idle_;
  std::vector<GpuEvent> limbo_;
};

inline PooledEvent::~PooledEvent() { pool_->give_back(event, fired); }

}  // namespace aiocomms
