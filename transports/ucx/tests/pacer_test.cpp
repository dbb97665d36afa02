// The pacer, with a clock that the test sets.
#include "engine/pacer.hpp"

#include <thread>
#include <vector>

#include "engine/priority_lock.hpp"
#include "parts.hpp"

namespace aiocomms {
namespace {

using Next = Pacer::Next;
using Rest = Pacer::Rest;
constexpr std::uint64_t kStart = 1'000'000'000;

// No rank that a post waits for has this core, or one has it.
constexpr auto kFree = [] { return false; };
constexpr auto kWanted = [] { return true; };

// A post that spins without progress from `began` on. Returns how long it spins.
std::uint64_t spin_in_vain(Pacer& pacer, std::uint64_t began, bool crowded = false) {
  Pacer::Spin spin = pacer.begin_post(began, crowded);
  std::uint64_t now = began;
  while (pacer.after_look(spin, false, now, kFree) != Next::kStop) now += 100;
  pacer.end_post(spin, false);
  return now - began;
}

// How long a loop that returns at once polls without progress after its first kTurns, until it parks.
std::uint64_t polls_for(Pacer& pacer, bool pending) {
  for (int turn = 1; turn < Pacer::kTurns; ++turn) pacer.end_visit(false, false, pending, kStart);
  std::uint64_t now = kStart;
  while (pacer.end_visit(false, false, pending, now) != Pacer::Visit::kParks) {
    now += Pacer::kSaving;
  }
  return now - kStart;
}

// Successive posts without progress spin less and less, down to `least`.
void spins_ever_less(Pacer& pacer, std::uint64_t most, std::uint64_t least, bool crowded = false) {
  std::uint64_t now = kStart;
  for (std::uint64_t budget = most; budget > least; budget /= 2) {
    const std::uint64_t spun = spin_in_vain(pacer, now, crowded);
    CHECK(spun >= budget && spun < budget + 100);
    now += spun;
  }
  CHECK(pacer.spin_budget() == least);
}

void pacer_spins() {
  Pacer pacer;
  pacer.configure(true);
  spins_ever_less(pacer, Pacer::kSpin, 0);
  pacer.end_post(pacer.begin_post(kStart, false), true);  // an op that is done within its post
  CHECK(pacer.spin_budget() == Pacer::kSpin);
  CHECK(!pacer.bulk());
}

// One stall does not make every later op park.
void pacer_spins_again() {
  Pacer pacer;
  pacer.configure(true);
  spins_ever_less(pacer, Pacer::kSpin, 0);
  pacer.note_outcome(kStart, kStart + Pacer::kWorth * Pacer::kSpin);  // its peer took long
  CHECK(pacer.spin_budget() == 0);
  pacer.note_outcome(kStart, kStart + Pacer::kWorth * Pacer::kSpin - 1);
  CHECK(pacer.spin_budget() == Pacer::kSpin);
  // If no op ends soon, a post still tries rarely, at a cost below 1 % of a core.
  spins_ever_less(pacer, Pacer::kSpin, 0);
  const std::uint64_t stalled = kStart + 10'000'000'000;
  CHECK(spin_in_vain(pacer, stalled) == Pacer::kSpin);
  const std::uint64_t next = stalled + Pacer::kSpin + Pacer::kProbes * Pacer::kSpin;
  CHECK(spin_in_vain(pacer, next - 1) == 0);
  CHECK(spin_in_vain(pacer, next) == Pacer::kSpin);  // even after many posts meanwhile
}

void pacer_gives_the_core_to_who_is_waited_for() {
  Pacer pacer;
  pacer.configure(true);
  Pacer::Spin spin = pacer.begin_post(kStart, false);
  CHECK(pacer.after_look(spin, true, kStart, kWanted) == Next::kLook);
  CHECK(pacer.after_look(spin, false, kStart, kFree) == Next::kRelax);
  CHECK(pacer.after_look(spin, false, kStart, kWanted) == Next::kYield);
  CHECK(pacer.after_look(spin, false, kStart + Pacer::kSpin, kWanted) == Next::kStop);
}

void pacer_waits_as_long_as_it_has_worked() {
  Pacer pacer;
  pacer.configure(true);
  Pacer::Spin spin = pacer.begin_post(kStart, false);
  CHECK(pacer.after_look(spin, true, kStart + 150'000, kFree) == Next::kLook);
  CHECK(pacer.after_look(spin, false, kStart + 160'000, kFree) == Next::kRelax);
  CHECK(pacer.after_look(spin, false, kStart + 319'999, kFree) == Next::kRelax);
  CHECK(pacer.after_look(spin, false, kStart + 320'000, kFree) == Next::kStop);
  // The wait never exceeds the slice.
  spin = pacer.begin_post(kStart, false);
  CHECK(pacer.after_look(spin, true, kStart + Pacer::kSlice - 2, kFree) == Next::kLook);
  CHECK(pacer.after_look(spin, false, kStart + Pacer::kSlice - 1, kFree) == Next::kRelax);
  CHECK(pacer.after_look(spin, false, kStart + Pacer::kSlice, kFree) == Next::kStop);
}

// Other threads wait for one look of a post beside the loop, not for the whole post.
void pacer_looks_on_beside_the_loop() {
  for (bool crowded : {false, true}) {
    Pacer pacer;
    pacer.configure(true);
    const std::uint64_t slice = crowded ? Pacer::kCrowdedSlice : Pacer::kSlice;
    pacer.begin_post(kStart - slice, crowded);
    Pacer::Spin spin = pacer.begin_post_elsewhere(kStart, crowded);
    CHECK(pacer.slice_ends() == kStart);
    for (std::uint64_t now = kStart; now < kStart + slice; now += Pacer::kLookSlice) {
      pacer.begin_look_elsewhere(now);
      CHECK(pacer.slice_ends() == now + Pacer::kLookSlice);
      CHECK(pacer.after_look(spin, true, pacer.slice_ends() - 1, kFree) == Next::kLook);
    }
    CHECK(pacer.after_look(spin, true, kStart + slice, kFree) == Next::kStop);
  }
}

void pacer_in_a_crowd() {
  Pacer pacer;
  pacer.configure(true);
  Pacer::Spin spin = pacer.begin_post(kStart, true);
  CHECK(pacer.after_look(spin, false, kStart, kFree) == Next::kYield);
  CHECK(pacer.may_block(spin, false, true) == 0);  // it yields first
  spin.now += Pacer::kYields - 1;
  CHECK(pacer.may_block(spin, true, true) == 0);
  spin.now += 1;
  CHECK(pacer.may_block(spin, true, true) == Pacer::kCrowdedSpin - Pacer::kYields);
  CHECK(pacer.may_block(spin, false, true) == 0);  // no longer than another engine's work may wait
  pacer.note_yield();
  CHECK(pacer.slice_ends() == kStart + Pacer::kCrowdedSlice);
  spins_ever_less(pacer, Pacer::kCrowdedSpin, Pacer::kLeastCrowdedSpin, true);
  CHECK(pacer.end_visit(false, false, true, kStart) == Pacer::Visit::kYields);
  CHECK(pacer.end_visit(false, true, true, kStart) == Pacer::Visit::kDone);
  for (int op = 0; op < 10'000; ++op) pacer.note_done_at_once(true);
  CHECK(polls_for(pacer, true) == 0);  // other ranks want the core
  Pacer shared;                        // with another rank in this process
  shared.configure(false);
  CHECK(spin_in_vain(shared, kStart) == 0);
  for (int op = 0; op < 10'000; ++op) shared.note_done_at_once(false);
  CHECK(polls_for(shared, true) == 0);
}

// A communicator with few of a host's ranks spins as if there were no others, and adapts separately.
void pacer_of_a_part_of_a_crowd() {
  Pacer pacer;
  pacer.configure(true);
  spins_ever_less(pacer, Pacer::kCrowdedSpin, Pacer::kLeastCrowdedSpin, true);
  Pacer::Spin spin = pacer.begin_post(kStart, false);
  CHECK(pacer.spin_budget() == Pacer::kSpin);
  CHECK(pacer.after_look(spin, false, kStart, kFree) == Next::kRelax);
  CHECK(pacer.slice_ends() == kStart + Pacer::kSlice);
  spins_ever_less(pacer, Pacer::kSpin, 0);
  pacer.begin_post(kStart, true);
  CHECK(pacer.spin_budget() == Pacer::kLeastCrowdedSpin);
}

void pacer_hands_over() {
  Pacer pacer;
  pacer.configure(true);
  Pacer::Spin spin = pacer.begin_post(kStart, false);
  CHECK(pacer.after_look(spin, true, kStart + Pacer::kSlice, kFree) == Next::kStop);
  pacer.end_post(spin, false);  // there is still progress, so it is bulk work
  CHECK(pacer.bulk() && pacer.thread_is_late(true));
  CHECK(pacer.spin_budget() == Pacer::kSpin);
  CHECK(!pacer.loop_is_about(kStart));  // the thread works, whatever the loop does
  pacer.begin_turn(kStart);
  CHECK(pacer.end_turn(true, false, kStart, kStart).kind == Rest::kNone);
  CHECK(pacer.bulk());
  CHECK(pacer.end_turn(true, true, kStart, kStart).kind == Rest::kNone);
  CHECK(!pacer.bulk());  // the next post is the loop's again
  pacer.hand_over();
  CHECK(pacer.bulk());
}

// Copies of successive posts are passed to the thread after they have taken a slice.
void pacer_hands_over_copies() {
  Pacer pacer;
  pacer.configure(true);
  std::uint64_t now = kStart;
  for (int post = 0; post < 4; ++post, now += Pacer::kSlice / 4) {
    CHECK(!pacer.has_copied_enough(now));
    pacer.note_copy(now, now + Pacer::kSlice / 4);
  }
  CHECK(pacer.has_copied_enough(now) && pacer.has_copied_enough(now + Pacer::kApart));
  CHECK(!pacer.has_copied_enough(now + Pacer::kApart + 1));  // the loop has had a turn
}

void pacer_parks_the_loop() {
  Pacer pacer;
  pacer.configure(true);
  pacer.loop_comes(kStart);
  auto visit = [&](bool ready, bool moved) { return pacer.end_visit(ready, moved, true, kStart); };
  for (int turn = 1; turn < Pacer::kTurns; ++turn) CHECK(visit(false, false) == Pacer::Visit::kDone);
  CHECK(visit(true, false) == Pacer::Visit::kDone);  // this restarts the count
  for (int turn = 1; turn < Pacer::kTurns; ++turn) CHECK(visit(false, true) == Pacer::Visit::kDone);
  CHECK(pacer.loop_is_about(kStart) && !pacer.parks());
  CHECK(visit(false, false) == Pacer::Visit::kParks);
  CHECK(!pacer.loop_is_about(kStart) && pacer.parks());
}

// The loop polls through one stall among ops that end within their posts, but not through several in a row.
void pacer_polls_for_as_long_as_it_has_saved() {
  Pacer pacer;
  pacer.configure(true);
  CHECK(polls_for(pacer, true) == 0);
  for (int op = 0; op < 100; ++op) pacer.note_done_at_once(false);
  CHECK(polls_for(pacer, false) == 0);  // nothing is pending, so nothing is spent
  CHECK(polls_for(pacer, true) == 100 * Pacer::kSaving);
  CHECK(polls_for(pacer, true) == 0);
  for (int op = 0; op < 10'000; ++op) pacer.note_done_at_once(false);
  CHECK(polls_for(pacer, true) == Pacer::kMostSaved);
  // A wait that ends in time, or that another post interrupts, also costs saved time.
  for (bool by_post : {false, true}) {
    for (int op = 0; op < 100; ++op) pacer.note_done_at_once(false);
    std::uint64_t now = kStart;
    for (int turn = 1; turn < Pacer::kTurns; ++turn) pacer.end_visit(false, false, true, now);
    for (int turn = 0; turn <= 40; ++turn, now += Pacer::kSaving) {
      CHECK(pacer.end_visit(false, false, true, now) == Pacer::Visit::kDone);
    }
    if (by_post) {
      pacer.begin_post(now, false);
    } else {
      CHECK(pacer.end_visit(true, true, true, now) == Pacer::Visit::kDone);
    }
    CHECK(polls_for(pacer, true) == 60 * Pacer::kSaving);
  }
}

void pacer_blocks_no_longer_than_it_spins() {
  Pacer pacer;
  pacer.configure(true);
  Pacer::Spin spin = pacer.begin_post(kStart, false);
  CHECK(pacer.after_look(spin, false, kStart + 10, kWanted) == Next::kYield);
  CHECK(pacer.may_block(spin, true, true) == 0);  // the other rank may be on another core by now
  CHECK(pacer.after_look(spin, false, kStart + 10 + Pacer::kGrace, kWanted) == Next::kYield);
  CHECK(pacer.may_block(spin, true, true) == Pacer::kSpin - Pacer::kGrace);
  CHECK(pacer.may_block(spin, true, false) == 0);  // no rank is known to have this core
  CHECK(pacer.after_look(spin, false, kStart + 40'010, kWanted) == Next::kYield);
  CHECK(pacer.may_block(spin, true, true) == Pacer::kSpin - 40'000);
  CHECK(pacer.after_look(spin, false, kStart + 10 + Pacer::kSpin, kWanted) == Next::kStop);
  CHECK(pacer.may_block(spin, true, true) == 0);
}

void pacer_learns_whether_yields_have_an_effect() {
  Pacer pacer;
  pacer.configure(true);
  Pacer::Spin spin = pacer.begin_post(kStart, true);
  spin.idle_since = kStart;
  std::uint64_t waited = Pacer::kYields;
  for (std::uint32_t block = 1; block < Pacer::kProbedBlocks; ++block, waited /= 2) {
    if (waited > 0) {
      spin.now = kStart + waited - 1;
      CHECK(pacer.may_block(spin, true, true) == 0);
    }
    spin.now = kStart + waited;
    CHECK(pacer.may_block(spin, true, true) == Pacer::kCrowdedSpin - waited);
  }
  CHECK(pacer.may_block(spin, true, true) > 0);
  CHECK(pacer.may_block(spin, true, true) == 0);  // it tries again
  spin.now = kStart + Pacer::kYields;
  CHECK(pacer.may_block(spin, true, true) > 0);
  spin.now = kStart + Pacer::kYields / 2;
  CHECK(pacer.may_block(spin, true, true) > 0);
  pacer.note_yield();  // the core went to another thread
  CHECK(pacer.may_block(spin, true, true) == 0);
}

void pacer_ticks_lingers_dozes_and_sleeps() {
  Pacer pacer;
  pacer.configure(true);
  pacer.loop_comes(kStart);
  CHECK(pacer.loop_is_about(kStart + Pacer::kLoopAway - 1));
  CHECK(!pacer.loop_is_about(kStart + Pacer::kLoopAway));
  for (int ms : {2, 4, 8, 8}) CHECK(pacer.tick(false).ms == ms);
  CHECK(pacer.thread_is_late(true));  // it looks too rarely
  CHECK(pacer.tick(true).ms == Pacer::kShortestTickMs);
  CHECK(!pacer.thread_is_late(false));
  // The thread keeps polling after progress, unless every possible event would wake it.
  pacer.begin_turn(kStart);
  CHECK(pacer.end_turn(true, false, kStart, kStart + 10).kind == Rest::kNone);
  CHECK(pacer.end_turn(false, false, kStart + 9 + Pacer::kLinger, kStart).kind == Rest::kNone);
  CHECK(pacer.end_turn(false, true, kStart + 11, kStart).kind == Rest::kSleep);
  CHECK(pacer.end_turn(false, false, kStart + 10 + Pacer::kLinger, kStart).kind == Rest::kSleep);
  for (int ms : {2, 4, 8, 8}) {
    const Rest rest = pacer.fall_asleep(true);
    CHECK(rest.kind == Rest::kDoze && rest.ms == ms);
  }
  const Rest sleep = pacer.fall_asleep(false);
  CHECK(sleep.kind == Rest::kSleep && sleep.ms == -1);
  CHECK(pacer.asleep() && pacer.thread_is_late(false) && !pacer.thread_is_late(true));
  pacer.wake_thread();
  CHECK(!pacer.asleep() && !pacer.thread_is_late(false));
  CHECK(pacer.fall_asleep(true).ms == 2);
  CHECK(pacer.has_to_listen(Pacer::kListen) && !pacer.has_to_listen(Pacer::kListen - 1));
  pacer.has_listened(kStart);
  CHECK(!pacer.has_to_listen(kStart + Pacer::kListen - 1));
}

// The loop's thread and the engine's thread at once, with the engine's calls. Built with ThreadSanitizer this shows
// races.
void pacer_on_two_threads() {
  PriorityLock lock;
  Pacer pacer;
  pacer.configure(true);
  int shared = 0;
  constexpr int kRounds = 2000;
  std::thread thread([&] {
    for (int round = 0; round < kRounds; ++round) {
      {
        PriorityLock::Background held(lock);
        ++shared;
        if (pacer.loop_is_about(kStart)) {
          pacer.tick(false);
        } else {
          pacer.begin_turn(kStart);
          pacer.end_turn(round % 2, true, kStart, kStart);
        }
      }
      lock.give_way();
    }
  });
  for (int round = 0; round < kRounds; ++round) {
    if (pacer.bulk()) pacer.loop_parks();
    pacer.loop_comes(kStart);
    std::lock_guard held(lock);
    ++shared;
    spin_in_vain(pacer, kStart);
    if (round % 8 == 0) pacer.hand_over();
  }
  thread.join();
  CHECK(shared == 2 * kRounds);
  CHECK(!lock.is_wanted());
}

}  // namespace

void test_pacer() {
  pacer_spins();
  pacer_spins_again();
  pacer_gives_the_core_to_who_is_waited_for();
  pacer_waits_as_long_as_it_has_worked();
  pacer_looks_on_beside_the_loop();
  pacer_in_a_crowd();
  pacer_of_a_part_of_a_crowd();
  pacer_hands_over();
  pacer_hands_over_copies();
  pacer_parks_the_loop();
  pacer_polls_for_as_long_as_it_has_saved();
  pacer_blocks_no_longer_than_it_spins();
  pacer_learns_whether_yields_have_an_effect();
  pacer_ticks_lingers_dozes_and_sleeps();
  pacer_on_two_threads();
}

}  // namespace aiocomms
