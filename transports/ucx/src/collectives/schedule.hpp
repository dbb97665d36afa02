// A collective as a coroutine: it reads as the textbook has it, and is suspended wherever it waits.
//
// Nothing here blocks, knows UCX or takes a lock: whoever owns a schedule holds the engine's lock while it runs.
#pragma once

#include <coroutine>
#include <cstddef>
#include <exception>
#include <utility>

namespace aiocomms {

// One send or receive under way. It must stay where it is until it is done.
class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  bool done() const { return done_; }

  // Called by the transport, once. Whoever waits goes on inside this call.
  void complete() {
    done_ = true;
    if (waiter_) std::exchange(waiter_, nullptr).resume();
  }

  // What `co_await event` needs.
  bool await_ready() const { return done_; }
  void await_suspend(std::coroutine_handle<> waiter) { waiter_ = waiter; }
  void await_resume() const {}

 private:
  bool done_ = false;
  std::coroutine_handle<> waiter_;
};

// What a schedule of messages runs on: the ranks of a group, numbered from 0.
//
// The n-th send of rank a to rank b meets the n-th receive of b from a, within one schedule; their sizes agree.
// Sends may wait for their receives: a schedule that sends and receives starts both before it waits for either.
// The memory must stay untouched (for a receive: unread) until the event is done.
//
// Neither throws: what cannot be sent or received is never done. And whoever is amid messages throws nothing either,
// for their events and memory would be gone while they are used: it takes all memory that it needs before the first.
class Messages {
 public:
  virtual ~Messages() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual void send(int dst, const void* data, std::size_t bytes, Event& event) noexcept = 0;
  virtual void recv(int src, void* data, std::size_t bytes, Event& event) noexcept = 0;
};

// A coroutine that starts when it is first resumed or awaited. Its frame dies with it. What it throws comes out where
// it is awaited, or asked for by `check`.
class Task {
 public:
  struct promise_type {
    std::coroutine_handle<> continuation;
    std::exception_ptr thrown;

    Task get_return_object() { return Task(std::coroutine_handle<promise_type>::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    struct Final {
      bool await_ready() noexcept { return false; }
      std::coroutine_handle<> await_suspend(std::coroutine_handle<promise_type> self) noexcept {
        auto next = self.promise().continuation;
        return next ? next : std::noop_coroutine();
      }
      void await_resume() noexcept {}
    };
    Final final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() noexcept { thrown = std::current_exception(); }
  };

  Task() = default;
  explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  void start() { handle_.resume(); }
  bool done() const { return !handle_ || handle_.done(); }
  // Of one that is done: throws what it has thrown.
  void check() const {
    if (handle_ && handle_.promise().thrown) std::rethrow_exception(handle_.promise().thrown);
  }

  // What `co_await task` needs: run it to its end, then go on.
  bool await_ready() const { return done(); }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> waiter) {
    handle_.promise().continuation = waiter;
    return handle_;
  }
  void await_resume() const { check(); }

 private:
  std::coroutine_handle<promise_type> handle_;
};

}  // namespace aiocomms
