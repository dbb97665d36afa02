// The schedules that move data without a reduction.
#include <vector>

#include "collectives/message_collectives.hpp"
#include "collectives/schedule_parts.hpp"

namespace aiocomms {

using std::size_t;

namespace {

// A binomial tree downwards. It takes ceil(log2 size) steps, and each doubles the number of ranks that have the data.
Task tree_broadcast(Messages& messages, int root, void* data, size_t bytes) {
  const TreePlace place(messages.rank(), root, messages.size());
  Burst sent(place.most_children());
  if (!place.is_root()) {
    Event received;
    messages.recv(place.parent(), data, bytes, received);
    co_await received;
  }
  for (int mask = place.span() / 2; mask > 0; mask /= 2)  // The child with most ranks below it comes first.
    if (place.has_child(mask)) messages.send(place.rank_at(mask), data, bytes, sent.next());
  for (Event& event : sent) co_await event;
}

// A chain with segments. Each rank sends one segment on while it receives the next (Pjesivac-Grbovic et al.,
// "Performance analysis of MPI collective operations", 2007). Each rank receives and sends every byte once. Van de
// Geijn's scatter and all-gather send almost twice the bytes, and copy no less.
Task chain_broadcast(Messages& messages, int root, void* data, size_t bytes) {
  const int rank = messages.rank(), size = messages.size();
  const int before = around(rank, -1, size), after = around(rank, 1, size);
  const bool receives = rank != root, sends = after != root;
  const size_t segments = (bytes + kSegment - 1) / kSegment;
  const auto length = [=](size_t segment) { return std::min(kSegment, bytes - segment * kSegment); };
  Slots received, sent;
  for (size_t t = 0; receives && t < std::min(kWindow, segments); ++t)
    messages.recv(before, at(data, t * kSegment), length(t), received[t].renew());
  for (size_t t = 0; t < segments; ++t) {
    Slot& arrival = received[t % kWindow];
    co_await arrival;
    if (receives && t + kWindow < segments)
      messages.recv(before, at(data, (t + kWindow) * kSegment), length(t + kWindow), arrival.renew());
    Slot& departure = sent[t % kWindow];
    co_await departure;
    if (sends) messages.send(after, at(data, t * kSegment), length(t), departure.renew());
  }
  for (Slot& departure : sent) co_await departure;
}

// Bruck, Ho, Kipnis, Upfal, Weathersby: "Efficient algorithms for all-to-all communications in multiport
// message-passing systems", 1997. Each step doubles a rank's blocks: its own, and those of the ranks after it.
Task bruck_all_gather(Messages& messages, const void* in, void* const* outs, const size_t* bytes) {
  const int rank = messages.rank(), size = messages.size();
  // offsets in the scratch of the blocks of rank, rank + 1, ...
  std::vector<size_t> offset(static_cast<size_t>(size) + 1);
  for (int i = 0; i < size; ++i) offset[i + 1] = offset[i] + bytes[around(rank, i, size)];
  const Scratch blocks = make_scratch(offset[size]);
  copy_bytes(blocks.get(), in, bytes[rank]);
  for (int distance = 1; distance < size; distance *= 2) {
    const int count = std::min(distance, size - distance);
    const size_t outgoing = offset[count], incoming = offset[distance + count] - offset[distance];
    Event received, sent;
    const int from = around(rank, distance, size), to = around(rank, -distance, size);
    if (incoming != 0) messages.recv(from, at(blocks.get(), offset[distance]), incoming, received);
    if (outgoing != 0) messages.send(to, blocks.get(), outgoing, sent);
    if (incoming != 0) co_await received;
    if (outgoing != 0) co_await sent;
  }
  copy_bytes(outs[rank], in, bytes[rank]);
  for (int i = 1; i < size; ++i) {
    const int from = around(rank, i, size);
    copy_bytes(outs[from], at(blocks.get(), offset[i]), bytes[from]);
  }
}

// A ring with segments, so that a very long block uses all links at once (Traff, Ripke, Siebert, Balaji, Thakur, Gropp:
// "A simple, pipelined algorithm for large, irregular all-gather problems", 2008).
Task ring_all_gather(Messages& messages, const void* in, void* const* outs, const size_t* bytes) {
  const int rank = messages.rank(), size = messages.size();
  const int before = around(rank, -1, size), after = around(rank, 1, size);
  const RingTurns turns(rank, size, bytes, kSegment);
  Slots received, sent;
  const auto receive = [&](size_t turn) {
    const RingTurns::Piece piece = turns.incoming(turn);
    if (piece.count == 0) return;
    messages.recv(before, at(outs[piece.chunk], piece.first), piece.count, received[turn % kWindow].renew());
  };
  const auto send = [&](size_t turn) {
    const RingTurns::Piece piece = turns.outgoing(turn);
    if (piece.count == 0) return;
    messages.send(after, at(outs[piece.chunk], piece.first), piece.count, sent[turn % kWindow].renew());
  };
  copy_bytes(outs[rank], in, bytes[rank]);
  for (size_t turn = 0; turn < std::min(kWindow, turns.count()); ++turn) {
    receive(turn);
    send(turn);
  }
  for (size_t turn = 0; turn < turns.count(); ++turn) {
    Slot& arrival = received[turn % kWindow];
    Slot& departure = sent[turn % kWindow];
    co_await arrival;
    co_await departure;
    if (turn + kWindow >= turns.count()) continue;
    receive(turn + kWindow);
    send(turn + kWindow);
  }
}

// A binomial tree upwards. A rank collects the blocks of all positions below it, and sends them as one message.
Task tree_gather(Messages& messages, int root, const void* in, void* const* outs, size_t bytes) {
  const TreePlace place(messages.rank(), root, messages.size());
  const size_t count = place.existing(0, place.span());
  const Scratch blocks = make_scratch(count * bytes);
  Burst received(place.most_children());
  for (int mask = 1; mask < place.span() && place.has_child(mask); mask *= 2)
    messages.recv(place.rank_at(mask), at(blocks.get(), mask * bytes), place.existing(mask, mask) * bytes,
                  received.next());
  copy_bytes(blocks.get(), in, bytes);
  for (Event& event : received) co_await event;
  if (place.is_root()) {
    copy_bytes(outs[root], in, bytes);
    for (int i = 1; i < messages.size(); ++i) copy_bytes(outs[place.rank_at(i)], at(blocks.get(), i * bytes), bytes);
    co_return;
  }
  Event sent;
  messages.send(place.parent(), blocks.get(), count * bytes, sent);
  co_await sent;
}

// The same tree downwards.
Task tree_scatter(Messages& messages, int root, const void* const* ins, void* out, size_t bytes) {
  const TreePlace place(messages.rank(), root, messages.size());
  const size_t count = place.existing(0, place.span());
  const Scratch blocks = make_scratch(count * bytes);
  Burst sent(place.most_children());
  if (place.is_root()) {
    for (int i = 0; i < messages.size(); ++i) copy_bytes(at(blocks.get(), i * bytes), ins[place.rank_at(i)], bytes);
  } else {
    Event received;
    messages.recv(place.parent(), blocks.get(), count * bytes, received);
    co_await received;
  }
  for (int mask = place.span() / 2; mask > 0; mask /= 2)
    if (place.has_child(mask))
      messages.send(place.rank_at(mask), at(blocks.get(), mask * bytes), place.existing(mask, mask) * bytes,
                    sent.next());
  if (!place.is_root() || out != ins[root]) copy_bytes(out, blocks.get(), bytes);
  for (Event& event : sent) co_await event;
}

// Every rank sends directly into the root's memory.
Task flat_gather(Messages& messages, int root, const void* in, void* const* outs, size_t bytes) {
  Burst events(messages.size());
  if (messages.rank() != root) {
    messages.send(root, in, bytes, events.next());
  } else {
    for (int rank = 0; rank < messages.size(); ++rank)
      if (rank != root) messages.recv(rank, outs[rank], bytes, events.next());
    copy_bytes(outs[root], in, bytes);
  }
  for (Event& event : events) co_await event;
}

Task flat_scatter(Messages& messages, int root, const void* const* ins, void* out, size_t bytes) {
  Burst events(messages.size());
  if (messages.rank() != root) {
    messages.recv(root, out, bytes, events.next());
  } else {
    for (int rank = 0; rank < messages.size(); ++rank)
      if (rank != root) messages.send(rank, ins[rank], bytes, events.next());
    copy_bytes(out, ins[root], bytes);
  }
  for (Event& event : events) co_await event;
}

// In step i each rank sends to the i-th rank after it and receives from the i-th before it. Up to kExchanges steps run
// at once.
Task pairwise_all_to_all(Messages& messages, const void* const* ins, const size_t* in_bytes, void* const* outs,
                         const size_t* out_bytes) {
  const int rank = messages.rank(), size = messages.size();
  std::array<Slot, kExchanges> received, sent;
  for (int i = 1; i < size; ++i) {
    const int from = around(rank, -i, size), to = around(rank, i, size);
    Slot& arrival = received[i % kExchanges];
    Slot& departure = sent[i % kExchanges];
    co_await arrival;
    co_await departure;
    if (out_bytes[from] != 0) messages.recv(from, outs[from], out_bytes[from], arrival.renew());
    if (in_bytes[to] != 0) messages.send(to, ins[to], in_bytes[to], departure.renew());
  }
  copy_bytes(outs[rank], ins[rank], in_bytes[rank]);
  for (Slot& arrival : received) co_await arrival;
  for (Slot& departure : sent) co_await departure;
}

// Bruck et al. 1997. A block that travels d ranks takes one step for each power of two in d. All blocks with the same
// step travel together.
Task bruck_all_to_all(Messages& messages, const void* const* ins, void* const* outs, size_t bytes) {
  const int rank = messages.rank(), size = messages.size();
  const Scratch blocks = make_scratch(size * bytes);  // The d-th block must travel d ranks.
  const Scratch leaving = make_scratch(size * bytes), arriving = make_scratch(size * bytes);
  for (int d = 0; d < size; ++d) copy_bytes(at(blocks.get(), d * bytes), ins[around(rank, d, size)], bytes);
  for (int distance = 1; distance < size; distance *= 2) {
    size_t packed = 0;
    for (int d = distance; d < size; ++d)
      if ((d & distance) != 0) copy_bytes(at(leaving.get(), packed++ * bytes), at(blocks.get(), d * bytes), bytes);
    Event received, sent;
    messages.recv(around(rank, -distance, size), arriving.get(), packed * bytes, received);
    messages.send(around(rank, distance, size), leaving.get(), packed * bytes, sent);
    co_await received;
    co_await sent;
    packed = 0;
    for (int d = distance; d < size; ++d)
      if ((d & distance) != 0) copy_bytes(at(blocks.get(), d * bytes), at(arriving.get(), packed++ * bytes), bytes);
  }
  for (int d = 0; d < size; ++d) copy_bytes(outs[around(rank, -d, size)], at(blocks.get(), d * bytes), bytes);
}

Task nothing() { co_return; }

}  // namespace

// Dissemination barrier: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
Task barrier(Messages& messages) {
  const int rank = messages.rank(), size = messages.size();
  char no_data = 0;
  for (int distance = 1; distance < size; distance *= 2) {
    Event received, sent;
    messages.recv(around(rank, -distance, size), &no_data, 0, received);
    messages.send(around(rank, distance, size), &no_data, 0, sent);
    co_await received;
    co_await sent;
  }
}

Task broadcast(Messages& messages, int root, void* data, size_t bytes) {
  const size_t size = static_cast<size_t>(messages.size());
  if (size == 1 || bytes == 0) return nothing();
  // With two ranks both are one message, which the transport splits itself. With more ranks, a chain pays if it has
  // more segments than ranks. It is then full for longer than it takes to fill.
  if (size == 2 || bytes <= size * kSegment) return tree_broadcast(messages, root, data, bytes);
  return chain_broadcast(messages, root, data, bytes);
}

Task all_gather(Messages& messages, const void* in, void* const* outs, const size_t* bytes) {
  size_t total = 0;
  for (int rank = 0; rank < messages.size(); ++rank) total += bytes[rank];
  if (messages.size() == 1) copy_bytes(outs[0], in, bytes[0]);
  if (messages.size() == 1 || total == 0) return nothing();
  if (total <= kSmallGathered) return bruck_all_gather(messages, in, outs, bytes);
  return ring_all_gather(messages, in, outs, bytes);
}

Task gather(Messages& messages, int root, const void* in, void* const* outs, size_t bytes) {
  if (bytes == 0) return nothing();
  if (bytes <= kTreeBlock && messages.size() > kFlatRanks) return tree_gather(messages, root, in, outs, bytes);
  return flat_gather(messages, root, in, outs, bytes);
}

Task scatter(Messages& messages, int root, const void* const* ins, void* out, size_t bytes) {
  if (bytes == 0) return nothing();
  if (bytes <= kTreeBlock && messages.size() > kFlatRanks) return tree_scatter(messages, root, ins, out, bytes);
  return flat_scatter(messages, root, ins, out, bytes);
}

Task all_to_all(Messages& messages, const void* const* ins, const size_t* in_bytes, void* const* outs,
                const size_t* out_bytes, bool equal) {
  if (equal && in_bytes[0] == 0) return nothing();
  if (equal && in_bytes[0] <= kBruckBlock && messages.size() >= kBruckRanks)
    return bruck_all_to_all(messages, ins, outs, in_bytes[0]);
  return pairwise_all_to_all(messages, ins, in_bytes, outs, out_bytes);
}

}  // namespace aiocomms
