// Engines at work, several in one process. The threads of a rank act at the same time. Built with a sanitizer, this
// shows races and the use of freed memory. Built without, it checks the results.
//
// engine_test [seconds [seed]] repeats with other seeds for that time. Each world runs at least once.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>
#include <optional>

#include "engine_beside.hpp"
#include "engine_collectives.hpp"
#include "engine_coming.hpp"
#include "engine_elsewhere.hpp"
#include "engine_given_up.hpp"
#include "engine_hostile.hpp"
#include "engine_lanes.hpp"
#include "engine_memory.hpp"
#include "engine_pool.hpp"
#include "engine_worker.hpp"

// This operator fails on request of the tests in engine_memory.hpp.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  using namespace aiocomms;
  if (counts_allocations && allocations_until_failure > 0 && --allocations_until_failure == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return operator new(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace aiocomms {
namespace {

// ------------------------------------------------------------------------------------------------------------ messages

constexpr int kInt32 = 4;  // the number in DType

Ticket post_send(Comm& comm, const Ints& data, int dst, std::int64_t tag) {
  return comm.rank.post([&](Ticket ticket) {
    const auto post = [&](auto& place) {
      return place.send(ticket, comm.group, data.data(), data.size() * 4, dst, 0, tag, kInt32);
    };
    const auto elsewhere = comm.rank.post_elsewhere(comm.group, post);
    return elsewhere ? *elsewhere : post(*comm.rank.engine);
  });
}

Ticket post_recv(Comm& comm, Ints& data, int src, std::int64_t tag, int dtype = kInt32) {
  return comm.rank.post([&](Ticket ticket) {
    const auto post = [&](auto& place) {
      return place.recv(ticket, comm.group, data.data(), data.size() * 4, src, 0, tag, dtype);
    };
    const auto elsewhere = comm.rank.post_elsewhere(comm.group, post);
    return elsewhere ? *elsewhere : post(*comm.rank.engine);
  });
}

// Small and large messages between all ranks. They arrive before or after the post of their receives.
void messages(Comm& comm, int count) {
  std::vector<Op> ops;
  for (int at = 0; at < count; ++at) {
    const std::uint64_t round = ++comm.round;
    for (int step = 0; step < comm.size(); ++step) {
      const int dst = (comm.me + step) % comm.size(), src = (comm.me + comm.size() - step) % comm.size();
      const std::size_t bytes = Random(comm.rank.world.seed + round + static_cast<std::uint64_t>(step)).of(kCounts);
      auto give = std::make_shared<Ints>(filled(comm.me, bytes, round));
      auto take = std::make_shared<Ints>(bytes);
      auto send = [&] { ops.push_back({post_send(comm, *give, dst, at % 3), [give] {}}); };
      const bool first = comm.rank.random.below(2);
      if (first) send();
      ops.push_back({post_recv(comm, *take, src, at % 3), [=] { matches(*take, src, round, "a message"); }});
      if (!first) send();
    }
    if (comm.rank.random.below(4) == 0) end(comm.rank, ops);
  }
  end(comm.rank, ops);
}

// Large messages at once between all ranks. They are shorter and longer than the size from which senders assist, by
// less and by more than a slot.
void floods(Comm& comm) {
  const std::uint64_t round = ++comm.round;
  std::vector<Op> ops;
  for (std::size_t count : {131'071, 131'072, 131'073, 163'840, 400'001}) {
    for (int step = 1; step < comm.size(); ++step) {
      const int dst = (comm.me + step) % comm.size(), src = (comm.me + comm.size() - step) % comm.size();
      auto give = std::make_shared<Ints>(filled(comm.me, count, round));
      auto take = std::make_shared<Ints>(count);
      const Ticket recv = post_recv(comm, *take, src, static_cast<std::int64_t>(count));
      ops.push_back({recv, [=] { matches(*take, src, round, "a large message"); }});
      ops.push_back({post_send(comm, *give, dst, static_cast<std::int64_t>(count)), [give] {}});
    }
  }
  end(comm.rank, ops);
}

// The sender of a large message fills slots while the receiver reads, if each has a core. Some round must show it.
void pours(Comm& comm) {
  Rank& rank = comm.rank;
  World& world = rank.world;
  const bool helped = comm.size() > 1 && world.host_of.front() == world.host_of.back() && !world.device &&
                      // A rank that may not read the other ranks' memory takes no offers.
                      !world.crowded && world.seed % 4 < 2;
  for (std::uint64_t round = ++comm.round, last = round + 1000, seen = helped ? 0 : 1; !seen; ++round) {
    if (!expect(round < last, "nobody helps with large messages")) break;
    Ints data = comm.me == 0 ? filled(0, 4'000'000, round) : Ints(4'000'000);
    if (comm.me == 0) rank.finish(post_send(comm, data, 1, 7), "a large send");
    if (comm.me == 1) {
      rank.finish(post_recv(comm, data, 0, 7), "a large receive");
      matches(data, 0, round, "a message by both sides");
    }
    comm.barrier();
    seen = EngineInside::pool(*rank.engine).emptied(1);
    comm.barrier();
  }
}

// Receives that are withdrawn while their message may arrive. If the message wins that race, the receive takes it.
void cancels(Comm& comm, int count) {
  const int dst = (comm.me + 1) % comm.size(), src = (comm.me + comm.size() - 1) % comm.size();
  std::vector<Op> sends;
  for (int at = 0; at < count; ++at) {
    const std::uint64_t round = ++comm.round;
    const std::size_t size = Random(comm.rank.world.seed + round).of(kCounts);
    auto give = std::make_shared<Ints>(filled(comm.me, size, round));
    Ints take(size);
    sends.push_back({post_send(comm, *give, dst, 7), [give] {}});
    Ticket ticket = post_recv(comm, take, src, 7);
    if (comm.rank.random.below(2)) std::this_thread::sleep_for(std::chrono::microseconds(comm.rank.random.below(300)));
    if (comm.rank.engine->cancel(comm.group, src, 0, 7, ticket)) {
      expect(!comm.rank.ended(ticket), "rank %d withdraws what has ended", comm.me);
      ticket = post_recv(comm, take, src, 7);
    }
    comm.rank.finish(ticket, "a receive that was not withdrawn");
    matches(take, src, round, "a message after a withdrawal");
  }
  end(comm.rank, sends);
}

// Messages that do not fit their receives end in errors, and no other memory is written.
void misfits(Comm& comm) {
  const int dst = (comm.me + 1) % comm.size(), src = (comm.me + comm.size() - 1) % comm.size();
  for (std::size_t size : {std::size_t{40}, std::size_t{5000}, std::size_t{300000}}) {
    const Ints give = filled(comm.me, size, 0);
    Ints take(size / 2), other(size, -1);
    const Ticket sends[] = {post_send(comm, give, dst, 8), post_send(comm, give, dst, 9)};
    const Ticket recv = post_recv(comm, take, src, 8);
    const Outcome truncated = comm.rank.wait(recv);
    if (comm.rank.world.device) {  // otherwise the engine has written it
      const std::string head = comm.rank.engine->head(recv);
      expect(head.size() == take.size() * 4 && comm.rank.engine->head(recv).empty(), "the beginning is handed out");
      std::memcpy(take.data(), head.data(), head.size());
    }
    const Outcome dtype = comm.rank.wait(post_recv(comm, other, src, 9, kInt32 + 1));
    expect(truncated.status == Status::kTruncated && truncated.details[0] == size * 4, "a truncated message passes");
    expect(dtype.status == Status::kDtype && dtype.details[1] == kInt32, "a message of another dtype passes");
    matches(take, src, 0, "the beginning of a message");
    expect(other == Ints(size, -1), "a message of another dtype is written");
    for (Ticket send : sends) comm.rank.finish(send, "the send of a misfit");
  }
}

// ------------------------------------------------------------------------------------------------------------- windows

// Shared memory that each rank maps at its own address, as processes do.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes), fd_(memfd_create("window", MFD_CLOEXEC)) {
    if (ftruncate(fd_, static_cast<off_t>(bytes)) != 0) std::abort();
  }
  ~Memory() {
    for (void* place : places_) munmap(place, bytes_);
    ::close(fd_);
  }
  std::int64_t* map() {
    void* place = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (place == MAP_FAILED) std::abort();
    std::lock_guard lock(mutex_);
    places_.push_back(place);
    return static_cast<std::int64_t*>(place);
  }

 private:
  std::size_t bytes_;
  int fd_;
  std::mutex mutex_;
  std::vector<void*> places_;
};

constexpr std::size_t kPart = 40'000;  // elements of a window for one giver

struct Part {
  std::unique_ptr<Memory> memory;
  std::string rkey;
  std::int64_t* own = nullptr;
};

std::int64_t* open_window(Comm& comm, std::uint64_t window, std::vector<Part>& parts) {
  Rank& rank = comm.rank;
  const auto& host_of = rank.world.host_of;
  const std::size_t bytes = (1 + kPart * static_cast<std::size_t>(comm.size())) * 8;
  Part& mine = parts[comm.me];
  mine.memory = std::make_unique<Memory>(bytes);
  mine.own = mine.memory->map();
  const bool remote = host_of.front() != host_of.back();
  mine.rkey = rank.engine->map_window(comm.group, window, mine.own, bytes, remote);
  rank.world.meeting.arrive_and_wait();
  for (int other = 0; other < comm.size(); ++other) {
    if (other == comm.me && !rank.world.device) continue;
    const bool near = host_of[comm.members[other]] == host_of[rank.number] && !rank.world.device;
    rank.engine->open_window(comm.group, window, other, near ? parts[other].memory->map() : nullptr,
                             near ? std::string() : parts[other].rkey,
                             reinterpret_cast<std::uint64_t>(parts[other].own), bytes);
  }
  return mine.own;
}

// The ops on one window, in the form of Rank::post.
struct View {
  Comm& comm;
  std::uint64_t window;

  template <class Op, class... Arguments>
  Ticket post(Op op, Arguments... arguments) {
    return comm.rank.post(
        [&](Ticket ticket) { return post_on_window(*comm.rank.engine, op, ticket, comm.group, window, arguments...); });
  }
  template <class Op, class... Arguments>
  void finish(const char* what, Op op, Arguments... arguments) {
    comm.rank.finish(post(op, arguments...), what);
  }
};

// Each rank puts into the next rank's window and signals, and that rank checks the data. It adds to every rank's
// counter, and reads back its own put.
void windows(Comm& comm, std::vector<Part>& parts, std::uint64_t window, int rounds) {
  Rank& rank = comm.rank;
  const int me = comm.me, size = comm.size(), next = (me + 1) % size, before = (me + size - 1) % size;
  std::int64_t* own = open_window(comm, window, parts);
  View view{comm, window};
  comm.barrier();
  const auto place = [](int giver) { return (1 + kPart * static_cast<std::size_t>(giver)) * 8; };
  for (int round = 1; round <= rounds; ++round) {
    const std::size_t count = round % 2 ? 3 : kPart;
    std::vector<std::int64_t> give(count, me * 1000 + round), back(count);
    const Ticket put = view.post(&Engine::put, next, place(me), give.data(), count * 8);
    const Ticket signal = view.post(&Engine::signal, next);
    view.finish("wait_signal", &Engine::wait_signal, before);
    const std::int64_t* got = own + place(before) / 8;
    expect(std::all_of(got, got + count, [&](std::int64_t it) { return it == before * 1000 + round; }), "a wrong put");
    rank.finish(put, "put");
    rank.finish(signal, "signal");
    view.finish("flush", &Engine::flush, -1);
    view.finish("get", &Engine::get, next, place(me), back.data(), count * 8);
    expect(back == give, "what is read back is not what was put");
    for (int other = 0; other < size && !rank.world.device; ++other) {
      view.finish("fetch_add", &Engine::atomic, other, std::uint64_t{0}, false, std::size_t{8}, 1u, 0u);
    }
    // With two ranks the next one signals at the end of the round. Otherwise it never does.
    const Ticket wait = view.post(&Engine::wait_signal, next);
    if (size > 2) {
      expect(rank.engine->cancel_wait(comm.group, window, next, wait), "a wait for a signal is not withdrawn");
    } else {
      view.finish("another signal", &Engine::signal, before);
      rank.finish(wait, "a wait for a signal");
    }
    comm.barrier();
  }
  const std::int64_t counted = std::atomic_ref(own[0]).load();
  expect(counted == (rank.world.device ? 0 : rounds * size), "lost additions: %lld", static_cast<long long>(counted));
  view.finish("the last flush", &Engine::flush, -1);
  comm.barrier();
  rank.engine->close_window(comm.group, window);
}

// ------------------------------------------------------------------------------------------------------------- the end

// The communicator is lost. Its unfinished ops are dropped, and another communicator of the same engines continues.
void losses(Comm& lost, Comm& other) {
  Rank& rank = lost.rank;
  std::vector<Op> ops;
  std::vector<Ticket> tickets;
  lost.given = lost.reduced = filled(lost.me, 300'000, 1);
  lost.taken.resize(300'000);
  const int last = lost.size() - 1;
  // The last rank loses it after the others. UCX then still holds their messages for it.
  const bool in_order = rank.world.seed % 2;
  if (lost.me != last) {  // The last rank never does its part.
    tickets.push_back(post_recv(lost, lost.taken, last, 1));
    tickets.push_back(lost.collective(
        1, [&](auto& it, Unequal&) { return run_all_reduce(it, kSum, lost.reduced.data(), lost.reduced.size()); }));
    tickets.push_back(lost.collective(1, [&](auto& it, Unequal&) { return run_barrier(it); }));
    tickets.push_back(post_send(lost, lost.given, last, 2));
    std::this_thread::sleep_for(std::chrono::microseconds(rank.random.below(2000)));
  } else if (in_order) {
    rank.world.meeting.arrive_and_wait();
  }
  std::thread aborting([&] { rank.engine->lose_group(lost.group); });  // any thread may call that
  ops.push_back(post_collective(other));
  aborting.join();
  if (lost.me != last && in_order) {
    rank.engine->close_group(lost.group);
    rank.world.meeting.arrive_and_wait();
  }
  end(rank, ops);
  other.barrier();
  if (lost.me == last || !in_order) rank.engine->close_group(lost.group);
  for (Ticket ticket : tickets) {
    const Status status = rank.wait(ticket, "what was lost").status;
    // UCX may have sent the whole message by then.
    const bool ended = status == Status::kDropped || (ticket == tickets.back() && status == Status::kDone);
    expect(ended, "what was lost ends with %d", static_cast<int>(status));
  }
}

// A rank loses the communicator while its large message waits at another rank or is in transit, and overwrites the
// message. No rank takes the new bytes for the message.
void changes_of_mind(Comm& comm) {
  Rank& rank = comm.rank;
  const int last = comm.size() - 1;
  const bool one_host = rank.world.host_of.front() == rank.world.host_of.back();
  const bool gives = comm.me == 0, takes = comm.me == last;
  const bool amid = rank.random.below(2);
  Ints offered = filled(0, one_host ? 200'000 : 8'000'000, 1), taken(offered.size()), small(1);
  Ticket given = 0, late = 0;
  if (gives) {
    given = post_send(comm, offered, last, 3);
    rank.finish(post_send(comm, small, last, 4), "a message behind a large one");
  }
  if (takes) {  // The large message is in transit by then.
    rank.finish(post_recv(comm, small, 0, 4), "a message behind a large one");
    if (amid) late = post_recv(comm, taken, 0, 3);
  }
  rank.world.meeting.arrive_and_wait();
  if (gives) {
    std::this_thread::sleep_for(std::chrono::microseconds(rank.random.below(2000)));
    rank.engine->lose_group(comm.group);
    offered.assign(offered.size(), -1);
  }
  rank.world.meeting.arrive_and_wait();
  if (takes && !amid) late = post_recv(comm, taken, 0, 3);
  if (gives) {  // Messages that UCX still handles end when they arrive.
    const Status status = rank.wait(given, "a message that was given up").status;
    expect(status == Status::kDropped || status == Status::kDone, "it ends with %d", static_cast<int>(status));
  }
  rank.world.meeting.arrive_and_wait();
  if (!gives) rank.engine->lose_group(comm.group);
  if (takes) {
    const Status status = rank.wait(late, "a message that its sender gave up").status;
    expect(status == Status::kDropped || (amid && status == Status::kDone), "it is taken, with %d",
           static_cast<int>(status));
    if (status == Status::kDone) matches(taken, 0, 1, "a message that was written over");
  }
  rank.world.meeting.arrive_and_wait();
  rank.engine->close_group(comm.group);
}

// The same, while both sides copy the message.
void changes_of_mind_amid(Comm& comm) {
  Rank& rank = comm.rank;
  const int last = comm.size() - 1;
  const bool shared = last > 0 && !rank.world.device && rank.world.host_of.front() == rank.world.host_of.back();
  const std::uint64_t round = ++comm.round;
  const bool gives = shared && comm.me == 0, takes = shared && comm.me == last;
  Ints data = gives ? filled(0, 2'000'000, round) : Ints(2'000'000);
  const Ticket ticket = gives ? post_send(comm, data, last, 3) : takes ? post_recv(comm, data, 0, 3) : 0;
  if (gives) {
    std::this_thread::sleep_for(std::chrono::microseconds(rank.random.below(2000)));
    rank.engine->lose_group(comm.group);
    data.assign(data.size(), -1);
  }
  rank.world.meeting.arrive_and_wait();
  rank.engine->lose_group(comm.group);
  if (ticket && rank.wait(ticket).status == Status::kDone && takes)
    matches(data, 0, round, "a message that was given up");
  rank.world.meeting.arrive_and_wait();
  rank.engine->close_group(comm.group);
}

// Notes arrive although no loop makes progress.
void leave_notes(Comm& comm) {
  Engine& engine = *comm.rank.engine;
  for (int other : comm.members) {
    if (other != comm.rank.number) engine.send_frame(other, kNote + std::to_string(comm.rank.number));
  }
  for (std::size_t heard = 1; heard < comm.members.size();) {
    std::uint64_t added = 0;
    if (!becomes_readable(engine.notes_fileno())) {
      expect(false, "rank %d has heard %zu ranks, and waits for the others' notes in vain", comm.rank.number, heard);
      return;
    }
    [[maybe_unused]] ssize_t got = read(engine.notes_fileno(), &added, sizeof added);
    for (const auto& [peer, frame] : engine.take_notes()) {
      expect(frame == kNote + std::to_string(peer), "a strange note of %d", peer);
      ++heard;
    }
  }
}

// Ranks that disagree notice it. Some notice it themselves and tell the others.
void quarrels(Comm& comm) {
  leave_notes(comm);
  const Ticket ticket = comm.collective(comm.me == 0 ? 5 : 6, [](auto& it, Unequal&) { return run_barrier(it); });
  const Notice notice = comm.rank.wait_for(
      [](const Notice& it) { return it.kind == Notice::kDisagrees || it.kind == Notice::kFrame; }, "a disagreement");
  if (notice.kind == Notice::kDisagrees) {
    expect(notice.group == comm.group && notice.peer != comm.me, "a strange disagreement, with %d", notice.peer);
    for (int other : comm.members) {
      if (other != comm.rank.number) comm.rank.engine->send_frame(other, "we disagree");
    }
  } else {
    expect(notice.frame == "we disagree", "a strange frame");
  }
  comm.rank.world.meeting.arrive_and_wait();
  comm.rank.engine->lose_group(comm.group);
  comm.rank.wait(ticket);
  comm.rank.engine->close_group(comm.group);
}

// Ranks leave at different times. Messages that they have sent arrive, and receives of later ones end.
void farewell(Comm& comm) {
  Rank& rank = comm.rank;
  Ints parting = filled(comm.me, 20'000, 3);
  std::vector<Ints> takes(comm.size(), Ints(parting.size()));
  std::vector<Ticket> sends, recvs;
  for (int other = 0; other < comm.size(); ++other) {
    if (other != comm.me) sends.push_back(post_send(comm, parting, other, 1));
  }
  for (int other = 0; other < comm.size(); ++other) {
    recvs.push_back(other == comm.me ? 0 : post_recv(comm, takes[other], other, 1));
  }
  for (Ticket send : sends) rank.finish(send, "the last send");
  for (int other = 0; other < comm.size(); ++other) {
    if (other == comm.me) continue;
    rank.finish(recvs[other], "the last receive");
    matches(takes[other], other, 3, "the last message");
    if (other > comm.me) continue;  // Ranks leave in their order.
    Ints nothing(1);
    const Status status = rank.wait(post_recv(comm, nothing, other, 2)).status;
    expect(status == Status::kClosed, "a receive from a rank that has left ends with %d", static_cast<int>(status));
  }
  rank.engine->close_group(comm.group);
  rank.close(true);
}

// The last rank ends without a farewell while the others wait for it. The engine is closed during posts of another
// communicator.
void death(Comm& comm, Comm& other) {
  Rank& rank = comm.rank;
  const int last = comm.size() - 1;
  if (comm.me == last) {
    std::this_thread::sleep_for(std::chrono::microseconds(rank.random.below(3000)));
  } else {
    comm.taken.resize(100'000);
    comm.reduced = filled(comm.me, 100'000, 1);
    post_recv(comm, comm.taken, last, 1);
    comm.collective(
        1, [&](auto& it, Unequal&) { return run_all_reduce(it, kSum, comm.reduced.data(), comm.reduced.size()); });
    const Notice lost = rank.wait_for([](const Notice& it) { return it.kind == Notice::kLost; }, "a death");
    expect(lost.peer != rank.number, "a rank hears of its own death");  // Other ranks may have followed the last one.
  }
  std::optional<Amid> amid;
  if (comm.me != last) amid.emplace(other);  // The last rank calls nothing.
  rank.engine->lose_group(comm.group);
  rank.engine->close_group(comm.group);
  rank.close(false);
  if (amid) amid->go_on();
  if (amid) amid->leave();
}

void live(Rank& rank, std::vector<Part>& parts, bool dies) {
  std::vector<int> all(rank.world.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<int> reversed(all.rbegin(), all.rend());
  Comm comm(rank, all), other(rank, reversed), doomed(rank, all), regretted(rank, all), recanted(rank, all),
      disputed(rank, all), unlike(rank, all), forsaken(rank, all), left(rank, all), amid(rank, all);
  collectives(comm, other, 12);
  crowds_of_communicators(rank, all);
  lanes(comm, other, 8);
  lanes_given_up(comm, 4);
  crowds_given_up(comm);
  messages(comm, 6);
  floods(comm);
  pours(comm);
  cancels(other, 12);
  withdrawals_amid_a_post(other);
  withdrawals_beside_a_post(other, 12);
  misfits(comm);
  windows(comm, parts, 0, 4);
  losses(doomed, comm);
  changes_of_mind(regretted);
  changes_of_mind_amid(recanted);
  quarrels(disputed);
  quarrels_in_a_lane(unlike);
  losses_in_lanes(forsaken);
  losses_amid_posts(amid);
  departures_from_lanes(left);
  collectives(other, comm, 4);
  if (dies) return death(comm, other);
  rank.engine->close_group(other.group);
  farewell(comm);
}

}  // namespace
}  // namespace aiocomms

int main(int count, char** arguments) {
  using namespace aiocomms;
  const double seconds = count > 1 ? std::atof(arguments[1]) : 0;
  std::uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  const std::uint64_t ends = now_ns() + static_cast<std::uint64_t>(seconds * 1e9);
  const std::pair<int, Spread> kWorlds[] = {{2, Spread::kOne}, {3, Spread::kOne},   {2, Spread::kEach},
                                            {4, Spread::kOne}, {5, Spread::kPairs}, {3, Spread::kEach}};
  const std::pair<int, Spread> kDeviceWorlds[] = {{2, Spread::kOne}, {3, Spread::kEach}};
  constexpr int kAttacks = 40;
  unsigned worlds = walk_through_memory(Spread::kOne, seed);
  unwanted();
  worlds += beside(seed);
  do {
    for (auto [size, hosts] : kWorlds) {
      World world(size, hosts, seed);
      std::vector<Part> parts(static_cast<std::size_t>(size));
      world.run([&](Rank& rank) { live(rank, parts, seed % 3 == 0); });
      ++worlds;
      ++seed;
    }
    for (auto [size, hosts] : kDeviceWorlds) {
      World world(size, hosts, seed, true);
      std::vector<Part> parts(static_cast<std::size_t>(size));
      world.run([&](Rank& rank) { live(rank, parts, seed % 3 == 0); });
      ++worlds;
      ++seed;
    }
    worlds += comings_and_goings(seed++);
    for (int attack = 0; attack < kAttacks; ++attack, ++seed, ++worlds) {
      World world(3, Spread::kOne, seed);
      world.run([&](Rank& rank) { attacked(rank, attack % 4 != 0, [](Comm& comm) { messages(comm, 2); }); });
    }
  } while (now_ns() < ends);
  std::printf("%u worlds, %u checks, %u failures\n", worlds, checks.load(), failures.load());
  return failures.load() ? 1 : 0;
}
