// The parts of the engine, each alone.
#include "parts.hpp"

#include <cstdio>

#include "engine/closing.hpp"

namespace aiocomms {
namespace {

void farewells_wait_for_messages() {
  Farewells farewells(2);
  const Farewell sent{Farewell::kCommunicator, 3, 7, 1, 42};
  Farewell got;
  CHECK(Farewell::unpack(sent.pack(), got) && got.order == 3 && got.group == 7 && got.collectives == 42);
  CHECK(!Farewell::unpack("B", got) && !Farewell::unpack("X" + sent.pack().substr(1), got));
  farewells.add(1, got);
  CHECK(farewells.take_due(1, 2).empty() && farewells.waiting(1));
  CHECK(farewells.take_due(1, 3).size() == 1 && !farewells.waiting(1));
  const std::uint32_t last = ~std::uint32_t{0};  // the numbers of messages start again at 0 behind it
  farewells.add(1, {Farewell::kCommunicator, last, 7, 1, 42});
  farewells.add(1, {Farewell::kCommunicator, 1, 8, 1, 42});
  CHECK(farewells.take_due(1, last - 1).empty());
  CHECK(farewells.take_due(1, last).size() == 1 && farewells.take_due(1, 0).empty());
  CHECK(farewells.take_due(1, 1).size() == 1);
  farewells.expect_acknowledgement(1, true);
  CHECK(!farewells.all_acknowledged());
  farewells.expect_acknowledgement(1, false);
  CHECK(farewells.all_acknowledged());
}

}  // namespace
}  // namespace aiocomms

int main() {
  using namespace aiocomms;
  for (auto test : {test_board, test_pacer, test_inbox, test_offers, test_windows, farewells_wait_for_messages}) test();
  std::printf("%u checks, %u failures\n", checks, failures);
  return failures ? 1 : 0;
}
