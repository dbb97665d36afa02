// Engines at work, several in one process: what each thread of a rank does while the other is at it. Built with a sanitizer,
// this shows races and memory that is used too long; built without, that the results are right.
//
//   engine_test [seconds [seed]]    goes on with other seeds for so long; each world runs once at least
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "collectives.hpp"
#include "engine_world.hpp"

namespace aiocomms {
namespace {

using Ints = std::vector<std::int32_t>;

// An op under way, and how its result is checked. What it reads and writes lives as long as `check`.
struct Op {
  Ticket ticket;
  std::function<void()> check;
};

std::int32_t value(int rank, std::size_t at, std::uint64_t round) {
  return static_cast<std::int32_t>(static_cast<std::size_t>(rank) * 7919 + at * 31 + round * 101);
}

Ints filled(int rank, std::size_t count, std::uint64_t round) {
  Ints data(count);
  for (std::size_t at = 0; at < count; ++at) data[at] = value(rank, at, round);
  return data;
}

void matches(const Ints& data, int rank, std::uint64_t round, const char* what, std::size_t from = 0) {
  std::size_t at = 0;
  while (at < data.size() && data[at] == value(rank, from + at, round)) ++at;
  expect(at == data.size(), "%s: wrong at %zu of %zu, from rank %d, round %llu", what, at, data.size(), rank,
         static_cast<unsigned long long>(round));
}

const std::vector<std::size_t> kCounts = {0, 1, 5, 12, 13, 900, 5000, 20000, 300000};

// One communicator, as one rank sees it.
struct Comm {
  Rank& rank;
  std::vector<int> members;
  std::uint32_t group;
  int me;
  std::uint64_t round = 0;

  Comm(Rank& the_rank, std::vector<int> the_members)
      : rank(the_rank), members(std::move(the_members)), group(the_rank.open(members)),
        me(static_cast<int>(std::find(members.begin(), members.end(), rank.number) - members.begin())) {}
  int size() const { return static_cast<int>(members.size()); }
  template <class Make>
  Ticket collective(std::uint64_t mark, Make make) {
    return rank.post([&](Ticket ticket) { return rank.engine->collective(ticket, group, mark, make); });
  }
  void barrier() {
    rank.finish(collective(1, [](Group& it, Unequal&) { return run_barrier(it); }), "barrier");
  }
};

constexpr Reduction kSum{Operator::Sum, DType::Int32};

// -------------------------------------------------------------------------------------------------------- collectives

Op post_broadcast(Comm& comm, Random& common, std::uint64_t round) {
  const int root = static_cast<int>(common.below(comm.size()));
  const std::size_t count = common.of(kCounts);
  auto data = std::make_shared<Ints>(comm.me == root ? filled(root, count, round) : Ints(count));
  return {comm.collective(10 + root, [&](Group& it, Unequal&) { return run_broadcast(it, root, data->data(), count * 4); }),
          [=] { matches(*data, root, round, "broadcast"); }};
}

void matches_sum(const Ints& data, int ranks, std::uint64_t round, const char* what, std::size_t from = 0) {
  for (std::size_t at = 0; at < data.size(); ++at) {
    std::uint32_t sum = 0;
    for (int rank = 0; rank < ranks; ++rank) sum += static_cast<std::uint32_t>(value(rank, from + at, round));
    if (data[at] == static_cast<std::int32_t>(sum)) continue;
    expect(false, "%s: wrong at %zu of %zu", what, at, data.size());
    return;
  }
  expect(true, "%s", what);
}

Op post_reduce(Comm& comm, Random& common, std::uint64_t round) {
  const int root = static_cast<int>(common.below(comm.size() + 1)) - 1;  // -1: all_reduce
  const std::size_t count = common.of(kCounts);
  auto data = std::make_shared<Ints>(filled(comm.me, count, round));
  const int me = comm.me, size = comm.size();
  return {comm.collective(30 + root,
                          [&](Group& it, Unequal&) {
                            return root < 0 ? run_all_reduce(it, kSum, data->data(), count)
                                            : run_reduce(it, kSum, root, data->data(), count);
                          }),
          [=] {
            if (root < 0 || root == me) matches_sum(*data, size, round, "reduce");
            else matches(*data, me, round, "an input of reduce");
          }};
}

Op post_reduce_scatter(Comm& comm, Random& common, std::uint64_t round) {
  const std::size_t count = common.of(kCounts) / 4;
  Bytes counts;
  for (int rank = 0; rank < comm.size(); ++rank) counts.push_back(count * (rank % 3));
  const std::size_t before = std::accumulate(counts.begin(), counts.begin() + comm.me, std::size_t{0});
  auto in = std::make_shared<Ints>(filled(comm.me, std::accumulate(counts.begin(), counts.end(), std::size_t{0}), round));
  auto out = std::make_shared<Ints>(counts[comm.me]);
  Inputs ins;
  std::size_t offset = 0;
  for (std::size_t share : counts) {
    ins.push_back(in->data() + offset);
    offset += share;
  }
  const int size = comm.size();
  return {comm.collective(40, [&](Group& it, Unequal&) { return run_reduce_scatter(it, kSum, ins, counts, out->data()); }),
          [=] { matches_sum(*out, size, round, "reduce_scatter", before), (void)in; }};
}

// all_gather, and gather if there is a root.
Op post_gather(Comm& comm, Random& common, std::uint64_t round) {
  const int root = static_cast<int>(common.below(comm.size() + 1)) - 1, me = comm.me;
  const std::size_t count = common.of(kCounts) / 2;
  auto outs = std::make_shared<std::vector<Ints>>();
  Bytes bytes;
  Outputs places;
  for (int rank = 0; rank < comm.size(); ++rank) {
    bytes.push_back(4 * (root < 0 ? count * (rank % 2 + 1) : count));
    outs->emplace_back(bytes.back() / 4);
  }
  for (Ints& out : *outs) places.push_back(out.data());
  auto in = std::make_shared<Ints>(filled(me, bytes[me] / 4, round));
  if (root >= 0 && root != me) places.clear();
  return {comm.collective(50 + root,
                          [&](Group& it, Unequal&) {
                            return root < 0 ? run_all_gather(it, in->data(), places, bytes)
                                            : run_gather(it, root, in->data(), places, bytes[0]);
                          }),
          [=] {
            (void)in;
            for (int rank = 0; rank < static_cast<int>(outs->size()) && (root < 0 || root == me); ++rank) {
              matches((*outs)[rank], rank, round, "gather");
            }
          }};
}

Op post_scatter(Comm& comm, Random& common, std::uint64_t round) {
  const int root = static_cast<int>(common.below(comm.size())), me = comm.me;
  const std::size_t count = common.of(kCounts) / 2;
  auto in = std::make_shared<Ints>(me == root ? filled(root, count * comm.size(), round) : Ints());
  auto out = std::make_shared<Ints>(count);
  Inputs ins;
  for (int rank = 0; rank < comm.size() && me == root; ++rank) ins.push_back(in->data() + count * rank);
  return {comm.collective(60 + root, [&](Group& it, Unequal&) { return run_scatter(it, root, ins, out->data(), count * 4); }),
          [=] { matches(*out, root, round, "scatter", count * me), (void)in; }};
}

Op post_all_to_all(Comm& comm, Random& common, std::uint64_t round) {
  const bool equal = common.below(2);
  const std::size_t count = common.of(kCounts) / 4;
  const int me = comm.me, size = comm.size();
  auto in = std::make_shared<std::vector<Ints>>();
  auto out = std::make_shared<std::vector<Ints>>();
  Inputs ins;
  Outputs outs;
  Bytes in_bytes, out_bytes;
  for (int rank = 0; rank < size; ++rank) {
    in->push_back(filled(me, equal ? count : count * ((me + 2 * rank) % 3), round + static_cast<std::uint64_t>(rank)));
    out->emplace_back(equal ? count : count * ((rank + 2 * me) % 3));
    in_bytes.push_back(in->back().size() * 4);
    out_bytes.push_back(out->back().size() * 4);
  }
  for (int rank = 0; rank < size; ++rank) {
    ins.push_back((*in)[rank].data());
    outs.push_back((*out)[rank].data());
  }
  return {comm.collective(70 + equal,
                          [&](Group& it, Unequal& unequal) {
                            return run_all_to_all(it, ins, in_bytes, outs, out_bytes, equal, unequal);
                          }),
          [=] {
            (void)in;
            for (int rank = 0; rank < size; ++rank) {
              matches((*out)[rank], rank, round + static_cast<std::uint64_t>(me), "all_to_all");
            }
          }};
}

Op post_collective(Comm& comm) {
  const std::uint64_t round = ++comm.round;
  Random common(comm.rank.world.seed * 1000 + round);
  using Post = Op (*)(Comm&, Random&, std::uint64_t);
  static const std::vector<Post> kPosts = {post_broadcast, post_reduce,  post_reduce,    post_reduce_scatter,
                                           post_gather,    post_scatter, post_all_to_all};
  return common.of(kPosts)(comm, common, round);
}

void end(Rank& rank, std::vector<Op>& ops) {
  for (Op& op : ops) {
    rank.finish(op.ticket, "an op");
    op.check();
  }
  ops.clear();
}

// Several of them queue up; those of two communicators run beside each other.
void collectives(Comm& one, Comm& other, int count) {
  std::vector<Op> ops;
  for (int at = 0; at < count; ++at) {
    ops.push_back(post_collective(one));
    if (at % 2) ops.push_back(post_collective(other));
    if (one.rank.random.below(3) == 0) end(one.rank, ops);
  }
  end(one.rank, ops);
  one.barrier();
}

// ----------------------------------------------------------------------------------------------------------- messages

constexpr int kInt32 = 4;  // as DType has it

Ticket post_send(Comm& comm, const Ints& data, int dst, std::int64_t tag) {
  return comm.rank.post([&](Ticket ticket) {
    return comm.rank.engine->send(ticket, comm.group, data.data(), data.size() * 4, dst, 0, tag, kInt32);
  });
}

Ticket post_recv(Comm& comm, Ints& data, int src, std::int64_t tag, int dtype = kInt32) {
  return comm.rank.post([&](Ticket ticket) {
    return comm.rank.engine->recv(ticket, comm.group, data.data(), data.size() * 4, src, 0, tag, dtype);
  });
}

// To and from everybody, small and large, posted before or after they come.
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

// Receives that are withdrawn while their message may be on its way; whoever loses that race takes it.
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

// Messages that do not fit their receives end in errors, and nobody writes where nothing is to be written.
void misfits(Comm& comm) {
  const int dst = (comm.me + 1) % comm.size(), src = (comm.me + comm.size() - 1) % comm.size();
  for (std::size_t size : {std::size_t{40}, std::size_t{5000}, std::size_t{300000}}) {
    const Ints give = filled(comm.me, size, 0);
    Ints take(size / 2), other(size, -1);
    const Ticket sends[] = {post_send(comm, give, dst, 8), post_send(comm, give, dst, 9)};
    const Outcome truncated = comm.rank.wait(post_recv(comm, take, src, 8));
    const Outcome dtype = comm.rank.wait(post_recv(comm, other, src, 9, kInt32 + 1));
    expect(truncated.status == Status::kTruncated && truncated.details[0] == size * 4, "a truncated message passes");
    expect(dtype.status == Status::kDtype && dtype.details[1] == kInt32, "a message of another dtype passes");
    matches(take, src, 0, "the beginning of a message");
    expect(std::all_of(other.begin(), other.end(), [](std::int32_t it) { return it == -1; }), "a wrong message is taken");
    for (Ticket send : sends) comm.rank.finish(send, "the send of a misfit");
  }
}

// ------------------------------------------------------------------------------------------------------------ windows

// Shared memory, mapped by each rank at an address of its own, as between processes.
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

constexpr std::size_t kPart = 40'000;  // elements of a window that belong to one giver

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
    if (other == comm.me) continue;
    const bool near = host_of[comm.members[other]] == host_of[rank.number];
    rank.engine->open_window(comm.group, window, other, near ? parts[other].memory->map() : nullptr,
                             near ? std::string() : parts[other].rkey, reinterpret_cast<std::uint64_t>(parts[other].own));
  }
  return mine.own;
}

// Each rank puts into the next one's window and signals; that checks it, adds to everybody's counter, and reads it back.
void windows(Comm& comm, std::vector<Part>& parts, std::uint64_t window, int rounds) {
  Rank& rank = comm.rank;
  Engine& engine = *rank.engine;
  const int me = comm.me, size = comm.size(), next = (me + 1) % size, before = (me + size - 1) % size;
  std::int64_t* own = open_window(comm, window, parts);
  comm.barrier();
  const auto place = [](int giver) { return (1 + kPart * static_cast<std::size_t>(giver)) * 8; };
  for (int round = 1; round <= rounds; ++round) {
    const std::size_t count = round % 2 ? 3 : kPart;
    std::vector<std::int64_t> give(count, me * 1000 + round), back(count);
    const Ticket put = rank.post([&](Ticket t) { return engine.put(t, comm.group, window, next, place(me), give.data(), count * 8); });
    const Ticket signal = rank.post([&](Ticket t) { return engine.signal(t, comm.group, window, next); });
    rank.finish(rank.post([&](Ticket t) { return engine.wait_signal(t, comm.group, window, before); }), "wait_signal");
    const std::int64_t* got = own + place(before) / 8;
    expect(std::all_of(got, got + count, [&](std::int64_t it) { return it == before * 1000 + round; }), "a wrong put");
    rank.finish(put, "put");
    rank.finish(signal, "signal");
    rank.finish(rank.post([&](Ticket t) { return engine.flush(t, comm.group, window, -1); }), "flush");
    rank.finish(rank.post([&](Ticket t) { return engine.get(t, comm.group, window, next, place(me), back.data(), count * 8); }), "get");
    expect(back == give, "what is read back is not what was put");
    for (int other = 0; other < size; ++other) {
      rank.finish(rank.post([&](Ticket t) { return engine.atomic(t, comm.group, window, other, 0, false, 8, 1, 0); }), "fetch_add");
    }
    const Ticket vain = rank.post([&](Ticket t) { return engine.wait_signal(t, comm.group, window, next); });
    const bool withdrawn = size > 2 && engine.cancel_wait(comm.group, window, next, vain);
    if (size == 2) rank.post([&](Ticket t) { return engine.signal(t, comm.group, window, before); });
    if (!withdrawn) rank.finish(vain, "a wait for a signal");
    comm.barrier();
  }
  expect(std::atomic_ref(own[0]).load() == static_cast<std::int64_t>(rounds) * size, "lost additions: %lld",
         static_cast<long long>(own[0]));
  rank.finish(rank.post([&](Ticket t) { return engine.flush(t, comm.group, window, -1); }), "the last flush");
  comm.barrier();
  engine.close_window(comm.group, window);
}

// ------------------------------------------------------------------------------------------------------------ the end

// All is lost in the middle of it: what is under way is dropped, and another communicator of the same engines goes on.
void losses(Comm& lost, Comm& other) {
  Rank& rank = lost.rank;
  std::vector<Op> ops;
  std::vector<Ticket> tickets;
  Ints large = filled(lost.me, 300'000, 1), taken(large.size()), sum = large;
  const int last = lost.size() - 1;
  if (lost.me != last) {  // which never does its part
    tickets.push_back(lost.collective(1, [&](Group& it, Unequal&) { return run_all_reduce(it, kSum, sum.data(), sum.size()); }));
    tickets.push_back(lost.collective(1, [&](Group& it, Unequal&) { return run_barrier(it); }));
    tickets.push_back(post_recv(lost, taken, last, 1));
    tickets.push_back(post_send(lost, large, last, 2));
    std::this_thread::sleep_for(std::chrono::microseconds(rank.random.below(2000)));
  }
  ops.push_back(post_collective(other));
  rank.engine->lose_group(lost.group);
  for (Ticket ticket : tickets) {
    // UCX may have taken the send; and if it still holds that, its outcome comes when the engine is closed.
    if (ticket == tickets.back() && rank.world.host_of.front() != rank.world.host_of.back()) break;
    const Status status = rank.wait(ticket).status;
    expect(status == Status::kDropped || ticket == tickets.back(), "what was lost ends with %d", static_cast<int>(status));
  }
  end(rank, ops);
  other.barrier();
  rank.engine->close_group(lost.group);
}

// Ranks that disagree find out: some by themselves, who tell the others.
void quarrels(Comm& comm) {
  const Ticket ticket = comm.collective(comm.me == 0 ? 5 : 6, [](Group& it, Unequal&) { return run_barrier(it); });
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

// Ranks leave at different times: what they have sent before arrives, what they would have sent ends.
void farewell(Comm& comm) {
  Rank& rank = comm.rank;
  Ints parting = filled(comm.me, 20'000, 3);
  std::vector<Ints> takes(comm.size(), Ints(parting.size()));
  std::vector<Ticket> sends, recvs;
  for (int other = 0; other < comm.size(); ++other) {
    if (other != comm.me) sends.push_back(post_send(comm, parting, other, 1));
  }
  for (int other = 0; other < comm.size(); ++other) recvs.push_back(other == comm.me ? 0 : post_recv(comm, takes[other], other, 1));
  for (Ticket send : sends) rank.finish(send, "the last send");
  for (int other = 0; other < comm.size(); ++other) {
    if (other == comm.me) continue;
    rank.finish(recvs[other], "the last receive");
    matches(takes[other], other, 3, "the last message");
    if (other > comm.me) continue;  // ranks leave in their order
    Ints nothing(1);
    const Status status = rank.wait(post_recv(comm, nothing, other, 2)).status;
    expect(status == Status::kClosed, "a receive from a rank that has left ends with %d", static_cast<int>(status));
  }
  rank.engine->close_group(comm.group);
  rank.close(true);
}

// The last rank is gone without a word, while the others wait for it.
void death(Comm& comm) {
  Rank& rank = comm.rank;
  const int last = comm.size() - 1;
  if (comm.me == last) {
    std::this_thread::sleep_for(std::chrono::microseconds(rank.random.below(3000)));
    return rank.close(false);
  }
  Ints taken(100'000), sum = filled(comm.me, 100'000, 1);
  post_recv(comm, taken, last, 1);
  comm.collective(1, [&](Group& it, Unequal&) { return run_all_reduce(it, kSum, sum.data(), sum.size()); });
  const Notice lost = rank.wait_for([](const Notice& it) { return it.kind == Notice::kLost; }, "a death");
  expect(lost.peer == last, "rank %d is lost", lost.peer);
  rank.engine->lose_group(comm.group);
  rank.engine->close_group(comm.group);
  rank.close(false);
}

void live(Rank& rank, std::vector<Part>& parts, bool dies) {
  std::vector<int> all(rank.world.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<int> reversed(all.rbegin(), all.rend());
  Comm comm(rank, all), other(rank, reversed), doomed(rank, all), disputed(rank, all);
  collectives(comm, other, 12);
  messages(comm, 6);
  cancels(other, 12);
  misfits(comm);
  windows(comm, parts, 0, 4);
  losses(doomed, comm);
  quarrels(disputed);
  collectives(other, comm, 4);
  rank.engine->close_group(other.group);
  dies ? death(comm) : farewell(comm);
}

}  // namespace
}  // namespace aiocomms

int main(int count, char** arguments) {
  using namespace aiocomms;
  const double seconds = count > 1 ? std::atof(arguments[1]) : 0;
  std::uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  const std::uint64_t ends = now_ns() + static_cast<std::uint64_t>(seconds * 1e9);
  const std::pair<int, Hosts> kWorlds[] = {{2, Hosts::kOne}, {3, Hosts::kOne},  {2, Hosts::kEach},
                                           {4, Hosts::kOne}, {4, Hosts::kPairs}, {3, Hosts::kEach}};
  unsigned worlds = 0;
  do {
    for (auto [size, hosts] : kWorlds) {
      std::fprintf(stderr, "seed %llu: %d ranks, hosts %d\n", static_cast<unsigned long long>(seed), size, static_cast<int>(hosts));
      World world(size, hosts, seed);
      std::vector<Part> parts(static_cast<std::size_t>(size));
      world.run([&](Rank& rank) { live(rank, parts, seed % 3 == 0); });
      ++worlds;
      ++seed;
    }
  } while (now_ns() < ends);
  std::printf("%u worlds, %u checks, %u failures\n", worlds, checks.load(), failures.load());
  return failures.load() ? 1 : 0;
}
