// Ranks of one process, each with an engine and a thread that drives it like an event loop.
//
// The order between ranks comes from UCX, which is not instrumented, and from memory that each rank maps at its own
// address. ThreadSanitizer sees neither. It checks the threads within each rank. The received data check the order
// between ranks.
#pragma once

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <source_location>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/elsewhere.hpp"
#include "engine_inside.hpp"

namespace aiocomms {

// Posts an op of a window for a caller that holds no lock.
template <typename Op, typename... Arguments>
bool post_on_window(Engine& engine, Op op, Arguments... arguments) {
  if constexpr (std::is_invocable_v<Op, Engine&, Arguments..., Held&>) {
    return (engine.*op)(arguments..., nothing_held);
  } else {
    return (engine.*op)(arguments...);
  }
}

inline std::atomic<unsigned> checks = 0, failures = 0;

// The longest wait. Even a shared emulated processor makes progress in that time.
constexpr int kPatience = 240'000;  // ms
inline std::uint64_t when_patience_ends() { return now_ns() + kPatience * 1'000'000ull; }
// Whether a descriptor becomes readable. A signal ends poll() early, and is ignored.
inline bool becomes_readable(int fd) {
  pollfd readable{fd, POLLIN, 0};
  int got = -1;
  do {
    got = poll(&readable, 1, kPatience);
  } while (got < 0 && errno == EINTR);
  return got > 0;
}

// The allocation of the engines that fails (engine_memory.hpp). 1: the next one. 0 or less: none. Allocations of the
// tests' own code do not count.
inline std::atomic<long> allocations_until_failure = -1;
inline thread_local bool counts_allocations = true;
struct Counting {
  const bool before = std::exchange(counts_allocations, true);
  ~Counting() { counts_allocations = before; }
};

[[gnu::format(printf, 2, 3)]] inline bool expect(bool holds, const char* what, ...) {
  ++checks;
  if (holds) return true;
  va_list arguments;
  va_start(arguments, what);
  char text[256];
  std::vsnprintf(text, sizeof text, what, arguments);
  va_end(arguments);
  std::fprintf(stderr, "FAILED: %s\n", text);
  ++failures;
  return false;
}

// Vigna's splitmix64. The same seed gives the same numbers.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t below(std::uint64_t end) { return next() % end; }
  template <class T>
  const T& of(const std::vector<T>& values) {
    return values[below(values.size())];
  }

 private:
  std::uint64_t next() {
    std::uint64_t mixed = state_ += 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    return mixed ^ (mixed >> 31);
  }
  std::uint64_t state_;
};

// The distribution of ranks over simulated hosts. UCX reaches another host's rank over TCP.
enum class Spread { kOne, kEach, kPairs };

class World;

using Where = std::source_location;  // of the waiting caller

// One rank. All methods run on its thread, which acts as its loop's thread.
class Rank {
 public:
  Rank(World& the_world, int the_number, std::uint64_t seed);

  World& world;
  const int number;
  Random random;
  std::unique_ptr<Engine> engine;
  std::vector<Notice> notices;

  // Starts an op. `call` gets its ticket, and returns whether the op is done.
  template <class Call>
  Ticket post(Call call) {
    const Ticket ticket = ++last_ticket_;
    if (call(ticket)) done_[ticket] = {ticket, Status::kDone, {}};
    return ticket;
  }
  // Sometimes another thread posts through `begin`, while this thread acts as a loop. It then returns whether the op is
  // done. Empty: this thread must post.
  template <class Begin>
  std::optional<bool> post_elsewhere(std::uint32_t group, Begin begin) {
    if (random.below(4) != 0 || allocations_until_failure > 0) return {};
    Elsewhere place(*engine, group);
    std::atomic<bool> over = false;
    std::optional<bool> done;
    std::thread thread([&] {
      begin(place);
      if (place.placed()) done = place.finish() != 0;
      place.leave();
      over = true;
    });
    while (!over) turn();
    thread.join();
    return done;
  }
  bool ended(Ticket ticket) const { return done_.contains(ticket); }
  const Outcome& outcome(Ticket ticket) const { return done_.at(ticket); }
  Outcome wait(Ticket ticket, const char* what = "an op", Where where = Where::current()) {
    until([&] { return ended(ticket); }, what, where);
    const Outcome outcome = done_.at(ticket);
    done_.erase(ticket);
    return outcome;
  }
  // The same, but the outcome stays for a later call.
  void wait_until_ended(Ticket ticket, const char* what, Where where = Where::current()) {
    until([&] { return ended(ticket); }, what, where);
  }
  // Waits for an op that must succeed.
  void finish(Ticket ticket, const char* what, Where where = Where::current()) {
    const Outcome outcome = wait(ticket, what, where);
    expect(outcome.status == Status::kDone, "%s of rank %d ends with status %d, %llu", what, number,
           static_cast<int>(outcome.status), static_cast<unsigned long long>(outcome.details[0]));
  }
  // Waits for the first notice for which `is` holds.
  template <class Is>
  Notice wait_for(Is is, const char* what, Where where = Where::current()) {
    auto find = [&] { return std::find_if(notices.begin(), notices.end(), is); };
    until([&] { return find() != notices.end(); }, what, where);
    return *find();
  }

  // Makes a communicator of `members`, in that order. All ranks of the world must call it.
  std::uint32_t open(const std::vector<int>& members);
  // Closes the last communicator and the engine, on a separate thread, as aiocomms does.
  void close(bool sound) {
    std::thread closing([&] { engine->close(sound, 5.0); });
    closing.join();
  }

  // Acts as a loop, which makes a few turns and then parks. Sometimes it polls longer. Sometimes it is busy and does
  // not come.
  template <class Is>
  void until(Is is, const char* what, Where where = Where::current()) {
    const std::uint64_t ends = when_patience_ends();
    const Waiting waiting(*this, what, where);
    const std::uint64_t manner = random.below(4);
    if (manner == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.below(3000)));
    for (int turns = 0; !is(); ++turns) {
      turn();
      if (manner == 1 || turns < Pacer::kTurns) {
        if (now_ns() < ends) continue;
      } else {
        turns = 0;
        if (is() || engine->ready() || becomes_readable(engine->fileno())) continue;
      }
      give_up(what, where);
    }
  }
  // The same for a condition that no event announces. It polls repeatedly.
  template <class Is>
  void look_until(Is is, const char* what, Where where = Where::current()) {
    const Waiting waiting(*this, what, where);
    for (const std::uint64_t ends = when_patience_ends(); !is(); turn()) {
      if (now_ns() > ends) give_up(what, where);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  void turn() {
    ++turns_;
    std::vector<Outcome> outcomes;
    std::vector<Notice> told;
    try {
      Counting counting;
      engine->progress(outcomes, told);
    } catch (const std::bad_alloc&) {  // the next turn delivers everything
    }
    for (const Outcome& outcome : outcomes) {
      expect(!done_.contains(outcome.ticket), "a ticket of rank %d has two outcomes", number);
      done_[outcome.ticket] = outcome;
    }
    for (Notice& notice : told) notices.push_back(std::move(notice));
  }

 private:
  void give_up(const char* what, Where where) const;
  std::string state();

  // Records the present wait.
  class Waiting {
   public:
    Waiting(Rank& rank, const char* what, Where where) : rank_(rank) {
      rank_.set_wait(words("%s at %s:%u, since turn %lu", what, where.file_name(), where.line(), rank_.turns_.load()));
    }
    ~Waiting() { rank_.set_wait({}); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Rank& rank_;
  };
  void set_wait(std::string what) {
    std::lock_guard lock(wait_mutex_);
    wait_ = std::move(what);
  }

  std::mutex wait_mutex_;
  std::string wait_;  // of the waiting rank, for the report on a timeout
  std::atomic<unsigned long> turns_ = 0;
  Ticket last_ticket_ = 0;
  std::unordered_map<Ticket, Outcome> done_;
};

class World {
 public:
  // device: the users' memory counts as a device's, which the engines may not touch.
  World(int the_size, Spread hosts, std::uint64_t the_seed, bool the_device = false)
      : seed(the_seed), crowded(the_seed % 5 > 2), device(the_device), meeting(the_size), ids(the_size), fds(the_size) {
    std::fprintf(stderr, "seed %llu: %d ranks, hosts %d%s\n", static_cast<unsigned long long>(seed), the_size,
                 static_cast<int>(hosts), device ? ", a device's memory" : "");
    for (int rank = 0; rank < the_size; ++rank) {
      host_of.push_back(hosts == Spread::kOne ? 0 : hosts == Spread::kEach ? rank : rank / 2);
    }
    std::vector<std::vector<int>> sockets(the_size, std::vector<int>(the_size, -1));
    for (int a = 0; a < the_size; ++a) {
      ranks.push_back(std::make_unique<Rank>(*this, a, the_seed + 1000 + static_cast<std::uint64_t>(a)));
      for (int b = 0; b < a; ++b) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) std::abort();
        sockets[a][b] = pair[0];
        sockets[b][a] = pair[1];
      }
    }
    for (int rank = 0; rank < the_size; ++rank) {
      Engine& engine = *ranks[rank]->engine;
      engine.start();
      for (int peer = 0; peer < the_size; ++peer) {
        const pid_t pid = host_of[peer] == host_of[rank] ? getpid() : 0;
        Introduction introduction{ranks[peer]->engine->address(),
                                  Socket(sockets[rank][peer]),
                                  pid,
                                  {cookie(rank, peer), cookie(peer, rank)},
                                  static_cast<std::uint32_t>(rank)};
        engine.introduce(peer, std::move(introduction), crowded ? 1 : 1024);
      }
    }
  }

  int size() const { return static_cast<int>(ranks.size()); }
  std::uint64_t cookie(int src, int dst) const {
    return seed * 0x9E3779B97F4A7C15u + 1'000'003u * static_cast<std::uint64_t>(src) + static_cast<std::uint64_t>(dst);
  }

  // Runs `body` on every rank's thread.
  void run(const std::function<void(Rank&)>& body) {
    std::vector<std::thread> threads;
    for (auto& rank : ranks) threads.emplace_back([&] { body(*rank); });
    for (std::thread& thread : threads) thread.join();
  }

  // Data that the ranks share beside their engines, as aiocomms does in its rendezvous.
  const std::uint64_t seed;
  const bool crowded;  // as if ranks outnumbered cores
  const bool device;
  std::barrier<> meeting;
  std::vector<std::uint32_t> ids;
  std::vector<int> fds;
  std::vector<int> host_of;
  std::vector<std::unique_ptr<Rank>> ranks;
};

inline std::string Rank::state() {
  std::string waits;
  {
    std::lock_guard lock(wait_mutex_);
    waits = wait_.empty() ? "nothing, or another rank's thread" : wait_;
  }
  return words("rank %d, turn %lu, waits for %s\n", number, turns_.load(), waits.c_str()) +
         EngineInside::state(*engine);
}

// All ranks' waits are printed twice. A wait that is the same both times makes no progress. One that differs is slow.
inline void Rank::give_up(const char* what, Where where) const {
  expect(false, "rank %d waits in vain for %s at %s:%u", number, what, where.file_name(), where.line());
  for (int time = 0; time < 2; ++time) {
    if (time > 0) std::this_thread::sleep_for(std::chrono::seconds(10));
    for (const auto& rank : world.ranks) std::fputs(rank->state().c_str(), stderr);
    std::fputs("\n", stderr);
  }
  std::abort();  // The abort keeps every thread's stack for a debugger.
}

inline Rank::Rank(World& the_world, int the_number, std::uint64_t seed)
    : world(the_world), number(the_number), random(seed) {
  // The settings of aiocomms. Only the loopback device listens.
  const bool far = the_world.host_of.front() != the_world.host_of.back();
  std::vector<std::pair<std::string, std::string>> options = {{"TLS", far ? "^sysv" : "^sysv,tcp"}};
  if (far) options.emplace_back("NET_DEVICES", "lo");
  std::optional<ucs_memory_type_t> device;
  if (the_world.device) device = UCS_MEMORY_TYPE_HOST;
  engine = std::make_unique<Engine>(the_number, options, device);
}

inline std::uint32_t Rank::open(const std::vector<int>& members) {
  std::uint32_t group = 0;
  std::vector<int> hosts, local;
  int me = -1, mine = -1;  // in the communicator, and among the ranks of this host
  for (int member : members) {
    if (member == number) me = static_cast<int>(hosts.size());
    hosts.push_back(world.host_of[member]);
    if (world.host_of[member] != world.host_of[number]) continue;
    if (member == number) mine = static_cast<int>(local.size());
    local.push_back(member);
  }
  if (me >= 0) world.ids[number] = group = engine->add_group(me, members);
  const bool leads = mine == 0 && local.size() > 1;
  if (leads) world.fds[number] = Segment::create(static_cast<int>(local.size()), members.size() == world.ranks.size());
  world.meeting.arrive_and_wait();
  if (me >= 0) {
    std::vector<std::uint32_t> theirs;
    std::vector<int> numbers;  // of hosts, in the order of their first ranks
    for (std::size_t at = 0; at < members.size(); ++at) {
      theirs.push_back(world.ids[members[at]]);
      int number_of_host = 0;
      for (std::size_t before = 0; before < at; ++before) {
        number_of_host = std::max(number_of_host, numbers[before] + 1);
      }
      for (std::size_t before = 0; before < at; ++before) {
        if (hosts[before] == hosts[at]) number_of_host = numbers[before];
      }
      numbers.push_back(number_of_host);
    }
    // In some worlds the ranks may not read each other's memory.
    const bool readable = world.seed % 4 < 2 && engine->reads_all(local);
    const int shared = local.size() > 1 ? world.fds[local.front()] : -1;
    const bool pooled = members.size() == world.ranks.size();
    const bool in_place = world.crowded || world.seed % 3 == 0;
    engine->open_group(group, theirs, shared, pooled && group == 0, numbers, readable, in_place);
  }
  world.meeting.arrive_and_wait();
  if (leads) ::close(world.fds[number]);
  return group;
}

}  // namespace aiocomms
