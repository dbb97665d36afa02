// The engine's lock. Its background thread gives way to everybody else.
#pragma once

#include <sched.h>

#include <atomic>
#include <mutex>

namespace aiocomms {

// std::lock_guard takes it with priority; PriorityLock::Background takes it without.
class PriorityLock {
 public:
  void lock() {
    wanting_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    wanting_.fetch_sub(1, std::memory_order_relaxed);
  }
  void unlock() { mutex_.unlock(); }

  // Whether somebody waits who has priority.
  bool is_wanted() const { return wanting_.load(std::memory_order_relaxed) > 0; }
  // The background thread holds the lock no more, and lets those go first.
  void give_way() const {
    while (is_wanted()) sched_yield();
  }

  class Background {
   public:
    explicit Background(PriorityLock& lock) : lock_(lock.mutex_) {}

   private:
    std::lock_guard<std::mutex> lock_;
  };

 private:
  std::mutex mutex_;
  std::atomic<int> wanting_ = 0;
};

}  // namespace aiocomms
