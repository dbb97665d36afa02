#include "critical_path.hpp"

#include <cstring>

#include "segment_inside.hpp"

namespace {

// While it is not 0, copies do not count. They belong to a real function that is counted as a whole, or to no rank.
int depth = 0;

struct Unseen {
  Unseen() { ++depth; }
  ~Unseen() { --depth; }
};

}  // namespace

namespace aiocomms {

void CriticalPath::note_published() {
  Shared* const shared = hosts_.shared(running_);
  if (shared == nullptr) return;
  Times& mine = times(running_);
  for (std::uint64_t line = 0; line < Segment::kDepth; ++line) {
    if (const auto first = SegmentInside::first(shared->segment, line)) mine.first.try_emplace(first - 1, mine.clock);
    if (const auto second = SegmentInside::second(shared->segment, line))
      mine.second.try_emplace(second - 1, mine.clock);
  }
  mine.read.try_emplace(SegmentInside::read(shared->segment), mine.clock);
}

void CriticalPath::wait_for(What what, int place, std::uint64_t round) {
  note_published();
  const Hosts& hosts = hosts_.hosts(running_);
  const Times& theirs = times(hosts.ranks[static_cast<std::size_t>(hosts.here)][static_cast<std::size_t>(place)]);
  double seen = 0;
  if (what == What::kFirst) seen = theirs.first.at(round);
  if (what == What::kSecond) seen = theirs.second.at(round);
  if (what == What::kRead) seen = theirs.read.lower_bound(round)->second;
  if (place != hosts.place) clock() = std::max(clock(), seen + speed_.line);
}

// The running rank has looked. The awaited line is there, with the time of its publication.
bool Shared::Wait::ready() {
  using Awaited = Segment::Awaited;
  CriticalPath& path = *CriticalPath::current;
  path.note_published();
  if (!shared_.segment.has_come(awaited_)) return false;
  const auto& [what, place, round] = awaited_;
  if (what == Awaited::kOne) path.wait_for(CriticalPath::What::kFirst, place, round);
  if (what == Awaited::kSecond) path.wait_for(CriticalPath::What::kSecond, place, round);
  for (int each = 0; each < shared_.segment.ranks(); ++each) {
    if (what == Awaited::kAll) path.wait_for(CriticalPath::What::kFirst, each, round);
    if (what == Awaited::kWritable && round >= Segment::kDepth)
      path.wait_for(CriticalPath::What::kRead, each, round - Segment::kDepth + 1);
  }
  return true;
}

void CriticalPath::send(int src, int dst, const void* data, std::size_t bytes, Event& event) {
  spend(cost(src, dst, bytes));
  const auto* const first = static_cast<const std::byte*>(data);
  const Unseen unseen;
  at(clock(), [this, src, dst, &event, copy = std::vector<std::byte>(first, first + bytes)]() mutable {
    depart(src, dst, std::move(copy), event);
  });
}

void CriticalPath::depart(int src, int dst, std::vector<std::byte> data, Event& event) {
  const double now = queue_time_;
  double sent = now, arrived = now + 0.5;
  if (!near(src, dst)) {
    const double takes = static_cast<double>(data.size()) / speed_.network;
    Link &from = links_[hosts_.host_of(src)], &to = links_[hosts_.host_of(dst)];
    const double departs = std::max(now, from.out);
    from.out = sent = departs + takes;
    to.in = arrived = std::max(departs + speed_.latency, to.in) + takes;
  }
  at(sent, [this, src, sent, &event] { step(src, sent, [&] { event.complete(); }); });
  times(dst).arrivals[src].push({arrived, std::move(data)});
  match(src, dst);
}

void CriticalPath::match(int src, int dst) {
  auto& receives = times(dst).receives[src];
  auto& arrivals = times(dst).arrivals[src];
  while (!receives.empty() && !arrivals.empty()) {
    const Receive receive = receives.front();
    Arrival arrival = std::move(arrivals.front());
    receives.pop();
    arrivals.pop();
    at(arrival.time, [this, src, dst, receive, arrival = std::move(arrival)] {
      step(dst, arrival.time, [&] {
        std::copy(arrival.data.begin(), arrival.data.end(), static_cast<std::byte*>(receive.data));
        spend(cost(src, dst, arrival.data.size()));
        receive.event->complete();
      });
    });
  }
}

void CriticalPath::step(int rank, double time, const std::function<void()>& what) {
  running_ = rank;
  clock() = std::max(clock(), time);
  what();
  note_published();
  for (bool moved = true; moved;) {
    moved = false;
    for (int other : hosts_.hosts(rank).ranks[static_cast<std::size_t>(hosts_.host_of(rank))]) {
      Shared* const shared = hosts_.shared(other);
      if (shared == nullptr) continue;
      running_ = other;
      moved |= shared->poll();
      note_published();
    }
  }
}

double CriticalPath::run(const std::function<Task(Reach, int)>& make) {
  current = this;
  hosts_.slice_ends = ~std::uint64_t{0};
  std::vector<Task> tasks;
  for (int rank = 0; rank < hosts_.size(); ++rank) {
    running_ = rank;
    tasks.push_back(make(hosts_.reach(rank, ports_[static_cast<std::size_t>(rank)]), rank));
  }
  for (int rank = 0; rank < hosts_.size(); ++rank) {
    at(0, [this, rank, &tasks] { step(rank, 0, [&] { tasks[static_cast<std::size_t>(rank)].start(); }); });
  }
  while (!queue_.empty()) {
    const Item item = queue_.top();
    queue_.pop();
    queue_time_ = item.time;
    item.what();
  }
  current = nullptr;
  double last = 0;
  for (int rank = 0; rank < hosts_.size(); ++rank) {
    if (!tasks[static_cast<std::size_t>(rank)].done()) return -1;
    last = std::max(last, times(rank).clock);
  }
  return last;
}

}  // namespace aiocomms

// The functions that copy and reduce. The linker puts them in place of the real functions, which they call.

using aiocomms::CriticalPath;
using aiocomms::Reduction;

namespace {

struct Touching {
  explicit Touching(std::size_t bytes) {
    if (depth++ == 0 && CriticalPath::current) CriticalPath::current->touch(bytes);
  }
  ~Touching() { --depth; }
};

std::size_t lifted_size(const Reduction& reduction) { return size_of(lifted(reduction.dtype)); }

}  // namespace

extern "C" {

void* __real_memcpy(void* to, const void* from, std::size_t bytes);
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
  const Touching touching(2 * bytes);
  return __real_memcpy(to, from, bytes);
}
}

namespace aiocomms {

#define REAL(symbol) asm("__real_" symbol)
#define WRAP(symbol) asm("__wrap_" symbol)
#define REDUCE "_ZN8aiocomms6reduceERKNS_9ReductionEPvPKPKvim"
#define FOLD "_ZN8aiocomms4foldERKNS_9ReductionEPvPKPKvim"
#define LIFT "_ZN8aiocomms4liftERKNS_9ReductionEPvPKvm"
#define COMBINE "_ZN8aiocomms7combineERKNS_9ReductionEPvPKvm"
#define LOWER "_ZN8aiocomms5lowerERKNS_9ReductionEPvPKvmi"

void real_reduce(const Reduction&, void*, const void* const*, int, std::size_t) REAL(REDUCE);
void wrapped_reduce(const Reduction&, void*, const void* const*, int, std::size_t) WRAP(REDUCE);
void real_fold(const Reduction&, void*, const void* const*, int, std::size_t) REAL(FOLD);
void wrapped_fold(const Reduction&, void*, const void* const*, int, std::size_t) WRAP(FOLD);
void real_lift(const Reduction&, void*, const void*, std::size_t) REAL(LIFT);
void wrapped_lift(const Reduction&, void*, const void*, std::size_t) WRAP(LIFT);
void real_combine(const Reduction&, void*, const void*, std::size_t) REAL(COMBINE);
void wrapped_combine(const Reduction&, void*, const void*, std::size_t) WRAP(COMBINE);
void real_lower(const Reduction&, void*, const void*, std::size_t, int) REAL(LOWER);
void wrapped_lower(const Reduction&, void*, const void*, std::size_t, int) WRAP(LOWER);

void wrapped_reduce(const Reduction& reduction, void* out, const void* const* in, int n, std::size_t count) {
  const Touching touching((static_cast<std::size_t>(n) + 1) * count * size_of(reduction.dtype));
  real_reduce(reduction, out, in, n, count);
}

void wrapped_fold(const Reduction& reduction, void* out, const void* const* in, int n, std::size_t count) {
  const std::size_t read = static_cast<std::size_t>(n) * size_of(reduction.dtype);
  const Touching touching((read + lifted_size(reduction)) * count);
  real_fold(reduction, out, in, n, count);
}

void wrapped_lift(const Reduction& reduction, void* out, const void* in, std::size_t count) {
  const Touching touching((size_of(reduction.dtype) + lifted_size(reduction)) * count);
  real_lift(reduction, out, in, count);
}

void wrapped_combine(const Reduction& reduction, void* out, const void* in, std::size_t count) {
  const Touching touching(3 * lifted_size(reduction) * count);
  real_combine(reduction, out, in, count);
}

void wrapped_lower(const Reduction& reduction, void* out, const void* in, std::size_t count, int ranks) {
  const Touching touching(out == in ? 0 : (size_of(reduction.dtype) + lifted_size(reduction)) * count);
  real_lower(reduction, out, in, count, ranks);
}

}  // namespace aiocomms
