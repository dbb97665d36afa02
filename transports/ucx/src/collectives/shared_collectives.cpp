#include "collectives/shared_collectives.hpp"

#include <algorithm>
#include <cstring>

#include "collectives/schedule_parts.hpp"
#include "collectives/span.hpp"
#include "net/copy.hpp"

namespace aiocomms {
namespace {

// Up to this size every rank reduces all data itself. A second phase would cost a synchronisation, which takes longer.
// Two ranks always do so, because sharing the work would not reduce their reads and writes of each other's data.
constexpr std::size_t kDirect = 4096;
// A chunk is so large that the synchronisation of a round is negligible. A share consists of whole cache lines.
constexpr std::size_t kSmallestChunk = 32 * 1024;
// Reduced data are copied while they are in the innermost cache.
constexpr std::size_t kTile = 8 * 1024;

std::uint64_t rounds_for(std::size_t bytes, std::size_t chunk) {
  return std::max<std::size_t>(1, divided_up(bytes, chunk));
}

// The size of chunks that fill a pipeline, which is `depth` rounds deep: two to the power of `depth` chunks. They are
// at least kSmallestChunk, and fit in a slot.
std::size_t chunk_for(std::size_t bytes, std::size_t depth) {
  return std::clamp(rounded_up(bytes >> depth, kLine), kSmallestChunk, Segment::kSlot);
}

}  // namespace

Task shared_barrier(Shared& shared) {
  const std::uint64_t round = shared.take(1);
  co_await shared.writable(round);
  shared.publish(round);
  co_await shared.all(round);
  shared.finish(round);
}

namespace {

// Every rank reads all data, from the lines or from the slots. It contributes one chunk and then reduces the one
// before. Two chunks are as large as a slot allows.
Task reduce_directly(Shared& shared, Reduction reduction, int root, void* data, void* out, std::size_t count) {
  Segment& segment = shared.segment;
  const std::size_t size = size_of(reduction.dtype), bytes = count * size;
  const bool small = bytes <= Segment::kInline, takes = root < 0 || root == shared.rank();
  const std::size_t step = std::clamp(rounded_up(bytes / 2, kLine), kSmallestChunk, Segment::kSlot) / size;
  const std::uint64_t chunks = rounds_for(count, step), first = shared.take(chunks);
  for (std::uint64_t turn = 0; turn <= chunks; ++turn) {
    if (turn < chunks) {
      const Span part(turn, step, count);
      const std::uint64_t round = first + turn;
      co_await shared.writable(round);
      const bool gives = root != shared.rank();  // No rank reads the root's contribution.
      const void* const from = at(data, part.offset * size);
      if (gives && small) copy_bytes(segment.line(shared.rank(), round).data, from, part.length * size);
      if (gives && !small) segment.copy_in(round, 0, from, part.length * size);
      shared.publish(round);
    }
    if (turn > 0) {
      const Span part(turn - 1, step, count);
      const std::uint64_t round = first + turn - 1;
      co_await shared.all(round);
      for (int rank = 0; takes && rank < shared.ranks(); ++rank) {
        shared.inputs[rank] = small ? segment.line(rank, round).data : segment.slot(rank, round);
      }
      shared.inputs[shared.rank()] = at(data, part.offset * size);
      const int next = (shared.rank() + 1) % shared.ranks();
      const Timing timing = segment.timing(next, round, takes && !small ? part.length * size : 0);
      if (takes) reduce(reduction, at(out, part.offset * size), shared.inputs.data(), shared.ranks(), part.length);
      shared.finish(round);
    }
    if (chunks > 1) co_await shared.turn();
  }
}

// The three phases of one chunk in shared memory. The chunk is cut into one share per rank.
class Chunk {
 public:
  Chunk(Shared& shared, const Reduction& reduction, std::uint64_t round, Span elements)
      : shared_(shared), reduction_(reduction), round_(round), elements_(elements), size_(size_of(reduction.dtype)) {
    const std::size_t per_line = std::max<std::size_t>(1, kLine / size_);
    const std::size_t ranks = static_cast<std::size_t>(shared.ranks());
    share_ = rounded_up(divided_up(elements.length, ranks), per_line);
  }

  // Gives the other ranks their shares.
  void contribute(const void* data) const {
    shared_.segment.own_slot(round_);  // The rank also takes a slot that will only hold its reduced share.
    for (int rank = 0; rank < shared_.ranks(); ++rank) {
      const Span share = share_of(rank);
      if (rank == shared_.rank()) continue;
      shared_.segment.copy_in(round_, share.offset * size_, at(data, (elements_.offset + share.offset) * size_),
                              share.length * size_);
    }
  }

  // Reduces this rank's share of all contributions, for the other ranks, and into `out` if that is not null.
  void reduce_share(const void* data, void* out) const {
    const Span share = share_of(shared_.rank());
    std::byte* result = shared_.segment.slot(shared_.rank(), round_);
    const std::size_t base = elements_.offset * size_, per_tile = kTile / size_;
    for (std::size_t tile = 0; tile * per_tile < share.length; ++tile) {
      const Span part(tile, per_tile, share.length);
      const std::size_t offset = (share.offset + part.offset) * size_;
      for (int rank = 0; rank < shared_.ranks(); ++rank) {
        shared_.inputs[rank] =
            rank == shared_.rank() ? at(data, base + offset) : shared_.segment.slot(rank, round_) + offset;
      }
      std::byte* first = out ? at(out, base + offset) : result + offset;
      reduce(reduction_, first, shared_.inputs.data(), shared_.ranks(), part.length);
      if (out) shared_.segment.copy_in(round_, offset, first, part.length * size_);
    }
  }

  // Takes the share that `rank` has reduced.
  void collect(int rank, void* out) const {
    const Span share = share_of(rank);
    shared_.segment.copy_out(rank, round_, share.offset * size_, at(out, (elements_.offset + share.offset) * size_),
                             share.length * size_);
  }

 private:
  Span share_of(int rank) const { return Span(static_cast<std::size_t>(rank), share_, elements_.length); }

  Shared& shared_;
  const Reduction& reduction_;
  std::uint64_t round_;
  Span elements_;
  std::size_t size_, share_;
};

// Pipelined reduce-scatter and all-gather through shared memory. While the shares of one chunk are collected, those of
// the next are reduced and those after that are contributed.
Task reduce_in_shares(Shared& shared, Reduction reduction, int root, void* data, void* out, std::size_t count) {
  const std::size_t size = size_of(reduction.dtype);
  const std::size_t step = chunk_for(count * size, 3) / size;
  const std::uint64_t chunks = rounds_for(count, step);
  const std::uint64_t first = shared.take(chunks);
  const bool takes = root < 0 || root == shared.rank();
  for (std::uint64_t turn = 0; turn < chunks + 2; ++turn) {
    if (turn < chunks) {
      co_await shared.writable(first + turn);
      Chunk(shared, reduction, first + turn, Span(turn, step, count)).contribute(data);
      shared.publish(first + turn);
    }
    if (turn >= 1 && turn <= chunks) {
      const std::uint64_t round = first + turn - 1;
      co_await shared.all(round);
      Chunk(shared, reduction, round, Span(turn - 1, step, count)).reduce_share(data, takes ? out : nullptr);
      shared.publish_second(round);
    }
    if (turn >= 2) {
      const std::uint64_t round = first + turn - 2;
      for (int rank = 0; takes && rank < shared.ranks(); ++rank) {
        if (rank == shared.rank()) continue;
        co_await shared.second(rank, round);
        Chunk(shared, reduction, round, Span(turn - 2, step, count)).collect(rank, out);
      }
      shared.finish(round);
    }
    co_await shared.turn();
  }
}

}  // namespace

Task shared_reduce(Shared& shared, Reduction reduction, int root, void* data, void* out, std::size_t count) {
  const bool directly = shared.ranks() == 2 || count * size_of(reduction.dtype) <= kDirect;
  return directly ? reduce_directly(shared, reduction, root, data, out, count)
                  : reduce_in_shares(shared, reduction, root, data, out, count);
}

namespace {

// From this size on, ranks read a part from each other's tensors. This takes one copy in place of two, and one more
// round.
constexpr std::size_t kReadInPlace = 128 * 1024;

bool in_place(const Shared& shared, std::size_t largest) { return !shared.pids.empty() && largest >= kReadInPlace; }

// The copy of a rank's own part, which ends while the other ranks arrive. to: null if the rank takes nothing.
Copy own_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  return {to, from, to == nullptr || to == from ? 0 : bytes};
}

// The address of this rank's part, from another rank's slot.
const std::byte* address_in(const std::byte* slot, int rank) {
  const std::byte* address;
  std::memcpy(&address, slot + static_cast<std::size_t>(rank) * sizeof address, sizeof address);
  return address;
}

// Each rank reads the others' parts in place, and leaves after every rank has read. from[r]: this rank's part for rank
// r. to[r], bytes[r]: the part that it takes from rank r. (Chakraborty, Subramoni, Panda: "Contention-Aware
// Kernel-Assisted MPI Collectives for Multi-/Many-Core Systems", CLUSTER 2017: every rank begins with a different one.)
Task read_in_place(Shared& shared, std::vector<const void*> from, std::vector<void*> to, Bytes bytes) {
  Segment& segment = shared.segment;
  const int me = shared.rank(), ranks = shared.ranks();
  const std::uint64_t round = shared.take(2);
  co_await shared.writable(round);
  std::memcpy(segment.own_slot(round), from.data(), from.size() * sizeof(void*));
  shared.publish(round);
  for (std::size_t done = 0; done < bytes[me]; done += kCopyAtOnce) {
    copy_bytes(at(to[me], done), at(from[me], done), std::min(kCopyAtOnce, bytes[me] - done));
    co_await shared.turn();
  }
  co_await shared.all(round);
  for (int step = 1; step < ranks; ++step) {
    const int rank = (me + step) % ranks;
    const std::byte* there = address_in(segment.slot(rank, round), me);
    for (std::size_t done = 0; done < bytes[rank]; done += kCopyAtOnce) {
      const std::size_t piece = std::min(kCopyAtOnce, bytes[rank] - done);
      if (!copy_from(shared.pids[rank], static_cast<std::byte*>(to[rank]) + done, there + done, piece)) {
        co_await shared.never();
      }
      co_await shared.turn();
    }
    if (bytes[rank] && segment.has_let_go(rank)) co_await shared.never();
  }
  shared.finish(round);
  co_await shared.writable(round + 1);
  shared.publish(round + 1);
  co_await shared.all(round + 1);
  shared.finish(round + 1);
}

}  // namespace

namespace {

Task spread_by_slots(Shared& shared, const void* in, std::vector<void*> outs, Bytes bytes) {
  Segment& segment = shared.segment;
  const int me = shared.rank(), ranks = shared.ranks();
  const std::size_t most = *std::max_element(bytes.begin(), bytes.end());
  const bool small = most <= Segment::kInline;
  const std::size_t step = small ? Segment::kInline : chunk_for(most, 2);
  const std::uint64_t rounds = rounds_for(most, step);
  const std::uint64_t first = shared.take(rounds);
  const bool takes = !outs.empty();
  // All ranks meet in the first round. A rank that takes nothing fills its slots before it checks that all have come.
  // Until then it does not finish rounds, so the other ranks' lines stay valid.
  const bool gives = !takes || (bytes[me] && std::count(bytes.begin(), bytes.end(), std::size_t{0}) + 1 == ranks);
  const std::uint64_t meeting = gives ? std::min(rounds, Segment::kDepth - 1) : 1;
  for (std::uint64_t turn = 0; turn <= rounds; ++turn) {
    const Span mine(turn, step, bytes[me]);
    if (turn < rounds && (turn == 0 || mine.length)) {
      co_await shared.writable(first + turn);
      if (mine.length && small) copy_bytes(segment.line(me, first + turn).data, at(in, mine.offset), mine.length);
      Copy own = own_copy(takes ? at(outs[me], mine.offset) : nullptr, at(in, mine.offset), mine.length);
      if (mine.length && !small) segment.copy_in(first + turn, 0, at(in, mine.offset), mine.length, &own);
      shared.publish(first + turn);
      own.advance(own.bytes);
    }
    if (turn == meeting) co_await shared.all(first);
    for (int rank = 0; turn >= 1 && takes && rank < ranks; ++rank) {
      const Span theirs(turn - 1, step, bytes[rank]);
      if (rank == me || theirs.length == 0) continue;
      const std::uint64_t round = first + turn - 1;
      co_await shared.one(rank, round);
      if (small) {
        copy_bytes(at(outs[rank], theirs.offset), segment.line(rank, round).data, theirs.length);
      } else {
        segment.copy_out(rank, round, 0, at(outs[rank], theirs.offset), theirs.length);
      }
    }
    if (turn >= meeting) shared.finish(first + turn - 1);
    co_await shared.turn();
  }
}

}  // namespace

Task shared_spread(Shared& shared, const void* in, std::vector<void*> outs, Bytes bytes) {
  const std::size_t most = *std::max_element(bytes.begin(), bytes.end());
  const bool several = std::count(bytes.begin(), bytes.end(), std::size_t{0}) + 1 < shared.ranks();
  // A single part is faster through the slots, because its owner and its readers copy at the same time.
  if (!several || !in_place(shared, most)) return spread_by_slots(shared, in, std::move(outs), std::move(bytes));
  if (outs.empty()) std::fill(bytes.begin(), bytes.end(), 0);  // This rank takes nothing.
  std::vector<const void*> from(static_cast<std::size_t>(shared.ranks()), in);
  return read_in_place(shared, std::move(from), std::move(outs), std::move(bytes));
}

namespace {

// The bytes of a slot for each rank that reads it.
std::size_t piece_of(const Shared& shared) {
  return Segment::kSlot / static_cast<std::size_t>(std::max(1, shared.ranks() - 1)) / kLine * kLine;
}
// The offset of the piece for another rank in a slot of `owner`. The owner has no piece.
std::size_t offset_of(int owner, int reader, std::size_t piece) {
  return static_cast<std::size_t>(reader - (reader > owner)) * piece;
}

}  // namespace

namespace {

Task exchange_by_slots(Shared& shared, std::vector<const void*> ins, Bytes in_bytes, std::vector<void*> outs,
                       Bytes out_bytes, std::size_t largest) {
  Segment& segment = shared.segment;
  const int me = shared.rank();
  const std::size_t piece = piece_of(shared);
  const std::size_t step = std::min(chunk_for(largest, 2), piece);
  const std::uint64_t rounds = rounds_for(largest, step);
  const std::uint64_t first = shared.take(rounds);
  for (std::uint64_t turn = 0; turn <= rounds; ++turn) {
    if (turn < rounds) {
      co_await shared.writable(first + turn);
      const Span mine(turn, step, in_bytes[me]);
      Copy own = own_copy(at(outs[me], mine.offset), at(ins[me], mine.offset), mine.length);
      for (int rank = 0; rank < shared.ranks(); ++rank) {
        const Span part(turn, step, in_bytes[rank]);
        if (rank != me && part.length) {
          segment.copy_in(first + turn, offset_of(me, rank, piece), at(ins[rank], part.offset), part.length, &own);
        }
      }
      shared.publish(first + turn);
      own.advance(own.bytes);
    }
    if (turn == 1) co_await shared.all(first);
    for (int rank = 0; turn >= 1 && rank < shared.ranks(); ++rank) {
      const Span part(turn - 1, step, out_bytes[rank]);
      if (rank == me || part.length == 0) continue;
      co_await shared.one(rank, first + turn - 1);
      segment.copy_out(rank, first + turn - 1, offset_of(rank, me, piece), at(outs[rank], part.offset), part.length);
    }
    if (turn >= 1) shared.finish(first + turn - 1);
    co_await shared.turn();
  }
}

}  // namespace

Task shared_exchange(Shared& shared, std::vector<const void*> ins, Bytes in_bytes, std::vector<void*> outs,
                     Bytes out_bytes, std::size_t largest) {
  if (!in_place(shared, largest)) {
    return exchange_by_slots(shared, std::move(ins), std::move(in_bytes), std::move(outs), std::move(out_bytes),
                             largest);
  }
  return read_in_place(shared, std::move(ins), std::move(outs), std::move(out_bytes));
}

Task shared_exchange_v(Shared& shared, std::vector<const void*> ins, Bytes in_bytes, std::vector<void*> outs,
                       Bytes out_bytes, Unequal* wrong) {
  Segment& segment = shared.segment;
  const int me = shared.rank(), ranks = shared.ranks();
  const std::uint64_t round = shared.take(1);
  co_await shared.writable(round);
  std::memcpy(segment.own_slot(round), in_bytes.data(), in_bytes.size() * sizeof(std::size_t));
  shared.publish(round);
  co_await shared.all(round);
  std::size_t largest = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    Bytes theirs(static_cast<std::size_t>(ranks));
    std::memcpy(theirs.data(), segment.slot(rank, round), theirs.size() * sizeof(std::size_t));
    largest = std::max(largest, *std::max_element(theirs.begin(), theirs.end()));
    if (theirs[me] != out_bytes[rank] && wrong->rank < 0) *wrong = Unequal{rank, theirs[me]};
  }
  shared.finish(round);
  if (wrong->rank >= 0) co_return;
  Task exchange =
      shared_exchange(shared, std::move(ins), std::move(in_bytes), std::move(outs), std::move(out_bytes), largest);
  co_await exchange;
}

Task shared_reduce_scatter(Shared& shared, Reduction reduction, std::vector<const void*> ins, Bytes counts, void* out) {
  Segment& segment = shared.segment;
  const int me = shared.rank(), ranks = shared.ranks();
  const std::size_t size = size_of(reduction.dtype);
  const std::size_t piece = piece_of(shared);
  const std::size_t most = *std::max_element(counts.begin(), counts.end());
  const std::size_t wanted = std::min(chunk_for(most * size, 2), piece);
  const std::size_t step = std::max<std::size_t>(1, wanted / size);
  const std::uint64_t rounds = rounds_for(most, step);
  const std::uint64_t first = shared.take(rounds);
  for (std::uint64_t turn = 0; turn <= rounds; ++turn) {
    if (turn < rounds) {
      co_await shared.writable(first + turn);
      for (int rank = 0; rank < ranks; ++rank) {
        const Span part(turn, step, counts[rank]);
        if (rank != me && part.length) {
          const void* const from = at(ins[rank], part.offset * size);
          segment.copy_in(first + turn, offset_of(me, rank, piece), from, part.length * size);
        }
      }
      shared.publish(first + turn);
    }
    if (turn >= 1) {
      const std::uint64_t round = first + turn - 1;
      const Span part(turn - 1, step, counts[me]);
      co_await shared.all(round);
      for (int rank = 0; rank < ranks; ++rank) {
        const std::byte* const own = at(ins[me], part.offset * size);
        shared.inputs[rank] = rank == me ? own : segment.slot(rank, round) + offset_of(rank, me, piece);
      }
      const Timing timing = segment.timing((me + 1) % ranks, round, part.length * size);
      reduce(reduction, at(out, part.offset * size), shared.inputs.data(), ranks, part.length);
      shared.finish(round);
    }
    co_await shared.turn();
  }
}

}  // namespace aiocomms
