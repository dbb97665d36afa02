// The launcher over a fake GPU, stopped between its steps. ./program [SECONDS] also runs random tests for that time.
#include "launcher/launcher.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>

#include "fake_gpu.hpp"

namespace aiocomms {
namespace {

unsigned checks = 0, failures = 0;
std::string running;

void check(bool holds, const char* what, int line) {
  ++checks;
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "FAILED at line %d: %s, in %s\n", line, what, running.c_str());
}
#define CHECK(condition) check((condition), #condition, __LINE__)

using Ended = std::vector<LaunchOutcome>;

constexpr std::chrono::microseconds kNoSpin{0};
constexpr std::chrono::seconds kLong{30};  // so long a spin that no thread sleeps within a test

// A GPU, a launcher with one port, and a caller's stream.
struct World {
  FakeGpu device;
  std::shared_ptr<Launcher> launcher;
  std::shared_ptr<LaunchPort> port;
  FakeStream* caller;
  std::size_t told_asleep = 0;

  explicit World(std::chrono::microseconds spin = kNoSpin) {
    gpu = &device;
    launcher = std::make_shared<Launcher>(FakeGpu::api(), 0, spin);
    port = launcher->open();
    caller = device.stream();
  }
  ~World() {
    launcher->close(*port);
    launcher->end(std::chrono::seconds(20));
    while (launcher.use_count() > 1) std::this_thread::yield();  // No thread is left, except for its last step.
    launcher.reset();
    CHECK(!device.misused());
    CHECK(device.events() == 0);
  }
  std::shared_ptr<CommLine> line(FakeComm* comm) { return launcher->add(port, device.stream(), comm); }
  std::shared_ptr<CommLine> line() { return line(device.comms(1)[0]); }
  FakeStream* stream_of(const std::shared_ptr<CommLine>& line) const { return static_cast<FakeStream*>(line->stream); }

  std::uint64_t launch(const std::shared_ptr<CommLine>& line, std::vector<LaunchCall> calls) {
    return launcher->launch(line, launcher->mark(caller), std::move(calls));
  }
  std::uint64_t sum(const std::shared_ptr<CommLine>& line, float* data, std::size_t count = 1) {
    return launch(line, {{LaunchCall::kAllReduce, data, data, count, 7, 0, 0}});
  }
  bool readable(int milliseconds = 0) const {
    pollfd asked{port->fd, POLLIN, 0};
    return poll(&asked, 1, milliseconds) == 1;
  }
  // Returns the ops that have ended, and counts the reports of sleeping threads.
  Ended taken() { return taken(*port); }
  Ended taken(LaunchPort& of) {
    Ended all = launcher->take(of);
    told_asleep += std::erase_if(all, [](const auto& each) { return each.kind == LaunchOutcome::kAsleep; });
    return all;
  }
  // Waits until `count` ops have ended.
  Ended ended(std::size_t count) {
    Ended all;
    while (all.size() < count && readable(20'000)) {
      for (const LaunchOutcome& outcome : taken()) all.push_back(outcome);
    }
    CHECK(all.size() == count);
    return all;
  }
};

bool are(const Ended& ended, LaunchOutcome::Kind kind) {
  return std::all_of(ended.begin(), ended.end(), [&](const auto& each) { return each.kind == kind; });
}

// --------------------------------------------------------------------------------------------------------------- order

void ops_end_in_order_with_their_data(std::chrono::microseconds spin) {
  World world(spin);
  constexpr int kOps = 100;
  std::vector<std::shared_ptr<CommLine>> lines;
  for (FakeComm* comm : world.device.comms(2)) lines.push_back(world.line(comm));
  std::vector<float> data(2 * kOps);
  for (int op = 0; op < kOps; ++op) {
    for (int rank = 0; rank < 2; ++rank) {
      data[2 * op + rank] = static_cast<float>(op + 1000 * rank);
      world.sum(lines[rank], &data[2 * op + rank]);
    }
  }
  const Ended ended = world.ended(2 * kOps);
  CHECK(are(ended, LaunchOutcome::kDone));
  for (std::uint64_t rank = 0; rank < 2; ++rank) {
    std::uint64_t last = 0;
    for (const auto& each : ended) {
      if (each.id % 2 != 1 - rank) continue;  // Ids begin with 1, for rank 0.
      CHECK(each.id > last);
      last = each.id;
    }
  }
  for (int op = 0; op < kOps; ++op) CHECK(data[2 * op] == 2.0f * op + 1000 && data[2 * op + 1] == data[2 * op]);
  const int made = world.device.count("create");
  for (int again = 0; again < kOps; ++again) {
    for (int rank = 0; rank < 2; ++rank) world.sum(lines[rank], &data[rank]);
    world.ended(2);
  }
  CHECK(world.device.count("create") <= made);  // Events are reused.
}

void an_op_waits_for_the_callers_stream() {
  World world(kLong);
  const auto line = world.line();
  float data = 1;
  const auto gate = world.device.gate(world.caller);
  world.sum(line, &data);
  world.launcher->settle_all(*world.port);
  CHECK(!world.readable(20));
  world.device.open(gate);
  CHECK(are(world.ended(1), LaunchOutcome::kDone));
}

void copies_come_first_and_several_calls_are_a_group() {
  World world;
  const auto line = world.line();
  float from = 5, to = 0;
  world.launch(line, {{LaunchCall::kCopy, &from, &to, sizeof from, 0, 0, 0},
                      {LaunchCall::kSend, &from, nullptr, 1, 7, 0, 0},
                      {LaunchCall::kRecv, nullptr, &to, 1, 7, 0, 0}});
  CHECK(are(world.ended(1), LaunchOutcome::kDone));
  CHECK(to == 5);
  CHECK((world.device.called() == std::vector<std::string>{"copy", "start", "send", "recv", "end"}));
  world.sum(line, &from);
  world.launch(line, {});
  world.ended(2);
  CHECK((world.device.called() == std::vector<std::string>{"all_reduce"}));
}

void ops_of_all_lines_are_called_in_the_order_of_the_program() {
  World world;
  const auto one = world.line(), other = world.line();
  float data[3] = {};
  world.device.stop("wait");
  world.launch(one, {{LaunchCall::kSend, data, nullptr, 1, 7, 0, 0}});
  world.launch(other, {{LaunchCall::kAllReduce, data, data, 1, 7, 0, 0}});
  world.launch(one, {{LaunchCall::kRecv, nullptr, data, 1, 7, 0, 0}});
  world.device.wait_for("wait");
  world.device.let_go("wait");
  world.ended(3);
  CHECK((world.device.called() == std::vector<std::string>{"send", "all_reduce", "recv"}));
}

void the_callers_current_device_does_not_matter() {
  World world;
  const auto line = world.line();
  float data = 1;
  const auto gate = world.device.gate(world.caller);
  const GpuApi api = FakeGpu::api();
  api.set_device(1);
  const auto id = world.sum(line, &data);
  world.launcher->join(nullptr, *world.launcher->mark(world.caller));
  world.launcher->wait_stream(*world.port, id, nullptr);
  CHECK(world.device.waiting(0) == 2 && world.device.waiting(1) == 0);
  int current = 0;
  api.get_device(&current);
  CHECK(current == 1);
  api.set_device(0);
  world.device.open(gate);
  CHECK(are(world.ended(1), LaunchOutcome::kDone));
}

// -------------------------------------------------------------------------------------------------- waits and wake-ups

void a_short_op_is_looked_at_and_a_long_one_slept_on() {
  {
    World world(kLong);
    const auto line = world.line();
    float data = 1;
    const auto gate = world.device.gate(world.caller);
    world.sum(line, &data);
    while (world.device.count("query") < 10) std::this_thread::yield();
    world.device.open(gate);
    world.ended(1);
    CHECK(world.device.count("synchronize") == 0);
    CHECK(world.told_asleep == 0);
  }
  World world;
  const auto line = world.line();
  float data = 1;
  const auto gate = world.device.gate(world.caller);
  world.device.stop("synchronize");
  world.sum(line, &data);
  world.device.wait_for("synchronize");
  const int asked = world.device.count("query");
  world.device.let_go("synchronize");
  world.device.open(gate);
  world.ended(1);
  CHECK(world.device.count("query") == asked);  // No thread polls an event that a thread sleeps on.
  CHECK(world.told_asleep == 1);
}

void streams_do_not_wait_for_each_other() {
  World world;
  const auto slow = world.line(), quick = world.line();
  float data[2] = {1, 2};
  const auto gate = world.device.gate(world.stream_of(slow));
  world.device.stop("synchronize");
  const auto first = world.sum(slow, &data[0]);
  world.device.wait_for("synchronize");
  world.device.let_go("synchronize");
  world.sum(quick, &data[1]);
  CHECK(world.ended(1)[0].id == first + 1);
  world.device.open(gate);
  CHECK(world.ended(1)[0].id == first);
}

void a_call_that_is_held_delays_no_op_that_has_ended() {
  for (const auto spin : {kNoSpin, std::chrono::microseconds(kLong)}) {
    World world(spin);
    const auto ends = world.line(), held = world.line();
    float data[2] = {1, 2};
    const auto gate = world.device.gate(world.stream_of(ends));
    const auto first = world.sum(ends, &data[0]);
    world.launcher->settle_all(*world.port);
    world.device.stop("all_reduce");
    world.sum(held, &data[1]);
    world.device.wait_for("all_reduce");
    world.device.open(gate);
    CHECK(world.ended(1)[0].id == first);
    world.device.let_go("all_reduce");
    world.ended(1);
  }
}

void the_loop_is_woken_once_for_a_batch() {
  World world(kLong);
  const auto line = world.line();
  float data = 1;
  const auto gate = world.device.gate(world.caller);
  for (int op = 0; op < 10; ++op) world.sum(line, &data);
  world.device.open(gate);
  while (world.device.count("query") == 0 || !world.readable(20'000)) continue;
  world.launcher->drain(*world.port);
  std::uint64_t written = 0;
  CHECK(read(world.port->fd, &written, sizeof written) == sizeof written && written == 1);
  CHECK(world.launcher->take(*world.port).size() == 10);
  CHECK(!world.readable());
}

void a_stream_waits_for_an_op_that_is_not_called_yet() {
  World world;
  const auto line = world.line();
  FakeStream* reader = world.device.stream();
  float data = 1;
  const auto gate = world.device.gate(world.caller);
  world.device.stop("all_reduce");
  const auto id = world.sum(line, &data);
  std::atomic<bool> waits = false;
  std::thread user([&] {
    world.launcher->wait_stream(*world.port, id, reader);
    waits = true;
  });
  world.device.wait_for("all_reduce");
  CHECK(!waits);
  world.device.let_go("all_reduce");
  user.join();  // The user does not wait for the GPU.
  const auto after = world.launcher->mark(reader);
  CHECK(FakeGpu::api().event_query(after->event) == GpuApi::kNotReady);
  world.device.open(gate);
  world.ended(1);
  FakeGpu::api().event_synchronize(after->event);
  world.launcher->wait_stream(*world.port, id, reader);  // The op is done, so there is nothing to wait for.
}

// -------------------------------------------------------------------------------------------------------------- errors

void an_error_is_that_of_its_op_and_ends_the_port(const char* function, LaunchOutcome::Kind kind, int code) {
  World world;
  const auto line = world.line();
  float data = 1;
  const auto after = world.launcher->mark(world.caller);
  world.device.stop("wait");
  world.device.fail(function, code);
  const auto id = world.launcher->launch(line, after, {{LaunchCall::kAllReduce, &data, &data, 1, 7, 0, 0}});
  const auto next = world.launcher->launch(line, after, {{LaunchCall::kAllReduce, &data, &data, 1, 7, 0, 0}});
  world.device.wait_for("wait");
  world.device.let_go("wait");
  Ended ended = world.ended(2);
  std::sort(ended.begin(), ended.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  CHECK(ended[0].id == id && ended[0].kind == kind && ended[0].code == code);
  // The failure of an event may be noticed after the next op is called.
  CHECK(ended[1].id == next && (ended[1].kind == LaunchOutcome::kDropped || ended[1].kind == kind));
  world.launcher->launch(line, after, {});
  CHECK(world.ended(1)[0].kind == LaunchOutcome::kDropped);
}

void a_group_that_fails_is_ended() {
  World world;
  const auto line = world.line();
  float data = 1;
  world.device.fail("send", 5);
  world.launch(line,
               {{LaunchCall::kSend, &data, nullptr, 1, 7, 0, 0}, {LaunchCall::kRecv, nullptr, &data, 1, 7, 0, 0}});
  const Ended ended = world.ended(1);
  CHECK(ended[0].kind == LaunchOutcome::kNccl && ended[0].code == 5);
  CHECK((world.device.called() == std::vector<std::string>{"start", "send", "end"}));
}

void a_call_that_is_in_progress_is_no_error() {
  World world;
  const auto line = world.line();
  world.device.fail("start", GpuApi::kNcclInProgress);
  float data = 1;
  world.launch(line,
               {{LaunchCall::kSend, &data, nullptr, 1, 7, 0, 0}, {LaunchCall::kRecv, nullptr, &data, 1, 7, 0, 0}});
  CHECK(are(world.ended(1), LaunchOutcome::kDone));
}

// ----------------------------------------------------------------------------------------------------------- giving up

void a_full_queue_holds_nobody_who_hands_over() {
  World world;
  FakeComm* comm = world.device.comms(2)[0];  // The other rank does not call.
  const auto line = world.line(comm);
  world.stream_of(line)->most = 4;
  float data = 1;
  for (int op = 0; op < 20; ++op) world.sum(line, &data);
  CHECK(!world.launcher->settle(*line, std::chrono::milliseconds(20)));
  world.launcher->cut(*line);
  world.device.abort(comm);  // This frees the thread.
  CHECK(world.launcher->settle(*line, {}));
  const Ended ended = world.ended(20);
  const auto dropped = std::count_if(ended.begin(), ended.end(), [](auto& it) { return it.kind == it.kDropped; });
  CHECK(dropped > 0 && dropped < 20);
}

void an_abort_amid_a_call() {
  World world;
  FakeComm* comm = world.device.comms(2)[0];
  const auto line = world.line(comm);
  float data = 1;
  world.device.stop("all_reduce");
  world.sum(line, &data);
  world.device.wait_for("all_reduce");
  world.sum(line, &data);
  world.launcher->cut(*line);
  CHECK(world.ended(1)[0].kind == LaunchOutcome::kDropped);
  CHECK(!world.launcher->settle(*line, Launcher::Patience(0)));
  world.device.let_go("all_reduce");
  CHECK(world.launcher->settle(*line, {}));
  world.device.abort(comm);
  world.launcher->drain(*line);
  CHECK(are(world.ended(1), LaunchOutcome::kDone));  // Its event fires because NCCL has stopped.
  world.sum(line, &data);
  CHECK(world.ended(1)[0].kind == LaunchOutcome::kDropped);
  CHECK(world.device.count("all_reduce") == 1);
}

void an_abort_while_a_thread_sleeps() {
  World world;
  FakeComm* comm = world.device.comms(2)[0];
  const auto line = world.line(comm);
  float data = 1;
  world.device.stop("synchronize");
  world.sum(line, &data);
  world.device.wait_for("synchronize");
  world.launcher->cut(*world.port);
  CHECK(world.launcher->settle(*line, {}));
  world.device.let_go("synchronize");
  world.device.abort(comm);
  world.launcher->drain(*world.port);
  CHECK(world.ended(1).size() == 1);
}

// Threads that wait for the launching thread are released when the port is given up.
void giving_up_lets_go_of_who_waits() {
  World world;
  FakeComm* comm = world.device.comms(2)[0];
  const auto line = world.line(comm);
  float data = 1;
  world.device.stop("all_reduce");
  world.sum(line, &data);
  world.device.wait_for("all_reduce");
  const auto queued = world.sum(line, &data);
  std::thread settles([&] { world.launcher->settle_all(*world.port); });
  std::thread waits([&] { world.launcher->wait_stream(*world.port, queued, world.caller); });
  world.launcher->cut(*world.port);
  settles.join();
  waits.join();
  world.device.let_go("all_reduce");
  world.device.abort(comm);
  world.launcher->drain(*world.port);
}

void a_close_while_a_thread_sleeps_and_one_calls() {
  World world;
  FakeComm* comm = world.device.comms(2)[0];
  const auto slept_on = world.line(comm), called = world.line();
  float data = 1;
  world.device.stop("synchronize");
  world.sum(slept_on, &data);
  world.device.wait_for("synchronize");
  world.device.stop("all_reduce");
  world.sum(called, &data);
  world.device.wait_for("all_reduce");
  world.launcher->close(*world.port);
  CHECK(world.port->fd == -1);
  world.launcher->end(Launcher::Patience(0));  // Both threads are left behind.
  CHECK(world.launcher.use_count() > 1);
  world.device.let_go("synchronize");
  world.device.let_go("all_reduce");
  world.device.abort(comm);
}

void ports_share_a_thread_and_nothing_else() {
  World world;
  const auto other = world.launcher->open();
  const auto theirs = world.launcher->add(other, world.device.stream(), world.device.comms(1)[0]);
  const auto mine = world.line();
  float data = 1;
  world.device.fail("all_reduce", 3);
  world.sum(mine, &data);
  CHECK(world.ended(1)[0].kind == LaunchOutcome::kNccl);
  world.device.fail("all_reduce", 0);
  world.launcher->launch(theirs, world.launcher->mark(world.caller), {});
  world.launcher->drain(*other);
  const Ended ended = world.taken(*other);
  CHECK(ended.size() == 1 && are(ended, LaunchOutcome::kDone));
  CHECK(!world.readable());
  world.launcher->close(*other);
}

// All operations at once, from several threads, at random.
void at_random(unsigned seed) {
  std::mt19937 random(seed);
  World world(std::chrono::microseconds(random() % 3 * 20));
  std::vector<std::shared_ptr<CommLine>> lines;
  const auto comms = world.device.comms(2);
  for (FakeComm* comm : comms) lines.push_back(world.line(comm));
  FakeStream* reader = world.device.stream();
  std::vector<float> data(400, 1.0f);
  const unsigned ends_at = random() % 100, how = random() % 3, reads_every = 1 + random() % 7;
  std::thread giver([&] {
    while (world.launcher->mark(world.caller) != nullptr && world.device.count("record") < static_cast<int>(ends_at)) {
      std::this_thread::yield();
    }
    for (const auto& line : lines) {
      if (how == 0) world.launcher->cut(*line);
    }
    if (how == 1) world.launcher->cut(*world.port);
    for (const auto& line : lines) world.launcher->settle(*line, {});
    if (how != 2) world.device.abort(comms[0]);
    if (how != 2) world.device.abort(comms[1]);
  });
  std::size_t ended = 0, handed_over = 0;
  for (std::size_t op = 0; op < 100; ++op) {
    for (int rank = 0; rank < 2; ++rank, ++handed_over) {
      const auto id = world.sum(lines[rank], &data[2 * op + rank]);
      if (op % 10 == 0) world.launcher->wait_stream(*world.port, id, reader);
    }
    if (op % reads_every == 0) ended += world.taken().size();
  }
  giver.join();
  world.launcher->drain(*world.port);
  ended += world.taken().size();
  CHECK(ended == handed_over);
}

}  // namespace
}  // namespace aiocomms

#define RUN(test) (running = #test, test)

int main(int argc, char** argv) {
  using namespace aiocomms;
  RUN(ops_end_in_order_with_their_data(kNoSpin));
  RUN(ops_end_in_order_with_their_data(kLong));
  RUN(an_op_waits_for_the_callers_stream());
  RUN(copies_come_first_and_several_calls_are_a_group());
  RUN(ops_of_all_lines_are_called_in_the_order_of_the_program());
  RUN(the_callers_current_device_does_not_matter());
  RUN(a_short_op_is_looked_at_and_a_long_one_slept_on());
  RUN(streams_do_not_wait_for_each_other());
  RUN(a_call_that_is_held_delays_no_op_that_has_ended());
  RUN(the_loop_is_woken_once_for_a_batch());
  RUN(a_stream_waits_for_an_op_that_is_not_called_yet());
  RUN(an_error_is_that_of_its_op_and_ends_the_port("all_reduce", LaunchOutcome::kNccl, 6));
  RUN(an_error_is_that_of_its_op_and_ends_the_port("wait", LaunchOutcome::kCuda, 700));
  RUN(an_error_is_that_of_its_op_and_ends_the_port("query", LaunchOutcome::kCuda, 719));
  RUN(an_error_is_that_of_its_op_and_ends_the_port("create", LaunchOutcome::kCuda, 2));
  RUN(a_group_that_fails_is_ended());
  RUN(a_call_that_is_in_progress_is_no_error());
  RUN(a_full_queue_holds_nobody_who_hands_over());
  RUN(an_abort_amid_a_call());
  RUN(an_abort_while_a_thread_sleeps());
  RUN(giving_up_lets_go_of_who_waits());
  RUN(a_close_while_a_thread_sleeps_and_one_calls());
  RUN(ports_share_a_thread_and_nothing_else());
  const auto ends = std::chrono::steady_clock::now() + std::chrono::seconds(argc > 1 ? std::atoi(argv[1]) : 0);
  unsigned seed = 0;
  do RUN(at_random(seed++));
  while (seed < 10 || std::chrono::steady_clock::now() < ends);
  std::printf("%u checks, %u failures\n", checks, failures);
  return failures != 0;
}
