// Simulates hosts and a network, and computes how long a collective takes: the time of the last rank to end.
//
// Each rank has a clock. It advances by the cost of the rank's copies and reductions, at the speed of memory, and of
// the messages that it starts and takes. It also advances to the time of each awaited event. That is a line in shared
// memory, published at another rank's clock, or a message. A message passes its sender's and its receiver's host at the
// speed of the network, behind earlier messages. So simultaneous work of several ranks takes time once.
//
// The schedules and the bytes are real. The program is linked with --wrap (PROGRAMS in tests/support/programs.py), so
// that copies and reductions pass through here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <queue>
#include <unordered_map>
#include <vector>

#include "fake_hosts.hpp"

namespace aiocomms {

// Times are in microseconds, and rates in bytes per microsecond.
struct Speed {
  const char* name;
  double network;         // of a host, in each direction
  double latency;         // from host to host
  double message;         // cost of a message for its sender, and for its receiver
  double kernel;          // bytes that a rank copies to and from the kernel, or 0 if the network does that
  double memory = 20000;  // bytes that a rank reads and writes
  double line = 0.2;      // until another core sees a line
};

class CriticalPath {
 public:
  CriticalPath(FakeHosts& hosts, const Speed& speed)
      : hosts_(hosts), speed_(speed), ranks_(static_cast<std::size_t>(hosts.size())) {
    for (int rank = 0; rank < hosts.size(); ++rank) ports_.emplace_back(*this, rank);
  }

  // Runs one schedule per rank. Returns when the last one ended. Negative: some never end.
  double run(const std::function<Task(Reach, int)>& make);

  // The running simulation, if any.
  static inline CriticalPath* current = nullptr;
  // Advances the running rank's clock by the cost of its work.
  void spend(double time) {
    note_published();
    clock() += time;
  }
  void touch(std::size_t bytes) { spend(static_cast<double>(bytes) / speed_.memory); }
  // Makes the running rank wait until another rank has published or read a round.
  enum class What { kFirst, kSecond, kRead };
  void wait_for(What what, int place, std::uint64_t round);
  void note_published();

 private:
  struct Receive {
    Event* event;
    void* data;
  };
  struct Arrival {
    double time;
    std::vector<std::byte> data;
  };
  struct Times {
    double clock = 0;
    std::unordered_map<std::uint64_t, double> first, second;  // when this rank published a round
    std::map<std::uint64_t, double> read;                     // when it had read all lower rounds
    std::map<int, std::queue<Receive>> receives;              // by sender
    std::map<int, std::queue<Arrival>> arrivals;
  };
  struct Link {
    double out = 0, in = 0;  // when the link is free
  };
  struct Item {
    double time;
    std::uint64_t order;
    std::function<void()> what;
    bool operator>(const Item& other) const { return time != other.time ? time > other.time : order > other.order; }
  };
  class Port final : public Messages {
   public:
    Port(CriticalPath& path, int rank) : path_(path), rank_(rank) {}
    int rank() const override { return rank_; }
    int size() const override { return path_.hosts_.size(); }
    void send(int dst, const void* data, std::size_t bytes, Event& event) noexcept override {
      path_.send(rank_, dst, data, bytes, event);
    }
    void recv(int src, void* data, std::size_t, Event& event) noexcept override {
      path_.times(rank_).receives[src].push({&event, data});
      path_.match(src, rank_);
    }

   private:
    CriticalPath& path_;
    const int rank_;
  };

  Times& times(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  double& clock() { return times(running_).clock; }
  bool near(int a, int b) const { return hosts_.host_of(a) == hosts_.host_of(b); }
  double cost(int src, int dst, std::size_t bytes) const {
    const double rate = near(src, dst) ? speed_.memory / 2 : speed_.kernel;
    return (near(src, dst) ? 0.5 : speed_.message) + (rate > 0 ? static_cast<double>(bytes) / rate : 0);
  }
  void at(double time, std::function<void()> what) { queue_.push({time, order_++, std::move(what)}); }
  void send(int src, int dst, const void* data, std::size_t bytes, Event& event);
  void depart(int src, int dst, std::vector<std::byte> data, Event& event);
  void match(int src, int dst);
  // `rank` acts, not before `time`. Then all ranks that share memory with it look at that memory.
  void step(int rank, double time, const std::function<void()>& what);

  FakeHosts& hosts_;
  const Speed speed_;
  std::vector<Times> ranks_;
  std::deque<Port> ports_;
  std::map<int, Link> links_;
  std::priority_queue<Item, std::vector<Item>, std::greater<>> queue_;
  std::uint64_t order_ = 0;
  double queue_time_ = 0;
  int running_ = 0;
};

}  // namespace aiocomms
