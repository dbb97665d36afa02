// Windows: memory of this host and of another one, atomics and signals.
#include "windows/windows.hpp"

#include <cstring>

#include "parts.hpp"

namespace aiocomms {
namespace {

struct Office : Desk {
  Windows windows{ucx, false};
  std::int64_t memory[8] = {};

  explicit Office(bool near) {
    windows.map(group, 0, memory, sizeof memory, !near);
    windows.open(group, 0, 1, near ? memory : nullptr, near ? "" : "key", 4096, sizeof memory);
  }
  ~Office() { windows.destroy_keys(); }
};

void windows_near() {
  Office office(true);
  const std::int64_t give = 11;
  std::int64_t back = 0;
  office.windows.put(office.operation(), {0, 1, 8, 8}, &give);
  office.windows.get(office.operation(), {0, 1, 8, 8}, &back);
  CHECK(office.memory[1] == 11 && back == 11 && office.ucx.calls.empty());
  office.windows.change_atomically(office.operation(), {0, 1, 8, 8}, false, 5, 0);
  CHECK(office.memory[1] == 16);
  const auto outcomes = office.outcomes();
  CHECK(outcomes.size() == 3 && outcomes[2].details[0] == 11);
  bool thrown = false;
  auto op = std::make_unique<Operation>(office.reports, office.group, 99);
  try {
    office.windows.put(op.get(), {0, 1, 60, 8}, &give);
  } catch (const std::out_of_range&) {
    thrown = true;
  }
  CHECK(thrown);
  office.windows.close(office.group, 0);
}

void windows_far_keep_the_order() {
  Office office(false);
  std::int64_t data[2] = {};
  office.windows.put(office.operation(), {0, 1, 0, 8}, data);
  office.windows.put(office.operation(), {0, 1, 8, 8}, data);  // other bytes
  CHECK(office.ucx.calls == (std::vector<std::string>{"put", "put"}));
  office.windows.get(office.operation(), {0, 1, 0, 8}, data);  // the same bytes, so it follows a flush
  CHECK(office.ucx.calls.back() == "flush" && office.windows.has_waiting_ops());
  office.ucx.finish();
  office.ucx.finish();
  CHECK(office.outcomes().size() == 2 && !office.windows.advance_lanes());
  office.ucx.finish();
  CHECK(office.windows.advance_lanes() && office.ucx.calls.back() == "get" && !office.windows.has_waiting_ops());
  office.windows.signal(office.operation(), 0, 1);  // it follows the get
  CHECK(office.ucx.told.empty());
  office.ucx.finish();
  CHECK(office.windows.advance_lanes() && office.ucx.told[0].header.channel == kSignal);
  // An op on a window that closes never begins.
  office.windows.put(office.operation(), {0, 1, 0, 8}, data);
  office.windows.get(office.operation(), {0, 1, 0, 8}, data);
  office.windows.close(office.group, 0);
  while (!office.ucx.under_way.empty()) office.ucx.finish();
  CHECK(office.ucx.calls.back() == "destroy");
  CHECK(office.reports.pending() == 0);
}

void windows_serve_and_ask_atomics() {
  Office office(false);
  office.windows.change_atomically(office.operation(), {0, 1, 8, 8}, false, 5, 0);
  CHECK(office.ucx.told[0].header.channel == kAtomic);
  Atomic asked;
  std::memcpy(&asked, office.ucx.told[0].what.data(), sizeof asked);
  Header answer = office.header(0, static_cast<std::int64_t>(asked.number), 0);
  answer.value = 77;
  answer.source = 0;  // This rank was not asked.
  office.windows.end_atomic(office.group, answer);
  CHECK(office.outcomes().empty());
  answer.source = 1;
  office.windows.end_atomic(office.group, answer);
  CHECK(office.outcomes()[0].details[0] == 77);
  Header question = office.header(0, 0, sizeof asked);
  office.windows.serve_atomic(office.group, question, &asked);
  CHECK(office.memory[1] == 5 && office.ucx.told.back().header.channel == kAtomicAnswer);
  asked.offset = 60;
  office.windows.serve_atomic(office.group, question, &asked);
  CHECK(office.ucx.refused == std::vector<int>{1});
}

void windows_signal() {
  Office office(true);
  Header header = office.header(0, 0, 0);
  office.windows.accept_signal(office.group, header);
  office.windows.wait_signal(office.operation(), 0, 1);
  office.windows.wait_signal(office.operation(), 0, 1);
  CHECK(office.outcomes().size() == 1);
  office.windows.accept_signal(office.group, header);
  CHECK(office.outcomes().size() == 1);
  office.windows.wait_signal(office.operation(), 0, 1);
  CHECK(office.windows.withdraw_wait(office.group, 7, 1, office.last_ticket) == nullptr);  // a closed window
  Request* withdrawn = office.windows.withdraw_wait(office.group, 0, 1, office.last_ticket);
  CHECK(withdrawn != nullptr);
  office.reports.withdraw();
  delete withdrawn;
  office.windows.wait_signal(office.operation(), 0, 1);
  office.group.left[1] = 1;
  office.windows.end_waits(office.group, 1);
  office.windows.wait_signal(office.operation(), 0, 1);
  const auto outcomes = office.outcomes();
  CHECK(outcomes.size() == 2 && outcomes[0].status == Status::kClosed && outcomes[1].status == Status::kClosed);
}

void windows_put_and_signal() {
  const std::int64_t data = 11;
  Office near(true);
  near.windows.put_signal(near.operation(), {0, 1, 8, 8}, &data);
  CHECK(near.memory[1] == 11 && near.ucx.calls.empty() && near.ucx.told[0].header.channel == kSignal);
  CHECK(near.outcomes().size() == 1);
  Office far(false);
  far.windows.put_signal(far.operation(), {0, 1, 0, 8}, &data);
  CHECK(far.ucx.calls == (std::vector<std::string>{"put", "flush"}) && far.ucx.told.empty());
  far.ucx.finish();
  CHECK(far.outcomes().empty());
  far.ucx.finish();
  CHECK(far.windows.advance_lanes() && far.ucx.told.size() == 1 && far.outcomes()[0].status == Status::kDone);
  far.windows.put_signal(far.operation(), {0, 1, 64, 0}, &data);
  CHECK(far.ucx.calls.size() == 2 && far.ucx.told.size() == 2 && far.outcomes().size() == 1);
  // A failed put sends no signal.
  far.windows.put_signal(far.operation(), {0, 1, 0, 8}, &data);
  far.ucx.finish(UCS_ERR_NO_MEMORY);
  far.ucx.finish();
  CHECK(far.windows.advance_lanes() && far.ucx.told.size() == 2 && far.outcomes()[0].status != Status::kDone);
  far.windows.put_signal(far.operation(), {0, 1, 0, 8}, &data);
  far.group.lost = true;
  far.windows.release(far.group);
  while (!far.ucx.under_way.empty()) far.ucx.finish(UCS_ERR_CANCELED);
  CHECK(far.outcomes()[0].status == Status::kDropped && far.group.users == 0);
  far.windows.close_lanes(far.group);
}

void windows_move_runs() {
  const std::int64_t data[4] = {10, 11, 12, 13};
  const auto* from = reinterpret_cast<const std::byte*>(data);
  Office near(true);
  near.windows.put_v(near.operation(), {0, 1, 8, {24, 0, 40}, {0, 16, 24}}, from);
  CHECK(near.memory[3] == 10 && near.memory[0] == 12 && near.memory[5] == 13 && near.memory[1] == 0);
  std::int64_t back[4] = {};
  near.windows.get_v(near.operation(), {0, 1, 8, {24, 0}, {8, 24}}, reinterpret_cast<std::byte*>(back));
  CHECK(back[1] == 10 && back[3] == 12 && back[0] == 0 && near.ucx.calls.empty());
  near.windows.put_v(near.operation(), {0, 1, 8, {}, {}}, from);
  near.windows.put_v(near.operation(), {0, 1, 0, {64}, {32}}, from);
  CHECK(near.outcomes().size() == 4 && !near.windows.has_jobs());
  bool thrown = false;
  auto op = std::make_unique<Operation>(near.reports, near.group, 99);
  try {
    near.windows.put_v(op.get(), {0, 1, 8, {0, 60}, {0, 0}}, from);
  } catch (const std::out_of_range&) {
    thrown = true;
  }
  CHECK(thrown && near.memory[0] == 12);
  Office far(false);
  far.windows.put_v(far.operation(), {0, 1, 8, {24, 0}, {0, 16}}, from);
  far.windows.get_v(far.operation(), {0, 1, 8, {8, 16, 32}, {0, 8, 16}}, reinterpret_cast<std::byte*>(back));
  CHECK(far.ucx.calls == (std::vector<std::string>{"put", "put", "get", "get", "get"}));
  for (int i = 0; i < 4; ++i) far.ucx.finish();
  CHECK(far.outcomes().size() == 1);  // the put has ended, and one of the gets is unfinished
  far.ucx.finish();
  far.windows.put_v(far.operation(), {0, 1, 8, {}, {}}, from);
  CHECK(far.outcomes().size() == 2);
  // If the first run of an op fails, the op still waits for its other runs.
  far.windows.put_v(far.operation(), {0, 1, 8, {48, 56}, {0, 8}}, from);
  far.ucx.finish(UCS_ERR_NO_MEMORY);
  CHECK(far.outcomes().empty());
  far.ucx.finish();
  CHECK(far.outcomes()[0].status == Status::kBroken);
  far.windows.close(far.group, 0);
  while (!far.ucx.under_way.empty()) far.ucx.finish();
}

// Runs of more than one step are copied piece by piece, and a later op follows them.
void windows_move_large_runs() {
  std::vector<std::byte> here(600'000), there(600'000);
  for (std::size_t i = 0; i < here.size(); ++i) here[i] = static_cast<std::byte>(i * 7 + i / 1000);
  Desk desk;
  Windows windows{desk.ucx, false};
  windows.map(desk.group, 0, here.data(), here.size(), false);
  windows.open(desk.group, 0, 1, there.data(), "", 0, there.size());
  windows.put_v(desk.operation(), {0, 1, 100'000, {500'000, 0, 200'000}, {0, 100'000, 400'000}}, here.data());
  CHECK(windows.has_jobs());
  while (windows.advance_jobs()) {
  }
  const auto same = [&](std::size_t at, std::size_t from) {
    return std::memcmp(there.data() + at, here.data() + from, 100'000) == 0;
  };
  CHECK(same(500'000, 0) && same(0, 100'000) && same(200'000, 400'000) && there[150'000] == std::byte{0});
  CHECK(desk.outcomes().size() == 1 && !windows.has_jobs());
  windows.close(desk.group, 0);
}

void windows_are_lost() {
  Office office(false);
  std::int64_t data = 0;
  office.windows.put(office.operation(), {0, 1, 0, 8}, &data);
  office.windows.get(office.operation(), {0, 1, 0, 8}, &data);
  office.windows.wait_signal(office.operation(), 0, 1);
  office.group.lost = true;
  office.windows.release(office.group);
  CHECK(office.outcomes().size() == 2 && office.group.users == 1);  // UCX holds the put
  while (!office.ucx.under_way.empty()) office.ucx.finish(UCS_ERR_CANCELED);
  CHECK(office.outcomes()[0].status == Status::kDropped && office.group.users == 0);
  office.windows.close_lanes(office.group);
}

}  // namespace

void test_windows() {
  windows_near();
  windows_far_keep_the_order();
  windows_serve_and_ask_atomics();
  windows_signal();
  windows_put_and_signal();
  windows_move_runs();
  windows_move_large_runs();
  windows_are_lost();
}

}  // namespace aiocomms
