// A network of ranks in one thread, with the worst behaviour that the contract of Messages allows.
//
// A seed draws the order of messages between different pairs, and of the completions of sends and receives. Within a
// pair, messages match in order. The network detects memory that is touched too early or too late. Data must not change
// before their send is done. A receive's memory is filled with a pattern. The pattern must be unchanged when the data
// are written, just before the receive is done.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collectives/schedule.hpp"

namespace aiocomms {

using Byte = unsigned char;  // Unlike loops over std::byte, loops over it become memcmp and memset.
using Buffer = std::vector<Byte>;

// Returns a text in the format of printf.
template <class... Args>
[[gnu::noinline]] std::string text(const char* format, Args... args) {
  char line[200];
  std::snprintf(line, sizeof line, format, args...);
  return line;
}

struct Report {
  long checks = 0, failures = 0;

  [[gnu::noinline]] void check(bool good, const char* what, const std::string& where = "") {
    ++checks;
    if (good) return;
    if (++failures <= 20) std::printf("FAILED: %s: %s\n", where.c_str(), what);
  }
};

enum class Mode {
  Rendezvous,  // a send is done some time after it has matched its receive
  Reluctant,   // the same, but only when nothing else can happen
  Eager,       // a send is done at once, with its data copied
  AtOnce,      // a receive of an arrived message is also done at once
};

class FakeNetwork {
 public:
  struct Counters {
    std::size_t sends = 0, receives = 0, bytes = 0, longest = 0;
  };

  FakeNetwork(int size, Mode mode, unsigned seed, Report& report)
      : size_(size),
        mode_(mode),
        random_(seed),
        report_(report),
        pairs_(static_cast<std::size_t>(size * size)),
        counters_(static_cast<std::size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) ports_.emplace_back(*this, rank);
  }

  Messages& port(int rank) { return ports_[static_cast<std::size_t>(rank)]; }
  const Counters& counters(int rank) const { return counters_[static_cast<std::size_t>(rank)]; }
  bool idle() const { return ready_.empty() && completions_.empty() && late_.empty(); }
  std::size_t draw(std::size_t below) { return std::uniform_int_distribution<std::size_t>(0, below - 1)(random_); }

  // Matches one message with its receive, or completes one event. Returns whether there was anything to do.
  bool step() {
    if (idle()) return false;
    if (ready_.empty() && completions_.empty()) completions_.swap(late_);
    const std::size_t choice = draw(ready_.size() + completions_.size());
    if (choice < ready_.size())
      match(choice);
    else
      finish(choice - ready_.size());
    return true;
  }

  // Whether each message has its receive, each receive its message, and all events are done.
  bool empty() const {
    const auto is_empty = [](const Pair& pair) { return pair.sends.empty() && pair.receives.empty(); };
    return idle() && std::all_of(pairs_.begin(), pairs_.end(), is_empty);
  }

 private:
  struct Send {
    const Byte* data;
    std::size_t bytes;
    Event* event;  // null: already done
    Buffer copy;   // the data at the start of the send
  };
  struct Receive {
    Byte* data;
    std::size_t bytes;
    Event* event;
  };
  struct Pair {
    std::deque<Send> sends;
    std::deque<Receive> receives;
  };
  // For a send: its data must be unchanged. For a receive: the pattern must be unchanged, then the data are written.
  struct Completion {
    Event* event;
    Byte* into;
    const Byte* from;
    Buffer data;
  };

  class Port : public Messages {
   public:
    Port(FakeNetwork& network, int rank) : network_(network), rank_(rank) {}
    int rank() const override { return rank_; }
    int size() const override { return network_.size_; }
    void send(int dst, const void* data, std::size_t bytes, Event& event) noexcept override {
      network_.send(rank_, dst, static_cast<const Byte*>(data), bytes, event);
    }
    void recv(int src, void* data, std::size_t bytes, Event& event) noexcept override {
      network_.recv(src, rank_, static_cast<Byte*>(data), bytes, event);
    }

   private:
    FakeNetwork& network_;
    int rank_;
  };

  static constexpr Byte kPattern = 0xA5;

  std::size_t index(int src, int dst) {
    const bool legal = src >= 0 && src < size_ && dst >= 0 && dst < size_ && src != dst;
    report_.check(legal, "a message to a rank that is not there, or to itself");
    return legal ? static_cast<std::size_t>(src * size_ + dst) : 0;
  }

  void send(int src, int dst, const Byte* data, std::size_t bytes, Event& event) {
    Counters& counters = counters_[static_cast<std::size_t>(src)];
    counters = {counters.sends + 1, counters.receives, counters.bytes + bytes, std::max(counters.longest, bytes)};
    const std::size_t pair = index(src, dst);
    const bool rendezvous = mode_ == Mode::Rendezvous || mode_ == Mode::Reluctant;
    if (rendezvous) begin(event);
    pairs_[pair].sends.push_back({data, bytes, rendezvous ? &event : nullptr, Buffer(data, data + bytes)});
    note_ready(pair);
    if (!rendezvous) event.complete();
  }

  void recv(int src, int dst, Byte* data, std::size_t bytes, Event& event) {
    ++counters_[static_cast<std::size_t>(dst)].receives;
    const std::size_t pair = index(src, dst);
    std::deque<Send>& sends = pairs_[pair].sends;
    if (mode_ == Mode::AtOnce && pairs_[pair].receives.empty() && !sends.empty()) {
      report_.check(sends.front().bytes == bytes, "sizes of a send and its receive differ");
      std::copy_n(sends.front().copy.begin(), std::min(bytes, sends.front().bytes), data);
      sends.pop_front();
      return event.complete();
    }
    begin(event);
    std::fill(data, data + bytes, kPattern);
    pairs_[pair].receives.push_back({data, bytes, &event});
    note_ready(pair);
  }

  void note_ready(std::size_t pair) {
    if (pairs_[pair].sends.empty() || pairs_[pair].receives.empty()) return;
    if (std::find(ready_.begin(), ready_.end(), pair) == ready_.end()) ready_.push_back(pair);
  }

  void match(std::size_t choice) {
    const std::size_t pair = std::exchange(ready_[choice], ready_.back());
    ready_.pop_back();
    Send send = std::move(pairs_[pair].sends.front());
    const Receive receive = pairs_[pair].receives.front();
    pairs_[pair].sends.pop_front();
    pairs_[pair].receives.pop_front();
    note_ready(pair);
    report_.check(send.bytes == receive.bytes, "sizes of a send and its receive differ");
    send.copy.resize(receive.bytes);
    std::vector<Completion>& sends = mode_ == Mode::Reluctant ? late_ : completions_;
    if (send.event != nullptr) sends.push_back({send.event, nullptr, send.data, send.copy});
    completions_.push_back({receive.event, receive.data, nullptr, std::move(send.copy)});
  }

  void finish(std::size_t choice) {
    std::swap(completions_[choice], completions_.back());
    const Completion completion = std::move(completions_.back());
    completions_.pop_back();
    const Buffer& data = completion.data;
    if (completion.into != nullptr) {
      const Buffer pattern(data.size(), kPattern);
      report_.check(std::equal(pattern.begin(), pattern.end(), completion.into),
                    "memory was written to before its receive was done");
      std::copy(data.begin(), data.end(), completion.into);
    } else {
      report_.check(std::equal(data.begin(), data.end(), completion.from), "what is being sent was changed");
    }
    pending_.erase(completion.event);
    completion.event->complete();
  }

  void begin(const Event& event) {
    report_.check(pending_.insert(&event).second, "an event was used again before it was done");
  }

  int size_;
  Mode mode_;
  std::mt19937 random_;
  Report& report_;
  std::vector<Pair> pairs_;
  std::vector<Counters> counters_;
  std::deque<Port> ports_;
  std::vector<std::size_t> ready_;  // pairs with a waiting message and a waiting receive
  std::vector<Completion> completions_, late_;
  std::set<const Event*> pending_;
};

// Runs one schedule per rank to its end, with different start times. A finished task is destroyed at once, so an event
// that it has not awaited is detected.
inline void run(FakeNetwork& network, int size, const std::function<Task(Messages&, int)>& make,
                const std::string& what, Report& report) {
  std::vector<int> order;
  std::vector<Task> tasks;
  for (int rank = 0; rank < size; ++rank) {
    tasks.push_back(make(network.port(rank), rank));
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(network.draw(order.size() + 1)), rank);
  }
  const auto destroy_the_done = [&] {
    for (Task& task : tasks)
      if (task.done()) Task(std::move(task));
  };
  for (int rank : order) {
    tasks[static_cast<std::size_t>(rank)].start();
    for (std::size_t steps = network.draw(4); steps > 0; --steps) network.step();
  }
  destroy_the_done();
  while (network.step()) destroy_the_done();
  std::string stuck;
  for (int rank = 0; rank < size; ++rank)
    if (!tasks[static_cast<std::size_t>(rank)].done()) stuck += text(" %d", rank);
  report.check(stuck.empty(), "deadlock", what + ", waiting:" + stuck);
  report.check(network.empty(), "messages are left over", what);
}

}  // namespace aiocomms
