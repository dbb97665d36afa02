// Who moves things on, and when: how long a post spins, when the loop hands over to the engine's thread, and whether
// that thread spins, yields, ticks, dozes or sleeps.
//
// The pacer decides and does nothing itself: it makes no system call, takes no lock and reads no clock. Every time is
// an argument, in nanoseconds of one clock. All methods are called under the engine's lock, but those marked "any".
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace aiocomms {

class Pacer {
 public:
  // A post spins for so long in vain before it returns: about what it costs to park and to be woken where others want
  // the cores too, and below what anybody notices on an event loop.
  static constexpr std::uint64_t kSpin = 100'000;
  // With more ranks than cores the peers have to be given the core first, one after the other.
  static constexpr std::uint64_t kCrowdedSpin = 1'000'000;
  static constexpr std::uint64_t kLeastCrowdedSpin = 50'000;
  // An op that is done within so many times the spin of its post's call would be done sooner had nobody parked: of the
  // time that it took, most is then what parking costs.
  static constexpr std::uint64_t kWorth = 4;
  // A peer that has a core of its own answers within this; where it was last seen may be out of date, and a wake across
  // cores takes 35 µs.
  static constexpr std::uint64_t kGrace = 5'000;
  // A post in a crowd yields for so long before it blocks: on Linux 6.18 a thread of another scheduling group gets the
  // core at one of the first few tries; on others never, and then this is halved each time. Every so many blocks it is
  // tried in full again.
  static constexpr std::uint64_t kYields = 100'000;
  static constexpr std::uint32_t kProbedBlocks = 64;
  // However seldom spinning has paid lately, a post spins in full again once in so many times the spin: what is spent
  // in vain stays below 1 % of a core.
  static constexpr std::uint64_t kProbes = 100;
  // A post may work on a large collective for so long; then the thread goes on with it.
  static constexpr std::uint64_t kSlice = 400'000;
  // The same where ranks outnumber cores: most of that time is then the other ranks'.
  static constexpr std::uint64_t kCrowdedSlice = 2'000'000;
  // The same of a thread that posts beside the loop, of one look at the engine: the loop may wait for it meanwhile.
  static constexpr std::uint64_t kLookSlice = 20'000;
  // Between posts that are so far apart the loop has had a turn.
  static constexpr std::uint64_t kApart = 50'000;
  // A loop that has not come for so long is taken to be busy or parked.
  static constexpr std::uint64_t kLoopAway = 500'000;
  // How often the thread looks whether the loop has gone. With nothing pending it looks ever less often: a thousand
  // times a second would get in the way of ranks that share a core, and the scheduler would move them about.
  static constexpr int kShortestTickMs = 1;
  static constexpr int kLongestTickMs = 8;
  // The thread looks at the control connections at least this often, however much it has to do.
  static constexpr std::uint64_t kListen = 10'000'000;
  static constexpr int kLongestDozeMs = 8;
  // The thread looks on for so long before it sleeps while a collective is under way: the peers are about to answer.
  static constexpr std::uint64_t kLinger = 50'000;
  // How many turns of the loop are worth polling before it parks.
  static constexpr int kTurns = 16;
  // The loop polls on for an op that is pending where ops are usually done within their posts: then its peer lacks a
  // core, and comes when it has one; but ranks that park and wake each other end up on one core. Each op that is done
  // within its post saves this much for that: what the ranks lose by it is of the order of what they gain.
  static constexpr std::uint64_t kSaving = 10'000;
  // Two ticks of the scheduler.
  static constexpr std::uint64_t kMostSaved = 8'000'000;
  // More turns of a loop than that takes.
  static constexpr int kMostTurns = 4096;

  // alone: no other rank is in this process. Otherwise a post does not spin, for a rank of this very process may wait
  // for this thread.
  void configure(bool alone) {
    patience_[0] = {alone ? kSpin : 0, alone ? kSpin : 0, 0};
    patience_[1] = {alone ? kCrowdedSpin : 0, alone ? kCrowdedSpin : 0, alone ? kLeastCrowdedSpin : 0};
  }

  // Any. Something under way takes too long for the loop: the thread works on it.
  bool bulk() const { return bulk_; }
  // Any. The loop may park: the thread moves things on.
  bool parks() const { return bulk_ || loop_seen_.load(std::memory_order_relaxed) == 0; }
  // When whoever moves things on lets others have their turn. The address is that of a member.
  const std::uint64_t& slice_ends() const { return slice_ends_; }
  bool slice_is_over(std::uint64_t now) const { return now >= slice_ends_; }
  std::uint64_t spin_budget() const { return patience().now; }

  // Posts that copy, one upon the other, hold the loop together for no longer than one of them may. The thread goes on.
  bool has_copied_enough(std::uint64_t now) {
    if (now - copied_last_ > kApart) copied_ = 0;
    return copied_ >= kSlice;
  }
  void note_copy(std::uint64_t began, std::uint64_t now) {
    copied_ += now - began;
    copied_last_ = now;
  }

  // ------------------------------------------------------------------------------------------------------------ a post

  // One post that spins until its op is done. crowded: the communicator has more ranks on this host than that has
  // cores.
  struct Spin {
    bool crowded;
    std::uint64_t began;
    std::uint64_t budget;          // that it may spin in vain
    std::uint64_t ends;            // until when it may work at most
    std::uint64_t now = began;     // when it last looked at the clock
    std::uint64_t idle_since = 0;  // 0: something has moved since
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
  // The same by another thread than the loop's: whether that one is about nobody knows from it. Others have the engine
  // between its looks, so that each of them has a slice of its own.
  Spin begin_post_elsewhere(std::uint64_t now, bool crowded) const {
    const Patience& of = patience_[crowded];
    const std::uint64_t budget = now - of.in_vain >= kProbes * of.most ? of.most : of.now;
    return {crowded, now, budget, now + (crowded ? kCrowdedSlice : kSlice)};
  }
  void begin_look_elsewhere(std::uint64_t now) { slice_ends_ = now + kLookSlice; }

  // What the post does after it has looked at everything, and something has moved or nothing has. wanted: bool (),
  // asked where nothing has: whether a rank that may be waited for has this core. If so it is given the core at once,
  // for it cannot go on without; a stranger that wants it is not, for he would keep it until the scheduler's next tick.
  template <typename Wanted>
  Next after_look(Spin& spin, bool moved, std::uint64_t now, const Wanted& wanted) const {
    spin.now = now;
    if (moved) {
      spin.idle_since = 0;
      return now >= spin.ends ? Next::kStop : Next::kLook;
    }
    if (spin.idle_since == 0) spin.idle_since = now;
    // It may wait for as long as it has worked: the peers have as much to copy. (Karlin, Li, Manasse, Owicki:
    // "Empirical Studies of Competitive Spinning for a Shared-Memory Multiprocessor", SOSP 1991.)
    const std::uint64_t budget = std::max(spin.budget, spin.idle_since - spin.began);
    if (now - spin.idle_since >= budget || now >= spin.ends) return Next::kStop;
    return spin.crowded || wanted() ? Next::kYield : Next::kRelax;
  }

  // A yield has given the core to somebody.
  void note_yield() { yields_ = kYields; }
  // For how long a post may block that has offered its core without effect; 0: not yet. sole: it waits for nothing but
  // what wakes it, and nobody needs this rank meanwhile. wanted: a rank that may be waited for has this core; where
  // none has, as far as is known, this post may as well keep it.
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
      of.now = std::max(of.now / 2, of.least);  // where spinning has been in vain lately it probably is again
      if (spin.budget == of.most) of.in_vain = spin.now;
    }
  }

  // An op is done within its post, whether that had to spin or not. In a crowd who polls takes a core from a peer.
  void note_done_at_once(bool crowded) {
    if (patience_[0].most > 0 && !crowded) saved_ = std::min(saved_ + kSaving, kMostSaved);
  }

  // An op is done whose post, of that time, has returned. Without this, one stall would have every later op park: two
  // ranks that park and wake each other take longer than any of them spins.
  void note_outcome(std::uint64_t posted, std::uint64_t now) {
    for (Patience& of : patience_) {
      if (now - posted < kWorth * of.most) of.now = of.most;
    }
  }

  // -------------------------------------------------------------------------------------------------- the loop's visit

  enum class Visit { kDone, kYields, kParks };

  // Any.
  void loop_comes(std::uint64_t now) { loop_seen_.store(now, std::memory_order_relaxed); }
  void loop_parks() { loop_seen_.store(0, std::memory_order_relaxed); }
  void begin_slice(std::uint64_t now) { slice_ends_ = now + kSlice; }
  // There is more to do than a slice holds: the thread goes on with it.
  void hand_over() { bulk_ = true; }
  // ready: there is something to tell the loop. pending: there is an op to poll for.
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
    int ms = 0;  // at most; -1: until something happens
  };

  // Whether the loop comes by so often that it moves things on itself.
  bool loop_is_about(std::uint64_t now) const {
    return !bulk_ && now - loop_seen_.load(std::memory_order_relaxed) < kLoopAway;
  }
  // The loop is about, and the thread looks again later. busy: something is under way.
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
  // quiet: a sleeping thread hears of all that can happen. kSleep: there is nothing to look at; see fall_asleep.
  Rest end_turn(bool moved, bool quiet, std::uint64_t began, std::uint64_t now) {
    if (quiet) bulk_ = false;  // the next post is the loop's again
    if (moved) {
      doze_ms_ = 1;
      busy_until_ = now + kLinger;
      return {Rest::kNone};
    }
    if (began < busy_until_ && !quiet) return {crowded_ ? Rest::kYield : Rest::kNone};
    bulk_ = false;
    return {Rest::kSleep, -1};
  }
  // Nothing has happened since it was announced that this rank sleeps. waits_for_room: nobody tells of something that
  // is waited for, so the thread only dozes.
  Rest fall_asleep(bool waits_for_room) {
    asleep_ = true;
    if (!waits_for_room) {
      doze_ms_ = 1;
      return {Rest::kSleep, -1};
    }
    doze_ms_ = std::min(2 * doze_ms_, kLongestDozeMs);
    return {Rest::kDoze, doze_ms_};
  }

  // Whether the thread, left alone, would come too late for what has just been posted.
  bool thread_is_late(bool quiet) const { return bulk_ || (asleep_ && !quiet) || tick_ms_ > kShortestTickMs; }
  // Whether the thread sleeps, or dozes: if it leaves something undone it has to be woken.
  bool asleep() const { return asleep_; }
  void wake_thread() {
    asleep_ = false;
    tick_ms_ = kShortestTickMs;
  }

  // On the thread, without the lock.
  bool has_to_listen(std::uint64_t now) const { return now - listened_ >= kListen; }
  void has_listened(std::uint64_t now) { listened_ = now; }

 private:
  // The time since the turn before has been polled in vain, and is spent.
  bool polls_on(bool pending, std::uint64_t now) {
    if (turns_in_vain_ > kTurns && polled_ != 0) saved_ -= std::min(saved_, now - polled_);
    const bool on = pending && saved_ > 0;
    polled_ = on ? now : 0;
    return on;
  }

  struct Patience {
    std::uint64_t most, now, least;  // that a post may spin in vain, that has proved worth it lately, and is at least
    std::uint64_t in_vain = 0;       // when one last spun in full, in vain
  };
  const Patience& patience() const { return patience_[crowded_]; }

  std::uint64_t yields_ = kYields;  // for how long a post yields before it blocks
  std::uint32_t blocks_ = 0;
  std::array<Patience, 2> patience_{};        // of posts in communicators that are not crowded, and in those that are
  bool crowded_ = false;                      // the last post's
  std::atomic<std::uint64_t> loop_seen_ = 0;  // when the loop last came by
  std::atomic<bool> bulk_ = false;
  int turns_in_vain_ = 0;
  std::uint64_t polled_ = 0;  // the last of them, if it was beyond kTurns
  std::uint64_t saved_ = 0;   // for more of them
  std::uint64_t slice_ends_ = 0;
  std::uint64_t copied_ = 0;       // for how long posts have copied without a turn of the loop between them
  std::uint64_t copied_last_ = 0;  // the end of that
  std::uint64_t busy_until_ = 0;   // the thread looks on that long before it sleeps
  std::uint64_t listened_ = 0;     // when it last looked at the control connections
  int doze_ms_ = 1;
  int tick_ms_ = 1;
  bool asleep_ = false;  // the thread waits for a descriptor
};

}  // namespace aiocomms
