// Every collective over messages, on a simulated network, against simple references.
#include "collectives/message_collectives.hpp"
#include "collectives/schedule_parts.hpp"
#include "schedule_cases.hpp"

namespace aiocomms {
namespace {

using Make = std::function<Task(Messages&, int)>;

const std::vector<int> kSizes = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17};
Report report;
unsigned runs = 0;

// Each run has a different seed, and a mode that does not follow the loops below.
Mode next_mode() { return static_cast<Mode>(runs * 2654435761U >> 30); }

FakeNetwork simulate(int size, const std::string& what, const Make& make) {
  const Mode mode = next_mode();
  FakeNetwork network(size, mode, ++runs, report);
  run(network, size, make, what, report);
  return network;
}

std::vector<int> roots_of(int size) {
  std::vector<int> roots = {0, size / 2, size - 1};
  roots.erase(std::unique(roots.begin(), roots.end()), roots.end());
  return roots;
}

void test_all_reduce(const Case& c) {
  std::vector<Buffer> data = c.inputs;
  const std::string what = "all_reduce " + c.name;
  simulate(c.size, what,
           [&](Messages& messages, int rank) { return all_reduce(messages, c.reduction, data[rank].data(), c.count); });
  report.check(c.matches(data[0].data(), 0, c.count), "wrong result", what);
  for (const Buffer& result : data) report.check(result == data[0], "ranks differ", what);
}

void test_reduce(const Case& c, int root, bool in_place) {
  const std::string what = text("reduce %s root %d in place %d", c.name.c_str(), root, in_place);
  std::vector<Buffer> data = c.inputs;
  Buffer separate(c.count * c.element);
  Buffer& out = in_place ? data[root] : separate;
  simulate(c.size, what, [&](Messages& messages, int rank) {
    return reduce(messages, c.reduction, root, data[rank].data(), rank == root ? out.data() : nullptr, c.count);
  });
  report.check(c.matches(out.data(), 0, c.count), "wrong result", what);
  for (int rank = 0; rank < c.size; ++rank)
    report.check((in_place && rank == root) || data[rank] == c.inputs[rank], "an input was changed", what);
}

void test_reduce_scatter(const Case& c, const std::vector<size_t>& counts, bool in_place) {
  const std::string what = text("reduce_scatter %s in place %d", c.name.c_str(), in_place);
  check_reduce_scatter(c, counts, in_place, what, report, [&](const auto& inputs, const auto& output) {
    simulate(c.size, what, [&](Messages& messages, int rank) {
      return reduce_scatter(messages, c.reduction, inputs[rank].data(), counts.data(), output(rank));
    });
  });
}

// The divisions of `count` elements among the ranks: equal parts, all for one rank, and uneven parts with some empty
// ones.
std::vector<std::vector<size_t>> divisions(size_t count, int size) {
  const size_t ranks = static_cast<size_t>(size);
  std::vector<size_t> even(ranks, count / ranks), one(ranks), uneven(ranks);
  even.back() += count % ranks;
  one[ranks / 2] = count;
  size_t rest = count;
  for (size_t i = 0; i + 1 < ranks; ++i) rest -= uneven[i] = i % 3 == 1 ? 0 : rest * (i % 5 + 1) / 7;
  uneven.back() = rest;
  return {even, one, uneven};
}

void test_reductions(const Reduction& reduction, int size, size_t count) {
  const Case c(reduction, size, count);
  test_all_reduce(c);
  for (int root : roots_of(size)) test_reduce(c, root, root % 2 == 1);
  test_reduce(c, 0, true);
  bool in_place = false;
  for (const std::vector<size_t>& counts : divisions(count, size)) test_reduce_scatter(c, counts, in_place ^= true);
}

void test_all_reductions() {
  // The first four are also tried around the size at which the ring takes over. Some have several rounds of the ring.
  const std::vector<Reduction> reductions = {
      {Operator::Sum, DType::Float32},     {Operator::PremulSum, DType::Float16, 0.5},
      {Operator::Avg, DType::Float16},     {Operator::Avg, DType::Complex64},
      {Operator::Avg, DType::Float32},     {Operator::Avg, DType::BFloat16},
      {Operator::Sum, DType::Float64},     {Operator::PremulSum, DType::Float32, 1.5},
      {Operator::Max, DType::Float64},     {Operator::PremulSum, DType::Complex64, -2},
      {Operator::Sum, DType::Int32},       {Operator::Bxor, DType::Int32},
      {Operator::Band, DType::Int8},       {Operator::Sum, DType::Int8},
      {Operator::Min, DType::Int8},        {Operator::Product, DType::Int8},
      {Operator::Sum, DType::Float16},     {Operator::Max, DType::Float16},
      {Operator::Sum, DType::BFloat16},    {Operator::Sum, DType::Complex64},
      {Operator::Product, DType::Float32}, {Operator::Product, DType::Complex64},
  };
  for (int size : kSizes) {
    const size_t ranks = static_cast<size_t>(size);
    for (size_t k = 0; k < reductions.size(); k += size <= 9 ? 1 : 3) {
      const size_t small = kSmallReduction / size_of(reductions[k].dtype);
      for (size_t count : {size_t{0}, size_t{1}, size_t{7}, ranks - 1, small + k % 2})
        test_reductions(reductions[k], size, count);
    }
    for (size_t k = 0; k < (size <= 5 ? 4 : 1); ++k) {
      // The longest chunk is just short enough for the direct algorithm, or just too long.
      const size_t segments = ranks * (kSegment / size_of(reductions[k].dtype));
      test_all_reduce(Case(reductions[k], size, segments));
      test_all_reduce(Case(reductions[k], size, segments + 1));
    }
  }
  for (int size : {2, 3, 5})  // These have several rounds of the ring.
    for (size_t k : {0, 1, 4, 5})
      test_reductions(reductions[k], size, static_cast<size_t>(size) * kWindow * kSegment / 4 + 4321);
}

// All ranks have the same bits in every mode of the network, even if the order of two operands matters.
void test_same_bits(const Reduction& reduction, int size, size_t count) {
  const std::string what =
      text("all_reduce of special values op %d ranks %d count %zu", static_cast<int>(reduction.op), size, count);
  std::mt19937 random(static_cast<unsigned>(size));
  std::vector<Buffer> inputs(static_cast<size_t>(size), Buffer(count * 4));
  static constexpr std::uint32_t specials[] = {0x7FC00001, 0xFFC00002, 0x7FC12345, 0,  // NaNs, zeros, infinities
                                               0x80000000, 0x7F800000, 0xFF800000};
  for (Buffer& input : inputs)
    for (size_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(std::normal_distribution<double>()(random));
      put(input.data() + i * 4, random() % 2 == 0 ? specials[random() % 7] : std::bit_cast<std::uint32_t>(value));
    }
  Buffer first;
  for (int mode = 0; mode < 4; ++mode) {
    std::vector<Buffer> data = inputs;
    simulate(size, what,
             [&](Messages& messages, int rank) { return all_reduce(messages, reduction, data[rank].data(), count); });
    if (mode == 0) first = data[0];
    for (const Buffer& result : data) report.check(result == first, "bits differ", what);
  }
}

// The block of rank `from` for rank `to`.

Buffer block(int from, int to, size_t bytes) {
  Buffer data(bytes);
  for (size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<Byte>(static_cast<size_t>(from) * 101 + static_cast<size_t>(to) * 37 + i + i / 251);
  return data;
}

template <class Pointer>
std::vector<Pointer> pointers(std::vector<Buffer>& buffers) {
  std::vector<Pointer> result;
  for (Buffer& buffer : buffers) result.push_back(buffer.data());
  return result;
}

void test_broadcast(int size, int root, size_t bytes) {
  const std::string what = text("broadcast of %zu from %d to %d", bytes, root, size);
  std::vector<Buffer> data(static_cast<size_t>(size), Buffer(bytes));
  data[root] = block(root, 0, bytes);
  simulate(size, what,
           [&](Messages& messages, int rank) { return broadcast(messages, root, data[rank].data(), bytes); });
  const Buffer wanted = block(root, 0, bytes);
  for (const Buffer& result : data) report.check(result == wanted, "wrong data", what);
}

void test_all_gather(int size, const std::vector<size_t>& bytes, bool in_place) {
  const std::string what = text("all_gather of %zu, ... on %d in place %d", bytes[0], size, in_place);
  std::vector<Buffer> inputs, blocks;
  std::vector<std::vector<Buffer>> outputs(static_cast<size_t>(size));
  std::vector<std::vector<void*>> outs;
  for (int rank = 0; rank < size; ++rank) blocks.push_back(block(rank, 0, bytes[rank]));
  inputs = blocks;
  for (int rank = 0; rank < size; ++rank) {
    for (size_t length : bytes) outputs[rank].emplace_back(length);
    if (in_place) outputs[rank][rank] = blocks[rank];
    outs.push_back(pointers<void*>(outputs[rank]));
  }
  simulate(size, what, [&](Messages& messages, int rank) {
    const void* in = in_place ? outs[rank][rank] : inputs[rank].data();
    return all_gather(messages, in, outs[rank].data(), bytes.data());
  });
  for (const std::vector<Buffer>& result : outputs) report.check(result == blocks, "wrong data", what);
  report.check(inputs == blocks, "an input was changed", what);
}

void test_gather_and_scatter(int size, int root, size_t bytes, bool in_place) {
  const std::string what = text(" of %zu root %d on %d in place %d", bytes, root, size, in_place);
  std::vector<Buffer> blocks;
  for (int rank = 0; rank < size; ++rank) blocks.push_back(block(rank, 1, bytes));
  std::vector<Buffer> many(static_cast<size_t>(size), Buffer(bytes)), ones = blocks;
  if (in_place) many[root] = blocks[root];
  const std::vector<void*> outs = pointers<void*>(many);
  simulate(size, "gather" + what, [&](Messages& messages, int rank) {
    const void* in = in_place && rank == root ? outs[root] : ones[rank].data();
    return gather(messages, root, in, rank == root ? outs.data() : nullptr, bytes);
  });
  report.check(many == blocks, "gather: wrong data", what);
  report.check(ones == blocks, "gather: an input was changed", what);
  ones.assign(static_cast<size_t>(size), Buffer(bytes));
  const std::vector<const void*> ins = pointers<const void*>(many);
  simulate(size, "scatter" + what, [&](Messages& messages, int rank) {
    void* out = in_place && rank == root ? many[root].data() : ones[rank].data();
    return scatter(messages, root, rank == root ? ins.data() : nullptr, out, bytes);
  });
  if (in_place) ones[root] = many[root];
  report.check(ones == blocks, "scatter: wrong data", what);
  report.check(many == blocks, "scatter: an input was changed", what);
}

void test_all_to_all(int size, const std::function<size_t(int, int)>& bytes, bool equal) {
  const std::string what = text("all_to_all of %zu, ... on %d equal %d", bytes(0, 0), size, equal);
  const size_t ranks = static_cast<size_t>(size);
  std::vector<std::vector<Buffer>> inputs(ranks), outputs(ranks), wanted(ranks);
  std::vector<std::vector<size_t>> in_bytes(ranks), out_bytes(ranks);
  std::vector<std::vector<const void*>> ins;
  std::vector<std::vector<void*>> outs;
  for (int rank = 0; rank < size; ++rank) {
    for (int other = 0; other < size; ++other) {
      in_bytes[rank].push_back(bytes(rank, other));
      out_bytes[rank].push_back(bytes(other, rank));
      inputs[rank].push_back(block(rank, other, bytes(rank, other)));
      wanted[rank].push_back(block(other, rank, bytes(other, rank)));
      outputs[rank].emplace_back(bytes(other, rank));
    }
    ins.push_back(pointers<const void*>(inputs[rank]));
    outs.push_back(pointers<void*>(outputs[rank]));
  }
  const std::vector<std::vector<Buffer>> originals = inputs;
  simulate(size, what, [&](Messages& messages, int rank) {
    return all_to_all(messages, ins[rank].data(), in_bytes[rank].data(), outs[rank].data(), out_bytes[rank].data(),
                      equal);
  });
  report.check(outputs == wanted, "wrong data", what);
  report.check(inputs == originals, "an input was changed", what);
}

void test_moving() {
  for (int size : kSizes) {
    const size_t ranks = static_cast<size_t>(size);
    for (int root : roots_of(size)) {
      for (size_t bytes : {size_t{0}, size_t{1}, size_t{7}, size_t{9001}}) test_broadcast(size, root, bytes);
      test_broadcast(size, root, ranks * kSegment + (root == 0 ? 0 : 1));
      for (size_t bytes : {size_t{0}, size_t{1}, size_t{7}, kTreeBlock, kTreeBlock + 1, size_t{30001}})
        for (bool in_place : {false, true}) test_gather_and_scatter(size, root, bytes, in_place);
    }
    test_broadcast(size, size / 2, (ranks + kWindow + 1) * kSegment + 12345);
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{7}, kSmallGathered / ranks, kSmallGathered / ranks + 1})
      for (bool in_place : {false, true}) test_all_gather(size, std::vector<size_t>(ranks, bytes), in_place);
    // There are up to three rounds of the ring, and one among many ranks.
    test_all_gather(size, std::vector<size_t>(ranks, size <= 5 ? 2 * kWindow * kSegment + 77 : kSegment + 1), false);
    for (size_t total : {size_t{1}, size_t{5}, kSmallGathered, kSmallGathered + 1, kWindow * kSegment + 5}) {
      bool in_place = size % 2 == 0;
      for (const std::vector<size_t>& bytes : divisions(total, size)) test_all_gather(size, bytes, in_place ^= true);
    }
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{7}, kBruckBlock, kBruckBlock + 1, size_t{9999}})
      for (bool equal : {false, true}) test_all_to_all(size, [=](int, int) { return bytes; }, equal);
    test_all_to_all(size, [](int a, int b) { return static_cast<size_t>((a * 5 + b * 3) % 4 * 1001); }, false);
    test_all_to_all(size, [](int a, int b) { return static_cast<size_t>(a == b + 1 ? 100001 : 0); }, false);
  }
}

// No rank leaves the barrier while one is missing, and each sends ceil(log2 size) messages.
void test_barrier(int size, int late) {
  const std::string what = text("barrier of %d without %d", size, late);
  const Mode mode = next_mode();
  FakeNetwork network(size, mode, ++runs, report);
  std::deque<Task> tasks;
  for (int rank = 0; rank < size; ++rank) {
    tasks.push_back(barrier(network.port(rank)));
    if (rank != late) tasks.back().start();
  }
  while (network.step()) continue;
  for (Task& task : tasks) report.check(!task.done(), "a rank has left", what);
  tasks[static_cast<size_t>(late)].start();
  while (network.step()) continue;
  for (Task& task : tasks) report.check(task.done(), "a rank still waits", what);
  report.check(network.empty(), "messages are left over", what);
  const size_t rounds = std::bit_width(static_cast<unsigned>(size - 1));
  for (int rank = 0; rank < size; ++rank)
    report.check(network.counters(rank).sends == rounds, "wrong number of messages", what);
}

// The intended algorithms run: few messages for small sizes, and few bytes in short messages for large ones.
void test_costs(int size) {
  const std::string what = text(" on %d", size);
  const size_t ranks = static_cast<size_t>(size), steps = std::bit_width(static_cast<unsigned>(size - 1));
  const auto longest = [&](const FakeNetwork& network, const auto& of) {
    size_t result = 0;
    for (int rank = 0; rank < size; ++rank) result = std::max(result, of(network.counters(rank)));
    return result;
  };
  const auto sends = [](const FakeNetwork::Counters& counters) { return counters.sends; };
  const auto bytes = [](const FakeNetwork::Counters& counters) { return counters.bytes; };
  const auto message = [](const FakeNetwork::Counters& counters) { return counters.longest; };
  const size_t large = ranks * kWindow * kSegment;
  std::vector<Buffer> data(ranks, Buffer(large));
  const Reduction sum{Operator::Sum, DType::Float32};
  const auto all_reduced = [&](size_t length) {
    return simulate(size, "all_reduce" + what, [&data, &sum, length](Messages& messages, int rank) {
      return all_reduce(messages, sum, data[rank].data(), length / 4);
    });
  };
  report.check(longest(all_reduced(8), sends) <= steps + 1, "a small all_reduce takes many messages", what);
  const FakeNetwork reduced = all_reduced(large);
  report.check(longest(reduced, bytes) <= 2 * large / ranks * (ranks - 1), "a large all_reduce sends much", what);
  report.check(longest(reduced, message) <= kSegment, "a large all_reduce is not cut up", what);
  const auto broadcasted = [&](size_t length) {
    return simulate(size, "broadcast" + what, [&data, length](Messages& messages, int rank) {
      return broadcast(messages, 0, data[rank].data(), length);
    });
  };
  report.check(longest(broadcasted(8), sends) <= steps, "a small broadcast takes many messages", what);
  report.check(longest(broadcasted(large), bytes) <= large, "a large broadcast sends much", what);
  std::vector<std::vector<void*>> outs(ranks);
  for (size_t rank = 0; rank < ranks; ++rank)
    for (size_t i = 0; i < ranks; ++i) outs[rank].push_back(data[rank].data() + i * 8);
  const std::vector<size_t> eights(ranks, 8);
  const FakeNetwork gathered = simulate(size, "all_gather" + what, [&](Messages& messages, int rank) {
    return all_gather(messages, outs[rank][rank], outs[rank].data(), eights.data());
  });
  report.check(longest(gathered, sends) == steps, "a small all_gather takes many messages", what);
  const FakeNetwork collected = simulate(size, "gather" + what, [&](Messages& messages, int rank) {
    return gather(messages, 0, outs[rank][rank], outs[rank].data(), 8);
  });
  size_t sent = 0, wanted = 0;  // In a tree a block is sent once for each bit that is set in its rank.
  for (int rank = 1; rank < size; ++rank) {
    sent += collected.counters(rank).bytes;
    wanted += 8 * static_cast<size_t>(size > kFlatRanks ? std::popcount(static_cast<unsigned>(rank)) : 1);
  }
  report.check(sent == wanted, "a small gather sends too much or too little", what);
}

int main() {
  test_all_reductions();
  for (int size : kSizes)
    for (Operator op : {Operator::Sum, Operator::Product, Operator::Min, Operator::Max})
      for (size_t count : {size_t{37}, kSmallReduction / 4, kSmallReduction / 4 + 333})
        test_same_bits({op, DType::Float32}, size, count);
  test_same_bits({Operator::Sum, DType::Float32}, 3, 3 * kSegment);
  test_moving();
  for (int size : kSizes)
    for (int late : roots_of(size)) test_barrier(size, late);
  for (int size : kSizes)
    if (size > 1) test_costs(size);
  std::printf("%u schedules, %ld checks, %ld failures\n", runs, report.checks, report.failures);
  return report.failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace aiocomms

int main() { return aiocomms::main(); }
