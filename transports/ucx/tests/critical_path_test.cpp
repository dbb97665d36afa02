// The critical path of collectives on simulated hosts, against that of the simpler ways that they replace.
#include "critical_path.hpp"

#include <cstdio>

#include "collectives/message_collectives.hpp"
#include "collectives/schedule_parts.hpp"

namespace aiocomms {
namespace {

using Buffer = std::vector<std::byte>;

// 100 Gbit/s with a network card that reads and writes memory; and 25 Gbit/s through the kernel.
const std::vector<Speed> kSpeeds = {{"rdma", 12500, 2, 0.5, 0}, {"tcp", 3125, 20, 2, 4000}};

// Some of the ranks.
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

// One phase behind the other, in pieces of 2 MiB: within each host, between the hosts' first ranks, within each host.
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
  double before, now;
};

void show(const char* what, const Speed& speed, std::size_t bytes, const Comparison& it) {
  std::printf("%-16s %-5s %10zu bytes %10.1f us before %10.1f us now %6.2f\n", what, speed.name, bytes, it.before,
              it.now, it.now / it.before);
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

Comparison all_gathers(const std::vector<int>& sizes, const Speed& speed, std::size_t bytes) {
  std::size_t ranks = 0;
  for (int size : sizes) ranks += static_cast<std::size_t>(size);
  std::vector<Buffer> data(ranks, Buffer(bytes * ranks));
  std::vector<std::vector<void*>> outs(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank)
    for (std::size_t block = 0; block < ranks; ++block) outs[rank].push_back(data[rank].data() + block * bytes);
  const Bytes lengths(ranks, bytes);
  return compare(
      sizes, speed,
      [&](Reach reach, int rank) {
        return all_gather(reach.wire, outs[rank][rank], outs[rank].data(), lengths.data());
      },
      [&](Reach reach, int rank) { return hierarchical_all_gather(reach, outs[rank][rank], outs[rank], lengths); });
}

Comparison reduce_scatters(const std::vector<int>& sizes, const Speed& speed, std::size_t bytes) {
  std::size_t ranks = 0;
  for (int size : sizes) ranks += static_cast<std::size_t>(size);
  std::vector<Buffer> data(ranks, Buffer(bytes * ranks)), results(ranks, Buffer(bytes));
  std::vector<std::vector<const void*>> ins(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank)
    for (std::size_t block = 0; block < ranks; ++block) ins[rank].push_back(data[rank].data() + block * bytes);
  const Bytes counts(ranks, bytes / 4);
  return compare(
      sizes, speed,
      [&](Reach reach, int rank) {
        return reduce_scatter(reach.wire, kSum, ins[rank].data(), counts.data(), results[rank].data());
      },
      [&](Reach reach, int rank) {
        return hierarchical_reduce_scatter(reach, kSum, ins[rank], counts, results[rank].data());
      });
}

// The blocks of each rank for each other.
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

int main() {
  for (const Speed& speed : kSpeeds) {
    for (std::size_t bytes : {4096, 16384, 65536, 262144, 1048576, 16777216}) {
      show("all_reduce 2x2", speed, bytes, all_reduces({2, 2}, speed, bytes));
      show("all_reduce 2x8", speed, bytes, all_reduces({8, 8}, speed, bytes));
      show("all_reduce 4x4", speed, bytes, all_reduces({4, 4, 4, 4}, speed, bytes));
      show("all_reduce 8x1", speed, bytes, all_reduces({1, 1, 1, 1, 1, 1, 1, 1}, speed, bytes));
      show("all_reduce 8+3", speed, bytes, all_reduces({8, 3}, speed, bytes));
    }
    for (std::size_t bytes : {8, 64, 256, 512, 1024, 2048, 4096, 8192})
      for (const std::vector<int>& sizes : std::vector<std::vector<int>>{{2, 2}, {8, 8}, {4, 4, 4, 4}}) {
        const std::string where = " " + std::to_string(sizes.size()) + "x" + std::to_string(sizes[0]);
        show(("gather" + where).c_str(), speed, bytes, gathers(sizes, speed, bytes));
        show(("scatter" + where).c_str(), speed, bytes, scatters(sizes, speed, bytes));
        show(("all_to_all" + where).c_str(), speed, bytes, all_to_alls(sizes, speed, bytes));
      }
    for (std::size_t bytes : {64, 1024, 4096, 16384, 65536, 262144, 1048576}) {
      show("all_gather 2x2", speed, bytes, all_gathers({2, 2}, speed, bytes));
      show("all_gather 2x8", speed, bytes, all_gathers({8, 8}, speed, bytes));
      show("reduce_scatter 2x2", speed, bytes, reduce_scatters({2, 2}, speed, bytes));
      show("reduce_scatter 2x8", speed, bytes, reduce_scatters({8, 8}, speed, bytes));
    }
  }
  return 0;
}

}  // namespace
}  // namespace aiocomms

int main() { return aiocomms::main(); }
