// Compares the critical path of collectives on simulated hosts with that of the simpler algorithms that they replace.
#include "critical_path.hpp"

#include <cstdio>

#include "collectives/message_collectives.hpp"
#include "collectives/schedule_parts.hpp"
#include "fake_network.hpp"

namespace aiocomms {
namespace {

// 100 Gbit/s with a network card that accesses memory, and 25 Gbit/s through the kernel.
const std::vector<Speed> kSpeeds = {{"rdma", 12500, 2, 0.5, 0}, {"tcp", 3125, 20, 2, 4000}};

// Messages between some of the ranks.
class Some final : public Messages {
 public:
  Some(Messages& all, std::vector<int> ranks) : all_(all), ranks_(std::move(ranks)) {}
  int rank() const override {
    return static_cast<int>(std::find(ranks_.begin(), ranks_.end(), all_.rank()) - ranks_.begin());
  }
  int size() const override { return static_cast<int>(ranks_.size()); }
  void send(int dst, const void* data, std::size_t bytes, Event& event) noexcept override {
    all_.send(ranks_[static_cast<std::size_t>(dst)], data, bytes, event);
  }
  void recv(int src, void* data, std::size_t bytes, Event& event) noexcept override {
    all_.recv(ranks_[static_cast<std::size_t>(src)], data, bytes, event);
  }

 private:
  Messages& all_;
  std::vector<int> ranks_;
};

std::vector<int> leaders(const Hosts& hosts) {
  std::vector<int> ranks;
  for (const std::vector<int>& of_host : hosts.ranks) ranks.push_back(of_host.front());
  return ranks;
}

// One phase after the other, in pieces of 2 MiB: within each host, between the hosts' first ranks, within each host.
Task all_reduce_by_phases(Reach reach, Reduction reduction, void* data, std::size_t count) {
  constexpr std::size_t kPiece = 2 * 1024 * 1024;
  const Reduction local = after_lifting(reduction);
  const std::size_t element = size_of(local.dtype), most = kPiece / element;
  const Scratch partial = make_scratch(std::min(count, most) * element);
  Some between(reach.wire, leaders(reach.hosts));
  for (std::size_t done = 0; done < count; done += most) {
    const std::size_t now = std::min(count - done, most);
    void* const first = at(data, done * size_of(reduction.dtype));
    lift(reduction, partial.get(), first, now);
    if (reach.shared) {
      Task within = shared_reduce(*reach.shared, local, 0, partial.get(), partial.get(), now);
      co_await within;
    }
    if (reach.hosts.place == 0) {
      Task across = all_reduce(between, local, partial.get(), now);
      co_await across;
    }
    if (reach.shared) {
      Bytes sizes(static_cast<std::size_t>(reach.shared->ranks()), 0);
      sizes[0] = now * element;
      Task down = shared_spread(*reach.shared, partial.get(),
                                std::vector<void*>(reach.hosts.place == 0 ? 0 : sizes.size(), partial.get()), sizes);
      co_await down;
    }
    lower(reduction, first, partial.get(), now, reach.wire.size());
  }
}

struct Comparison {
  double before, now;  // microseconds
};

Report report;

// Prints a row, and checks that the ratio is within its bound.
void show(const std::string& what, const Speed& speed, std::size_t bytes, const Comparison& it, double bound) {
  const double ratio = it.now / it.before;
  std::printf("| %s | %s | %zu | %.1f | %.1f | %.2f |\n", what.c_str(), speed.name, bytes, it.before, it.now, ratio);
  const std::string where = what + text(" of %zu bytes, ", bytes) + speed.name;
  report.check(it.before > 0 && it.now > 0, "it does not end", where);
  report.check(ratio <= bound, "the critical path is too long", where);
}

using Make = std::function<Task(Reach, int)>;

Comparison compare(const std::vector<int>& sizes, const Speed& speed, const Make& before, const Make& now) {
  FakeHosts first(sizes, false), second(sizes, false);
  return {CriticalPath(first, speed).run(before), CriticalPath(second, speed).run(now)};
}

constexpr Reduction kSum{Operator::Sum, DType::Float32};

Comparison all_reduces(const std::vector<int>& sizes, const Speed& speed, std::size_t bytes) {
  std::vector<Buffer> data;
  for (int size : sizes)
    for (int rank = 0; rank < size; ++rank) data.emplace_back(bytes);
  return compare(
      sizes, speed,
      [&](Reach reach, int rank) { return all_reduce_by_phases(reach, kSum, data[rank].data(), bytes / 4); },
      [&](Reach reach, int rank) { return hierarchical_reduce(reach, kSum, -1, data[rank].data(), bytes / 4); });
}

// The blocks of each rank for each other rank.
struct Blocks {
  std::vector<Buffer> data, others;
  std::vector<std::vector<const void*>> ins;
  std::vector<std::vector<void*>> outs;
  Bytes lengths;

  Blocks(const std::vector<int>& sizes, std::size_t bytes) {
    std::size_t ranks = 0;
    for (int size : sizes) ranks += static_cast<std::size_t>(size);
    data.assign(ranks, Buffer(bytes * ranks));
    others = data;
    ins.resize(ranks);
    outs.resize(ranks);
    lengths.assign(ranks, bytes);
    for (std::size_t rank = 0; rank < ranks; ++rank)
      for (std::size_t block = 0; block < ranks; ++block) {
        ins[rank].push_back(data[rank].data() + block * bytes);
        outs[rank].push_back(others[rank].data() + block * bytes);
      }
  }
};

Comparison all_gathers(const std::vector<int>& sizes, const Speed& speed, std::size_t bytes) {
  Blocks it(sizes, bytes);
  return compare(
      sizes, speed,
      [&](Reach reach, int rank) {
        return all_gather(reach.wire, it.ins[rank][rank], it.outs[rank].data(), it.lengths.data());
      },
      [&](Reach reach, int rank) {
        return hierarchical_all_gather(reach, it.ins[rank][rank], it.outs[rank], it.lengths);
      });
}

Comparison reduce_scatters(const std::vector<int>& sizes, const Speed& speed, std::size_t bytes) {
  Blocks it(sizes, bytes);
  const Bytes counts(it.ins.size(), bytes / 4);
  return compare(
      sizes, speed,
      [&](Reach reach, int rank) {
        return reduce_scatter(reach.wire, kSum, it.ins[rank].data(), counts.data(), it.outs[rank][0]);
      },
      [&](Reach reach, int rank) {
        return hierarchical_reduce_scatter(reach, kSum, it.ins[rank], counts, it.outs[rank][0]);
      });
}

Comparison gathers(const std::vector<int>& sizes, const Speed& speed, std::size_t bytes) {
  Blocks it(sizes, bytes);
  return compare(
      sizes, speed,
      [&](Reach reach, int rank) { return gather(reach.wire, 0, it.ins[rank][0], it.outs[rank].data(), bytes); },
      [&](Reach reach, int rank) { return hierarchical_gather(reach, 0, it.ins[rank][0], it.outs[rank], bytes); });
}

Comparison scatters(const std::vector<int>& sizes, const Speed& speed, std::size_t bytes) {
  Blocks it(sizes, bytes);
  return compare(
      sizes, speed,
      [&](Reach reach, int rank) { return scatter(reach.wire, 0, it.ins[rank].data(), it.outs[rank][0], bytes); },
      [&](Reach reach, int rank) { return hierarchical_scatter(reach, 0, it.ins[rank], it.outs[rank][0], bytes); });
}

Comparison all_to_alls(const std::vector<int>& sizes, const Speed& speed, std::size_t bytes) {
  Blocks it(sizes, bytes);
  return compare(
      sizes, speed,
      [&](Reach reach, int rank) {
        return all_to_all(reach.wire, it.ins[rank].data(), it.lengths.data(), it.outs[rank].data(), it.lengths.data(),
                          true);
      },
      [&](Reach reach, int rank) { return hierarchical_all_to_all(reach, it.ins[rank], it.outs[rank], bytes); });
}

// The chosen algorithm is never much slower than the replaced one. With eight ranks on each host it is much faster.
void test_speed(const Speed& speed) {
  struct Where {
    const char* name;
    std::vector<int> sizes;
    double reduced, blocks, small;  // bounds for an all_reduce, for all_gather and reduce_scatter, and for small blocks
  };
  const std::vector<Where> places = {{" on 2 x 2", {2, 2}, 0.85, 1.3, 1.15},
                                     {" on 2 x 8", {8, 8}, 0.8, 0.6, 0.9},
                                     {" on 4 x 4", {4, 4, 4, 4}, 0.65, 0.9, 0.9},
                                     {" on 8 + 3", {8, 3}, 0.9, 0.85, 1}};
  for (const Where& where : places) {
    const auto called = [&](const char* what) { return std::string(what) + where.name; };
    for (std::size_t bytes : {16384, 262144, 1048576})
      show(called("all_reduce"), speed, bytes, all_reduces(where.sizes, speed, bytes), where.reduced);
    for (std::size_t bytes : {64, 4096, 65536, 1048576}) {
      show(called("all_gather"), speed, bytes, all_gathers(where.sizes, speed, bytes), where.blocks);
      show(called("reduce_scatter"), speed, bytes, reduce_scatters(where.sizes, speed, bytes), where.blocks);
    }
    for (std::size_t bytes : {8, 256, 1024}) {
      show(called("gather"), speed, bytes, gathers(where.sizes, speed, bytes), where.small);
      show(called("scatter"), speed, bytes, scatters(where.sizes, speed, bytes), where.small);
      show(called("all_to_all"), speed, bytes, all_to_alls(where.sizes, speed, bytes), where.small);
    }
  }
  for (std::size_t bytes : {16384, 1048576})
    show("all_reduce on 8 x 1", speed, bytes, all_reduces({1, 1, 1, 1, 1, 1, 1, 1}, speed, bytes), 1);
  const std::size_t large = 16 * 1024 * 1024;
  show("all_reduce on 2 x 2", speed, large, all_reduces({2, 2}, speed, large), 0.55);
  show("all_reduce on 2 x 8", speed, large, all_reduces({8, 8}, speed, large), 0.45);
}

int main() {
  for (const Speed& speed : kSpeeds) test_speed(speed);
  std::printf("%ld checks, %ld failures\n", report.checks, report.failures);
  return report.failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace aiocomms

int main() { return aiocomms::main(); }
