// A collective as a coroutine. It reads like the textbook's algorithm, and is suspended at each wait.
//
// The code here never blocks, does not know UCX and takes no lock. The owner of a schedule holds the engine's lock
// while it runs.
#pragma once

#include <coroutine>
#include <cstddef>
#include <exception>
#include <utility>

namespace aiocomms {

// One unfinished send or receive. It must not move until it is done.
class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  bool done() const { return done_; }

  // The transport calls this once. The waiter resumes inside this call.
  void complete() {
    done_ = true;
    if (waiter_) std::exchange(waiter_, nullptr).resume();
  }

  // The interface of `co_await event`.
  bool await_ready() const { return done_; }
  void await_suspend(std::coroutine_handle<> waiter) { waiter_ = waiter; }
  void await_resume() const {}

 private:
  bool done_ = false;
  std::coroutine_handle<> waiter_;
};

// The messages of a schedule, between the ranks of a group, numbered from 0.
//
// Within one schedule, the n-th send of rank a to rank b meets the n-th receive of b from a. Their sizes agree. A send
// may wait for its receive. So a schedule that sends and receives starts both before it waits. The memory must not
// change until the event is done, and a receive's memory must not be read.
//
// Neither function throws. A message that cannot be sent or received is never done. A schedule must not throw while it
// has unfinished messages, because their events and memory are in use. So it allocates all its memory before the first
// message.
class Messages {
 public:
  virtual ~Messages() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual void send(int dst, const void* data, std::size_t bytes, Event& event) noexcept = 0;
  virtual void recv(int src, void* data, std::size_t bytes, Event& event) noexcept = 0;
};

// A coroutine that starts when it is first resumed or awaited. Its frame dies with it. Its exception appears where it
// is awaited, or in `check`.
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
  // For a task that is done: rethrows its exception.
  void check() const {
    if (handle_ && handle_.promise().thrown) std::rethrow_exception(handle_.promise().thrown);
  }

  // The interface of `co_await task`: it runs the task to its end, then resumes the waiter.
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
