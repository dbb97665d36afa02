// Every collective of several hosts, on a simulated network and in real shared memory, against simple references. Hosts
// and ranks vary, and a seed draws the order of events.
#include "collectives/hierarchical.hpp"

#include <numeric>

#include "collectives/schedule_parts.hpp"
#include "fake_hosts.hpp"
#include "schedule_cases.hpp"

namespace aiocomms {
namespace {

using Layout = std::vector<int>;
using Make = std::function<Task(Reach, int)>;

// The number of ranks of each host.
const std::vector<Layout> kLayouts = {{1, 1}, {2, 1},    {1, 2},    {2, 2},       {3, 2},          {1, 4},
                                      {5, 3}, {1, 1, 1}, {2, 1, 3}, {2, 2, 2, 2}, {1, 1, 2, 1, 1}, {4, 4, 4}};
Report report;
unsigned runs = 0;

std::string name_of(const Layout& layout) {
  std::string name = " on";
  for (int size : layout) name += text(" %d", size);
  return name;
}

// Runs one schedule per rank to its end. A seed draws which rank polls its shared memory and which message moves. A
// poll may find nothing. It is a deadlock if all ranks find nothing and the network is idle.
void simulate(const Layout& layout, const std::string& what, const Make& make) {
  ++runs;
  FakeHosts hosts(layout, runs % 2 == 0);
  FakeNetwork network(hosts.size(), static_cast<Mode>(runs * 2654435761U >> 30), runs, report);
  hosts.slice_ends = runs % 3 == 0 ? ~std::uint64_t{0} : 0;
  const size_t size = static_cast<size_t>(hosts.size());
  std::vector<Task> tasks;
  std::vector<int> order;
  for (int rank = 0; rank < hosts.size(); ++rank) {
    tasks.push_back(make(hosts.reach(rank, network.port(rank)), rank));
    order.insert(order.begin() + static_cast<std::ptrdiff_t>(network.draw(order.size() + 1)), rank);
  }
  const auto poll = [&](size_t rank) {
    Shared* const shared = hosts.shared(static_cast<int>(rank));
    const bool moved = shared != nullptr && shared->poll();
    if (tasks[rank].done())
      Task(std::move(tasks[rank]));  // The destruction detects events that the task has not awaited.
    return moved;
  };
  for (int rank : order) {
    tasks[static_cast<size_t>(rank)].start();
    for (size_t steps = network.draw(8); steps > 0; --steps) poll(network.draw(size)), network.step();
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t tries = 0; tries < size; ++tries) moved |= poll(network.draw(size));
    if (network.draw(2) == 0 || !moved) moved |= network.step();
    for (size_t rank = 0; !moved && rank < size; ++rank) moved |= poll(rank);
  }
  std::string stuck;
  for (size_t rank = 0; rank < size; ++rank)
    if (!tasks[rank].done()) stuck += text(" %zu", rank);
  report.check(stuck.empty(), "deadlock", what + ", waiting:" + stuck);
  report.check(network.empty(), "messages are left over", what);
}

int ranks_of(const Layout& layout) {
  int ranks = 0;
  for (int size : layout) ranks += size;
  return ranks;
}

void test_reduce(const Layout& layout, const Case& c, int root) {
  const std::string what = text("reduce root %d %s", root, c.name.c_str()) + name_of(layout);
  std::vector<Buffer> data = c.inputs;
  simulate(layout, what, [&](Reach reach, int rank) {
    return hierarchical_reduce(reach, c.reduction, root, data[rank].data(), c.count);
  });
  const int first = std::max(root, 0);
  report.check(c.matches(data[first].data(), 0, c.count), "wrong result", what);
  for (int rank = 0; rank < c.size; ++rank)
    report.check(data[rank] == (root < 0 || rank == root ? data[first] : c.inputs[rank]), "a rank differs", what);
}

// Equal parts, all elements for one rank, and some ranks with nothing.
std::vector<std::vector<size_t>> divisions(size_t count, int size) {
  const size_t ranks = static_cast<size_t>(size);
  std::vector<size_t> even(ranks, count / ranks + 1), one(ranks), uneven(ranks);
  one[ranks / 2] = count;
  for (size_t rank = 0; rank < ranks; ++rank) uneven[rank] = rank % 3 == 1 ? 0 : count / (rank + 2);
  uneven.back() = count;
  return {even, one, uneven};
}

void test_reduce_scatter(const Layout& layout, const Reduction& reduction, const std::vector<size_t>& counts,
                         bool in_place) {
  const Case c(reduction, ranks_of(layout), std::accumulate(counts.begin(), counts.end(), size_t{0}));
  const std::string what = text("reduce_scatter %s in place %d", c.name.c_str(), in_place) + name_of(layout);
  check_reduce_scatter(c, counts, in_place, what, report, [&](const auto& inputs, const auto& output) {
    simulate(layout, what, [&](Reach reach, int rank) {
      return hierarchical_reduce_scatter(reach, reduction, inputs[rank], counts, output(rank));
    });
  });
}

Buffer block(int from, size_t bytes) {
  Buffer data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<Byte>(static_cast<size_t>(from) * 101 + i + i / 251);
  return data;
}

void test_all_gather(const Layout& layout, const std::vector<size_t>& bytes, bool in_place) {
  const std::string what = text("all_gather of %zu, ... in place %d", bytes[0], in_place) + name_of(layout);
  const int size = ranks_of(layout);
  std::vector<Buffer> blocks, inputs;
  std::vector<std::vector<Buffer>> outputs(static_cast<size_t>(size));
  std::vector<std::vector<void*>> outs(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) blocks.push_back(block(rank, bytes[rank]));
  inputs = blocks;
  for (int rank = 0; rank < size; ++rank) {
    for (size_t length : bytes) outputs[rank].emplace_back(length);
    if (in_place) outputs[rank][rank] = blocks[rank];
    for (Buffer& out : outputs[rank]) outs[rank].push_back(out.data());
  }
  simulate(layout, what, [&](Reach reach, int rank) {
    return hierarchical_all_gather(reach, in_place ? outs[rank][rank] : inputs[rank].data(), outs[rank], bytes);
  });
  for (const std::vector<Buffer>& result : outputs) report.check(result == blocks, "wrong data", what);
  report.check(inputs == blocks, "an input was changed", what);
}

void test_gather_and_scatter(const Layout& layout, int root, size_t bytes, bool in_place) {
  const std::string what = text(" of %zu root %d in place %d", bytes, root, in_place) + name_of(layout);
  const size_t size = static_cast<size_t>(ranks_of(layout));
  std::vector<Buffer> blocks, many(size, Buffer(bytes));
  for (size_t rank = 0; rank < size; ++rank) blocks.push_back(block(static_cast<int>(rank), bytes));
  std::vector<Buffer> ones = blocks;
  if (in_place) many[root] = blocks[root];
  std::vector<void*> outs;
  for (Buffer& out : many) outs.push_back(out.data());
  simulate(layout, "gather" + what, [&](Reach reach, int rank) {
    const void* in = in_place && rank == root ? outs[root] : ones[rank].data();
    return hierarchical_gather(reach, root, in, rank == root ? outs : std::vector<void*>(), bytes);
  });
  report.check(many == blocks, "gather: wrong data", what);
  report.check(ones == blocks, "gather: an input was changed", what);
  ones.assign(size, Buffer(bytes));
  const std::vector<const void*> ins(outs.begin(), outs.end());
  simulate(layout, "scatter" + what, [&](Reach reach, int rank) {
    void* out = in_place && rank == root ? many[root].data() : ones[rank].data();
    return hierarchical_scatter(reach, root, rank == root ? ins : std::vector<const void*>(), out, bytes);
  });
  if (in_place) ones[root] = many[root];
  report.check(ones == blocks, "scatter: wrong data", what);
  report.check(many == blocks, "scatter: an input was changed", what);
}

void test_all_to_all(const Layout& layout, size_t bytes) {
  const std::string what = text("all_to_all of %zu", bytes) + name_of(layout);
  const int size = ranks_of(layout);
  const size_t ranks = static_cast<size_t>(size);
  std::vector<std::vector<Buffer>> inputs(ranks), outputs(ranks, std::vector<Buffer>(ranks, Buffer(bytes))),
      wanted(ranks);
  std::vector<std::vector<const void*>> ins(ranks);
  std::vector<std::vector<void*>> outs(ranks);
  for (int rank = 0; rank < size; ++rank)
    for (int other = 0; other < size; ++other) {
      inputs[rank].push_back(block(rank * size + other, bytes));
      wanted[rank].push_back(block(other * size + rank, bytes));
    }
  for (size_t rank = 0; rank < ranks; ++rank)
    for (size_t other = 0; other < ranks; ++other) {
      ins[rank].push_back(inputs[rank][other].data());
      outs[rank].push_back(outputs[rank][other].data());
    }
  const std::vector<std::vector<Buffer>> originals = inputs;
  simulate(layout, what,
           [&](Reach reach, int rank) { return hierarchical_all_to_all(reach, ins[rank], outs[rank], bytes); });
  report.check(outputs == wanted, "wrong data", what);
  report.check(inputs == originals, "an input was changed", what);
}

// All ranks have the same bits, even if the order of two operands matters.
void test_same_bits(const Layout& layout, Operator op, size_t count) {
  const std::string what = text("all_reduce of special values op %d", static_cast<int>(op)) + name_of(layout);
  static constexpr std::uint32_t specials[] = {0x7FC00001, 0xFFC00002, 0x7FC12345, 0,  // NaNs, zeros, infinities
                                               0x80000000, 0x7F800000, 0xFF800000};
  std::mt19937 random(runs);
  std::vector<Buffer> inputs(static_cast<size_t>(ranks_of(layout)), Buffer(count * 4));
  for (Buffer& input : inputs)
    for (size_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(std::normal_distribution<double>()(random));
      put(input.data() + i * 4, random() % 2 == 0 ? specials[random() % 7] : std::bit_cast<std::uint32_t>(value));
    }
  Buffer first;
  for (int turn = 0; turn < 4; ++turn) {  // with the same layout of ranks
    runs += runs % 2;
    std::vector<Buffer> data = inputs;
    simulate(layout, what, [&](Reach reach, int rank) {
      return hierarchical_reduce(reach, {op, DType::Float32}, -1, data[rank].data(), count);
    });
    if (turn == 0) first = data[0];
    for (const Buffer& result : data) report.check(result == first, "bits differ", what);
  }
}

int main() {
  const std::vector<Reduction> reductions = {
      {Operator::Sum, DType::Float32},
      {Operator::Avg, DType::BFloat16},
      {Operator::PremulSum, DType::Float16, 0.5},
      {Operator::Avg, DType::Complex64},
      {Operator::Product, DType::Int8},
      {Operator::PremulSum, DType::Complex64, -2},
      {Operator::Bxor, DType::Int32},
      {Operator::Max, DType::Float64},
      {Operator::Avg, DType::Float32},
      {Operator::PremulSum, DType::Float32, 1.5},
      {Operator::Sum, DType::Float16},
      {Operator::Min, DType::Int8},
  };
  // A rank that is alone on its host, among hosts of four, has several units of several shares, each with several
  // slots.
  const std::vector<size_t> counts = {1, 7, 3000, 50'000, 300'000};
  for (const Layout& layout : kLayouts) {
    const int size = ranks_of(layout);
    for (size_t k = 0; k < reductions.size(); ++k)
      for (size_t count : counts) {
        if (count > 3000 && (k + layout.size()) % 4 != 0) continue;
        const Case c(reductions[k], size, count);
        for (int root : {-1, 0, size / 2, size - 1}) test_reduce(layout, c, root);
        bool in_place = k % 2 == 0;
        for (const std::vector<size_t>& parts : divisions(count, size))
          test_reduce_scatter(layout, reductions[k], parts, in_place ^= true);
      }
    for (size_t bytes : {size_t{1}, size_t{9000}, size_t{300'001}}) {
      bool in_place = bytes > 1;
      for (const std::vector<size_t>& parts : divisions(bytes, size)) test_all_gather(layout, parts, in_place ^= true);
    }
    for (size_t bytes : {size_t{1}, size_t{7}, kTreeBlock}) {
      for (int root = 0; root < size; ++root) test_gather_and_scatter(layout, root, bytes, root % 2 == 0);
      test_all_to_all(layout, bytes);
    }
    for (Operator op : {Operator::Sum, Operator::Product, Operator::Min, Operator::Max})
      test_same_bits(layout, op, 20'000);
  }
  test_reduce({8, 8}, Case({Operator::Sum, DType::Float32}, 16, 1'500'000), -1);
  test_reduce({5, 1}, Case({Operator::Avg, DType::BFloat16}, 6, 1'500'000), -1);
  std::printf("%u schedules, %ld checks, %ld failures\n", runs, report.checks, report.failures);
  return report.failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace aiocomms

int main() { return aiocomms::main(); }
