// The schedules that reduce.
//
// Operands keep the order of the ranks if several ranks must reduce in the same order. Floating point addition commutes
// bit by bit only without NaN. The same holds for min and max without zeros of both signs.
#include <vector>

#include "collectives/message_collectives.hpp"
#include "collectives/schedule_parts.hpp"

namespace aiocomms {

using std::size_t;

namespace {

// Splits `count` elements into one chunk per rank. The first chunks may be one element longer.
struct Chunks {
  std::vector<size_t> counts, offsets;  // in elements

  Chunks(size_t count, int size) {
    const size_t ranks = static_cast<size_t>(size);
    for (size_t rank = 0, offset = 0; rank < ranks; ++rank) {
      counts.push_back(count / ranks + (rank < count % ranks ? 1 : 0));
      offsets.push_back(offset);
      offset += counts.back();
    }
  }
};

// The reduction of a single rank.
Task alone(Reduction reduction, const void* in, void* out, size_t count) {
  if (count != 0) reduce(reduction, out, &in, 1, count);
  co_return;
}

// Recursive doubling (Thakur, Rabenseifner, Gropp: "Optimization of collective communication operations in MPICH",
// 2005). In each step two ranks exchange all their data. `extra` ranks exceed a power of two. Each of them first gives
// its contribution to the rank before it, and finally gets the result.
Task recursive_doubling(Messages& messages, Reduction reduction, void* data, size_t count) {
  const int rank = messages.rank(), size = messages.size();
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(size))), extra = size - power;
  const bool has_extra = rank < 2 * extra && rank % 2 == 0, is_extra = rank < 2 * extra && rank % 2 == 1;
  const size_t result_bytes = count * size_of(reduction.dtype), bytes = count * size_of(lifted(reduction.dtype));
  const Scratch scratch = make_scratch(2 * bytes);
  std::byte* mine = scratch.get();
  std::byte* theirs = mine + bytes;
  lift(reduction, mine, data, count);
  if (is_extra) {
    Event received, sent;
    messages.recv(rank - 1, data, result_bytes, received);
    messages.send(rank - 1, mine, bytes, sent);
    co_await sent;
    co_await received;
    co_return;
  }
  if (has_extra) {
    Event received;
    messages.recv(rank + 1, theirs, bytes, received);
    co_await received;
    combine(reduction, mine, theirs, count);
  }
  const int place = rank < 2 * extra ? rank / 2 : rank - extra;
  for (int mask = 1; mask < power; mask *= 2) {
    const int other = place ^ mask, partner = other < extra ? 2 * other : other + extra;
    Event received, sent;
    messages.recv(partner, theirs, bytes, received);
    messages.send(partner, mine, bytes, sent);
    co_await received;
    co_await sent;
    if (partner < rank) std::swap(mine, theirs);
    combine(reduction, mine, theirs, count);
  }
  lower(reduction, data, mine, count, size);
  if (has_extra) {
    Event sent;
    messages.send(rank + 1, data, result_bytes, sent);
    co_await sent;
  }
}

// Every rank reduces its chunk of all contributions, then all gather the results (Rabenseifner, "Optimization of
// collective reduction operations", 2004). For long vectors both parts are rings (Patarasuk, Yuan, "Bandwidth optimal
// all-reduce algorithms for clusters of workstations", 2009). The gathered results are already lowered, which halves
// the bytes of 16-bit floats.
Task scattered_all_reduce(Messages& messages, Reduction reduction, void* data, size_t count) {
  const int rank = messages.rank(), size = messages.size();
  const size_t element = size_of(reduction.dtype);
  const Chunks chunks(count, size);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::vector<size_t> bytes;
  for (int i = 0; i < size; ++i) {
    outputs.push_back(at(data, chunks.offsets[i] * element));
    inputs.push_back(outputs.back());
    bytes.push_back(chunks.counts[i] * element);
  }
  Task scattering = reduce_scatter(messages, reduction, inputs.data(), chunks.counts.data(), outputs[rank]);
  co_await scattering;
  Task gathering = all_gather(messages, outputs[rank], outputs.data(), bytes.data());
  co_await gathering;
}

// A binomial tree upwards. A rank's children follow it in the order of reduction, the nearest first.
Task tree_reduce(Messages& messages, Reduction reduction, int root, const void* in, void* out, size_t count) {
  const TreePlace place(messages.rank(), root, messages.size());
  const size_t bytes = count * size_of(lifted(reduction.dtype));
  const Scratch scratch = make_scratch((place.most_children() + 1) * bytes);
  std::byte* theirs = scratch.get();
  Burst received(place.most_children());
  for (int mask = 1; mask < place.span() && place.has_child(mask); mask *= 2)
    messages.recv(place.rank_at(mask), theirs += bytes, bytes, received.next());
  lift(reduction, scratch.get(), in, count);
  theirs = scratch.get();
  for (Event& event : received) {
    co_await event;
    combine(reduction, scratch.get(), theirs += bytes, count);
  }
  if (place.is_root()) {
    lower(reduction, out, scratch.get(), count, messages.size());
    co_return;
  }
  Event sent;
  messages.send(place.parent(), scratch.get(), bytes, sent);
  co_await sent;
}

// Every rank reduces its chunk of all contributions, and sends the result to the root (Rabenseifner 2004).
Task scattered_reduce(Messages& messages, Reduction reduction, int root, const void* in, void* out, size_t count) {
  const int rank = messages.rank(), size = messages.size();
  const size_t element = size_of(reduction.dtype);
  const Chunks chunks(count, size);
  const size_t own_bytes = chunks.counts[rank] * element;
  std::vector<const void*> inputs;
  for (size_t offset : chunks.offsets) inputs.push_back(at(in, offset * element));
  const Scratch scratch = make_scratch(rank == root ? 0 : own_bytes);
  std::byte* const own = rank == root ? at(out, chunks.offsets[rank] * element) : scratch.get();
  Task scattering = reduce_scatter(messages, reduction, inputs.data(), chunks.counts.data(), own);
  co_await scattering;
  Burst events(size);
  if (rank != root && own_bytes != 0) messages.send(root, own, own_bytes, events.next());
  for (int from = 0; rank == root && from < size; ++from)
    if (from != root && chunks.counts[from] != 0)
      messages.recv(from, at(out, chunks.offsets[from] * element), chunks.counts[from] * element, events.next());
  for (Event& event : events) co_await event;
}

// Every rank sends each other rank its chunk unchanged, and reduces the received chunks in the order of ranks. This
// takes one step and the fewest bytes. (It is the pairwise exchange of Thakur, Rabenseifner, Gropp 2005, all at once.)
Task direct_reduce_scatter(Messages& messages, Reduction reduction, const void* const* inputs, const size_t* counts,
                           void* output) {
  const int rank = messages.rank(), size = messages.size();
  const size_t element = size_of(reduction.dtype), bytes = counts[rank] * element;
  const Scratch scratch = make_scratch(static_cast<size_t>(size - 1) * bytes);
  std::vector<const void*> contributions(static_cast<size_t>(size), inputs[rank]);
  Burst events(2 * size);
  for (int i = 1; i < size; ++i) {
    const int from = around(rank, -i, size), to = around(rank, i, size);
    std::byte* const theirs = at(scratch.get(), static_cast<size_t>(i - 1) * bytes);
    contributions[from] = theirs;
    if (bytes != 0) messages.recv(from, theirs, bytes, events.next());
    if (counts[to] != 0) messages.send(to, inputs[to], counts[to] * element, events.next());
  }
  for (Event& event : events) co_await event;
  if (bytes != 0) reduce(reduction, output, contributions.data(), size, counts[rank]);
}

// The arithmetic of a ring. It combines each segment from the earlier ranks with this rank's contribution.
class RingArithmetic {
 public:
  RingArithmetic(const Reduction& reduction, size_t segment, int size)
      : reduction_(reduction),
        size_(size),
        lifts_(lifts(reduction)),
        lifted_(make_scratch(lifts_ ? segment * size_of(lifted(reduction.dtype)) : 0)) {}

  // Returns the first data that a rank sends: `own`, or its lifted copy in `slot`.
  const void* begin(void* slot, const void* own, size_t count) const {
    if (lifts_) lift(reduction_, slot, own, count);
    return lifts_ ? slot : own;
  }

  void go_on(void* slot, const void* own, size_t count) const {
    if (lifts_) lift(reduction_, lifted_.get(), own, count);
    combine(reduction_, slot, lifts_ ? lifted_.get() : own, count);
  }

  // `out` may be `own`.
  void finish(void* out, void* slot, const void* own, size_t count) const {
    if (!lifts_ && !lowers(reduction_)) {  // in one pass
      const void* const both[] = {slot, own};
      return reduce(reduction_, out, both, 2, count);
    }
    go_on(slot, own, count);
    lower(reduction_, out, slot, count, size_);
  }

 private:
  Reduction reduction_;
  int size_;
  bool lifts_;
  Scratch lifted_;
};

// A ring (Patarasuk, Yuan 2009) with segments: while one is reduced, kWindow - 1 others are in transit. Rank r's chunk
// starts at rank r + 1 and ends at r. Turn t receives into slot t modulo 2 * kWindow, and turn t + kWindow sends from
// there. After a chunk's last step, its slot takes the next lifted segment.
Task ring_reduce_scatter(Messages& messages, Reduction reduction, const void* const* inputs, const size_t* counts,
                         void* output) {
  const int rank = messages.rank(), size = messages.size();
  const int before = around(rank, -1, size), after = around(rank, 1, size);
  const size_t element = size_of(reduction.dtype), lifted_element = size_of(lifted(reduction.dtype));
  const size_t segment = kSegment / lifted_element;
  const RingTurns turns(before, size, counts, segment);
  const RingArithmetic arithmetic(reduction, segment, size);
  const Scratch slots = make_scratch(2 * kWindow * kSegment);
  Slots received, sent;
  const auto slot = [&](size_t turn) { return at(slots.get(), turn % (2 * kWindow) * kSegment); };
  const auto own = [&](const RingTurns::Piece& piece) { return at(inputs[piece.chunk], piece.first * element); };
  const auto receive = [&](size_t turn) {
    const size_t count = turns.incoming(turn).count;
    if (count != 0) messages.recv(before, slot(turn), count * lifted_element, received[turn % kWindow].renew());
  };
  const auto send = [&](size_t turn) {
    const RingTurns::Piece piece = turns.outgoing(turn);
    if (piece.count == 0) return;
    const void* data = slot(turn + kWindow);  // This is the slot of turn - kWindow.
    if (turns.is_first_step(turn)) data = arithmetic.begin(slot(turn + kWindow), own(piece), piece.count);
    messages.send(after, data, piece.count * lifted_element, sent[turn % kWindow].renew());
  };
  for (size_t turn = 0; turn < std::min(kWindow, turns.count()); ++turn) {
    receive(turn);
    send(turn);
  }
  for (size_t turn = 0; turn < turns.count(); ++turn) {
    Slot& arrival = received[turn % kWindow];
    co_await arrival;
    const RingTurns::Piece piece = turns.incoming(turn);
    if (piece.count != 0 && turns.is_last_step(turn))
      arithmetic.finish(at(output, piece.first * element), slot(turn), own(piece), piece.count);
    else if (piece.count != 0)
      arithmetic.go_on(slot(turn), own(piece), piece.count);
    Slot& departure = sent[turn % kWindow];
    co_await departure;  // The next receive uses its memory.
    if (turn + kWindow >= turns.count()) continue;
    receive(turn + kWindow);
    send(turn + kWindow);
  }
}

}  // namespace

Task all_reduce(Messages& messages, const Reduction& reduction, void* data, size_t count) {
  if (messages.size() == 1 || count == 0) return alone(reduction, data, data, count);
  if (count * size_of(reduction.dtype) <= kSmallReduction) return recursive_doubling(messages, reduction, data, count);
  return scattered_all_reduce(messages, reduction, data, count);
}

Task reduce(Messages& messages, const Reduction& reduction, int root, const void* in, void* out, size_t count) {
  if (messages.size() == 1 || count == 0) return alone(reduction, in, out, count);
  if (count * size_of(reduction.dtype) <= kSmallReduction)
    return tree_reduce(messages, reduction, root, in, out, count);
  return scattered_reduce(messages, reduction, root, in, out, count);
}

Task reduce_scatter(Messages& messages, const Reduction& reduction, const void* const* inputs, const size_t* counts,
                    void* output) {
  if (messages.size() == 1) return alone(reduction, inputs[0], output, counts[0]);
  const size_t longest = *std::max_element(counts, counts + messages.size());
  // A ring pays if it has more than one segment to keep in transit. It also crosses each link of a network only once.
  if (longest * size_of(reduction.dtype) <= kSegment)
    return direct_reduce_scatter(messages, reduction, inputs, counts, output);
  return ring_reduce_scatter(messages, reduction, inputs, counts, output);
}

}  // namespace aiocomms
