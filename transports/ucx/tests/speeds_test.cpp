// The measurement of a host: the shortest of several times, with a clock that the test sets.
#include "net/speeds.hpp"

#include <vector>

#include "parts.hpp"

namespace aiocomms {
namespace {

// A machine whose copies take the times that the test sets, in turn.
struct Machine {
  std::vector<std::uint64_t> reads, copies;
  int refused = 0;  // the number of last reads that fail
  std::uint64_t now = 1'000'000;
  std::size_t read = 0, copied = 0;

  Speeds measure() {
    return shortest_of({[this] {
                          now += reads[read % reads.size()];
                          ++read;
                          return read + static_cast<std::size_t>(refused) <= kMeasurements;
                        },
                        [this] { now += copies[copied++ % copies.size()]; }, [this] { return now; }});
  }
};

void the_shortest_counts() {
  Machine busy{.reads = {900, 4'000'000, 31, 47}, .copies = {5'000, 14}};
  const Speeds speeds = busy.measure();
  CHECK(speeds.read == 31 && speeds.copied == 14);
  CHECK(busy.read == kMeasurements && busy.copied == kMeasurements);  // at any duration
}

void a_kernel_may_refuse() {
  Machine machine{.reads = {20}, .copies = {14}, .refused = kMeasurements};
  CHECK(machine.measure().read == 0 && machine.measure().copied == 14);
  Machine later{.reads = {20}, .copies = {14}, .refused = 1};
  CHECK(later.measure().read == 0);
}

void this_host_can_be_measured() {
  const Speeds speeds = measure_speeds();
  CHECK(speeds.copied > 0);
}

}  // namespace

void test_speeds() {
  the_shortest_counts();
  a_kernel_may_refuse();
  this_host_can_be_measured();
}

}  // namespace aiocomms
