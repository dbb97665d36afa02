// Windows: memory of the same host, of another, atomics and signals.
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
  office.windows.get(office.operation(), {0, 1, 0, 8}, data);  // the same bytes: it comes behind a flush
  CHECK(office.ucx.calls.back() == "flush" && office.windows.has_waiting_ops());
  office.ucx.finish();
  office.ucx.finish();
  CHECK(office.outcomes().size() == 2 && !office.windows.advance_lanes());
  office.ucx.finish();
  CHECK(office.windows.advance_lanes() && office.ucx.calls.back() == "get" && !office.windows.has_waiting_ops());
  office.windows.signal(office.operation(), 0, 1);  // behind the get
  CHECK(office.ucx.told.empty());
  office.ucx.finish();
  CHECK(office.windows.advance_lanes() && office.ucx.told[0].header.channel == kSignal);
  // An op on a window that closes does not begin any more.
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
  answer.source = 0;  // which was not asked
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
  // Of a put that fails nobody is told that it has arrived.
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
  windows_are_lost();
}

}  // namespace aiocomms
