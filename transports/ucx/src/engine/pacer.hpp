// Decides which thread makes progress, and when. It decides how long a post spins, and when the loop passes the work to
// the engine's thread. It also decides whether that thread spins, yields, ticks, dozes or sleeps.
//
// The pacer makes no system call, takes no lock and reads no clock. Every time is an argument, in nanoseconds of one
// clock. All methods run under the engine's lock, except those marked "any thread".
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace aiocomms {

class Pacer {
 public:
  // A post without progress spins for this long before it returns. It is about the cost of parking and waking a thread
  // when other threads want the cores. No user of an event loop notices it.
  static constexpr std::uint64_t kSpin = 100'000;
  // With more ranks than cores, the peers first need the core, one after the other.
  static constexpr std::uint64_t kCrowdedSpin = 1'000'000;
  static constexpr std::uint64_t kLeastCrowdedSpin = 50'000;
  // An op is worth spinning for if it ends within this multiple of its post's spin. Most of its time is then the cost
  // of parking.
  static constexpr std::uint64_t kWorth = 4;
  // A peer on its own core answers within this time. The record of its core may be out of date, and a wake-up across
  // cores takes 35 µs.
  static constexpr std::uint64_t kGrace = 5'000;
  // A post in a crowded communicator yields for this long before it blocks. On Linux 6.18 a thread of another
  // scheduling group gets the core at one of the first tries. On other kernels it never does, so each block halves this
  // time. Every kProbedBlocks blocks the full time is tried again.
  static constexpr std::uint64_t kYields = 100'000;
  static constexpr std::uint32_t kProbedBlocks = 64;
  // Even if spinning rarely succeeds, a post spins for its full budget once in this many budgets. The waste stays below
  // 1 % of a core.
  static constexpr std::uint64_t kProbes = 100;
  // A post may work on a large collective for this long. Then the thread continues.
  static constexpr std::uint64_t kSlice = 400'000;
  // The same if ranks outnumber cores. The other ranks use most of that time.
  static constexpr std::uint64_t kCrowdedSlice = 2'000'000;
  // The longest look of a thread that posts beside the loop, because the loop may wait for the lock.
  static constexpr std::uint64_t kLookSlice = 20'000;
  // The loop has had a turn between posts with at least this gap.
  static constexpr std::uint64_t kApart = 50'000;
  // A loop that has not come for this long counts as busy or parked.
  static constexpr std::uint64_t kLoopAway = 500'000;
  // How often the thread checks whether the loop has stopped polling. With nothing pending the interval doubles. A
  // thousand checks a second would disturb ranks that share a core, and make the scheduler migrate them.
  static constexpr int kShortestTickMs = 1;
  static constexpr int kLongestTickMs = 8;
  // The thread reads the control connections at least this often, at any load.
  static constexpr std::uint64_t kListen = 10'000'000;
  static constexpr int kLongestDozeMs = 8;
  // The thread keeps polling for this long before it sleeps during a collective, because the peers are about to answer.
  static constexpr std::uint64_t kLinger = 50'000;
  // The loop polls for this many turns without progress before it parks.
  static constexpr int kTurns = 16;
  // The loop polls longer for a pending op if ops usually complete within their posts. Its peer then lacks a core and
  // comes soon. Ranks that park and wake each other end up on one core. Each op that completes within its post saves
  // this much time for polling. So the ranks lose no more than about what they gain.
  static constexpr std::uint64_t kSaving = 10'000;
  // Two ticks of the scheduler.
  static constexpr std::uint64_t kMostSaved = 8'000'000;
  // More turns than a loop makes in that time.
  static constexpr int kMostTurns = 4096;

  // alone: this process has no other rank. Otherwise a post does not spin, because another rank of this process may
  // wait for this thread.
  void configure(bool alone) {
    patience_[0] = {alone ? kSpin : 0, alone ? kSpin : 0, 0};
    patience_[1] = {alone ? kCrowdedSpin : 0, alone ? kCrowdedSpin : 0, alone ? kLeastCrowdedSpin : 0};
  }

  // Any thread. Some operation takes too long for the loop, so the thread works on it.
  bool bulk() const { return bulk_; }
  // Any thread. The loop may park, and the thread makes progress.
  bool parks() const { return bulk_ || loop_seen_.load(std::memory_order_relaxed) == 0; }
  // The time when a thread that makes progress gives others their turn. The result refers to a member.
  const std::uint64_t& slice_ends() const { return slice_ends_; }
  bool slice_is_over(std::uint64_t now) const { return now >= slice_ends_; }
  std::uint64_t spin_budget() const { return patience().now; }

  // Successive posts that copy may not hold the loop longer than one post may. The thread then continues.
  bool has_copied_enough(std::uint64_t now) {
    if (now - copied_last_ > kApart) copied_ = 0;
    return copied_ >= kSlice;
  }
  void note_copy(std::uint64_t began, std::uint64_t now) {
    copied_ += now - began;
    copied_last_ = now;
  }

  // ------------------------------------------------------------------------------------------------------------ a post

  // A post that spins until its op is done. crowded: this host has fewer cores than ranks of the communicator.
  struct Spin {
    bool crowded;
    std::uint64_t began;
    std::uint64_t budget;          // the longest spin without progress
    std::uint64_t ends;            // the end of its longest work
    std::uint64_t now = began;     // the last reading of the clock
    std::uint64_t idle_since = 0;  // 0: there has been progress since
  };
  enum class Next { kLook, kRelax, kYield, kStop };

  Spin begin_post(std::uint64_t now, bool crowded) {
    crowded_ = crowded;
    loop_seen_.store(now, std::memory_order_relaxed);
    turns_in_vain_ = 0;
    const Spin spin = begin_post_elsewhere(now, crowded);
    slice_ends_ = spin.ends;
    return spin;
  }
  // The same for another thread than the loop's. Such a post says nothing about whether the loop is active. Other
  // threads use the engine between its looks, so each look has its own slice.
  Spin begin_post_elsewhere(std::uint64_t now, bool crowded) const {
    const Patience& of = patience_[crowded];
    const std::uint64_t budget = now - of.in_vain >= kProbes * of.most ? of.most : of.now;
    return {crowded, now, budget, now + (crowded ? kCrowdedSlice : kSlice)};
  }
  void begin_look_elsewhere(std::uint64_t now) { slice_ends_ = now + kLookSlice; }

  // The next step of a post after a look with or without progress. wanted: bool (), called without progress: whether a
  // rank that this post may wait for has this core. If so, the post yields at once, because that rank cannot continue
  // without the core. It does not yield to a foreign program, which would keep the core until the scheduler's next
  // tick.
  template <typename Wanted>
  Next after_look(Spin& spin, bool moved, std::uint64_t now, const Wanted& wanted) const {
    spin.now = now;
    if (moved) {
      spin.idle_since = 0;
      return now >= spin.ends ? Next::kStop : Next::kLook;
    }
    if (spin.idle_since == 0) spin.idle_since = now;
    // It may wait for as long as it has worked, because its peers have as much to copy. (Karlin, Li, Manasse, Owicki:
    // "Empirical Studies of Competitive Spinning for a Shared-Memory Multiprocessor", SOSP 1991.)
    const std::uint64_t budget = std::max(spin.budget, spin.idle_since - spin.began);
    if (now - spin.idle_since >= budget || now >= spin.ends) return Next::kStop;
    return spin.crowded || wanted() ? Next::kYield : Next::kRelax;
  }

  // A yield has given the core to another thread.
  void note_yield() { yields_ = kYields; }
  // How long a post may block after it has yielded without effect. 0: not yet. sole: all that it waits for wakes it,
  // and no peer needs this rank meanwhile. wanted: a rank that it may wait for has this core. If no rank is known to
  // have it, this post keeps the core longer.
  std::uint64_t may_block(const Spin& spin, bool sole, bool wanted) {
    const std::uint64_t idle = spin.now - spin.idle_since;
    if (idle < (!wanted ? kYields : spin.crowded ? yields_ : kGrace)) return 0;
    if (spin.crowded && wanted) yields_ = ++blocks_ % kProbedBlocks == 0 ? kYields : yields_ / 2;
    const std::uint64_t budget = sole ? spin.budget : std::min(spin.budget, kSpin);
    const std::uint64_t ends = std::min(spin.idle_since + budget, spin.ends);
    return ends - std::min(ends, spin.now);
  }

  void end_post(const Spin& spin, bool done) {
    Patience& of = patience_[spin.crowded];
    if (done) {
      of.now = of.most;
    } else if (spin.idle_since == 0) {
      bulk_ = true;
    } else {
      of.now = std::max(of.now / 2, of.least);  // A spin that has failed lately probably fails again.
      if (spin.budget == of.most) of.in_vain = spin.now;
    }
  }

  // An op has completed within its post, with or without a spin. In a crowded communicator polling takes a core from a
  // peer.
  void note_done_at_once(bool crowded) {
    if (patience_[0].most > 0 && !crowded) saved_ = std::min(saved_ + kSaving, kMostSaved);
  }

  // An op has completed after its post, which began at `posted`. Without this, one stall would make every later op
  // park. Two ranks that park and wake each other take longer than either spins.
  void note_outcome(std::uint64_t posted, std::uint64_t now) {
    for (Patience& of : patience_) {
      if (now - posted < kWorth * of.most) of.now = of.most;
    }
  }

  // -------------------------------------------------------------------------------------------------- the loop's visit

  enum class Visit { kDone, kYields, kParks };

  // Any thread.
  void loop_comes(std::uint64_t now) { loop_seen_.store(now, std::memory_order_relaxed); }
  void loop_parks() { loop_seen_.store(0, std::memory_order_relaxed); }
  void begin_slice(std::uint64_t now) { slice_ends_ = now + kSlice; }
  // The work exceeds a slice. The thread continues with it.
  void hand_over() { bulk_ = true; }
  // ready: the loop has something to collect. pending: there is an op to poll for.
  Visit end_visit(bool ready, bool moved, bool pending, std::uint64_t now) {
    if (ready) {
      turns_in_vain_ = 0;
    } else if (++turns_in_vain_ >= kTurns && !polls_on(pending, now)) {
      loop_parks();
      return Visit::kParks;
    } else if (crowded_ && !moved) {
      return Visit::kYields;
    }
    return Visit::kDone;
  }

  // -------------------------------------------------------------------------------------------------- the thread's
  // turn

  struct Rest {
    enum Kind { kNone, kYield, kTick, kDoze, kSleep } kind;
    int ms = 0;  // the longest rest. -1: until an event
  };

  // Whether the loop comes often enough to make the progress itself.
  bool loop_is_about(std::uint64_t now) const {
    return !bulk_ && now - loop_seen_.load(std::memory_order_relaxed) < kLoopAway;
  }
  // The loop is active, so the thread looks later. busy: there is unfinished work.
  Rest tick(bool busy) {
    asleep_ = false;
    tick_ms_ = busy ? kShortestTickMs : std::min(2 * tick_ms_, kLongestTickMs);
    return {Rest::kTick, tick_ms_};
  }
  void begin_turn(std::uint64_t now) {
    asleep_ = false;
    tick_ms_ = kShortestTickMs;
    begin_slice(now);
  }
  // quiet: every possible event wakes a sleeping thread. kSleep: there is nothing to look at, see fall_asleep.
  Rest end_turn(bool moved, bool quiet, std::uint64_t began, std::uint64_t now) {
    if (quiet) bulk_ = false;  // The next post is the loop's again.
    if (moved) {
      doze_ms_ = 1;
      busy_until_ = now + kLinger;
      return {Rest::kNone};
    }
    if (began < busy_until_ && !quiet) return {crowded_ ? Rest::kYield : Rest::kNone};
    bulk_ = false;
    return {Rest::kSleep, -1};
  }
  // Nothing has happened since this rank announced its sleep. waits_for_room: no event announces what this rank waits
  // for, so the thread only dozes.
  Rest fall_asleep(bool waits_for_room) {
    asleep_ = true;
    if (!waits_for_room) {
      doze_ms_ = 1;
      return {Rest::kSleep, -1};
    }
    doze_ms_ = std::min(2 * doze_ms_, kLongestDozeMs);
    return {Rest::kDoze, doze_ms_};
  }

  // Whether the thread would come too late for a new post unless it is woken.
  bool thread_is_late(bool quiet) const { return bulk_ || (asleep_ && !quiet) || tick_ms_ > kShortestTickMs; }
  // Whether the thread sleeps or dozes. A thread that leaves work undone must then wake it.
  bool asleep() const { return asleep_; }
  void wake_thread() {
    asleep_ = false;
    tick_ms_ = kShortestTickMs;
  }

  // Called on the thread, without the lock.
  bool has_to_listen(std::uint64_t now) const { return now - listened_ >= kListen; }
  void has_listened(std::uint64_t now) { listened_ = now; }

 private:
  // The time since the last turn was spent without progress.
  bool polls_on(bool pending, std::uint64_t now) {
    if (turns_in_vain_ > kTurns && polled_ != 0) saved_ -= std::min(saved_, now - polled_);
    const bool on = pending && saved_ > 0;
    polled_ = on ? now : 0;
    return on;
  }

  struct Patience {
    std::uint64_t most, now, least;  // spins without progress: the maximum, the present budget, and the minimum
    std::uint64_t in_vain = 0;       // the last full spin without progress
  };
  const Patience& patience() const { return patience_[crowded_]; }

  std::uint64_t yields_ = kYields;  // how long a post yields before it blocks
  std::uint32_t blocks_ = 0;
  std::array<Patience, 2> patience_{};        // of posts in uncrowded and in crowded communicators
  bool crowded_ = false;                      // of the last post
  std::atomic<std::uint64_t> loop_seen_ = 0;  // when the loop last came
  std::atomic<bool> bulk_ = false;
  int turns_in_vain_ = 0;
  std::uint64_t polled_ = 0;  // the last of these turns, if it was beyond kTurns
  std::uint64_t saved_ = 0;   // time saved for more turns
  std::uint64_t slice_ends_ = 0;
  std::uint64_t copied_ = 0;       // how long posts have copied without a turn of the loop between them
  std::uint64_t copied_last_ = 0;  // the end of the last copy
  std::uint64_t busy_until_ = 0;   // the thread polls until then before it sleeps
  std::uint64_t listened_ = 0;     // the last reading of the control connections
  int doze_ms_ = 1;
  int tick_ms_ = 1;
  bool asleep_ = false;  // the thread waits for a descriptor
};

}  // namespace aiocomms
