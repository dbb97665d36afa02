// The engine's lock. Its background thread yields to all other threads.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "net/clock.hpp"
#include "net/relax.hpp"

namespace aiocomms {

// std::lock_guard takes it with priority. PriorityLock::Background takes it without.
class PriorityLock {
 public:
  // A thread that may not wait tries for this long. A background owner yields within one or two microseconds.
  static constexpr std::uint64_t kPatience = 10'000;

  void lock() {
    wanting_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    wanting_.fetch_sub(1, std::memory_order_relaxed);
  }
  void unlock() { mutex_.unlock(); }
  bool try_lock_once() { return mutex_.try_lock(); }
  bool try_lock() {
    if (mutex_.try_lock()) return true;
    wanting_.fetch_add(1, std::memory_order_relaxed);
    const std::uint64_t ends = now_ns() + kPatience;
    bool taken = false;
    while (!(taken = mutex_.try_lock()) && now_ns() < ends) relax();
    wanting_.fetch_sub(1, std::memory_order_relaxed);
    return taken;
  }

  // Whether a thread with priority waits.
  bool is_wanted() const { return wanting_.load(std::memory_order_relaxed) > 0; }
  // The background thread has released the lock. It lets the waiting threads go first.
  void give_way() const {
    while (is_wanted()) sched_yield();
  }

  class Background {
   public:
    explicit Background(PriorityLock& lock) : lock_(lock.mutex_) {}
    // Takes the lock only if it is free.
    Background(PriorityLock& lock, std::try_to_lock_t once) : lock_(lock.mutex_, once) {}
    explicit operator bool() const { return lock_.owns_lock(); }

   private:
    std::unique_lock<std::mutex> lock_;
  };

 private:
  std::mutex mutex_;
  std::atomic<int> wanting_ = 0;
};

}  // namespace aiocomms
