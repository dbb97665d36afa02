// The tests' access to the internal state of a Segment.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "collectives/segment.hpp"

namespace aiocomms {

struct SegmentInside {
  // The published and read rounds of a rank: number + 1 of the round in each line, and the rounds below which it has
  // finished.
  static std::uint64_t first(Segment& segment, std::uint64_t line) {
    return segment.owners_[segment.rank_].lines[line].round.load();
  }
  static std::uint64_t second(Segment& segment, std::uint64_t line) {
    return segment.owners_[segment.rank_].second[line].round.load();
  }
  static std::uint64_t read(Segment& segment) { return segment.owners_[segment.rank_].done.round.load(); }
  // Whether no rank has woken it since it began to block.
  static bool blocks(Segment& segment) { return segment.owners_[segment.rank_].rest.is.load() == Segment::kBlocked; }
  // The other ranks' view of a rank.
  static std::string state(Segment& segment, int rank) {
    static constexpr const char* kRests[] = {"awake", "asleep", "blocked"};
    Segment::Owner& owner = segment.owners_[rank];
    std::uint64_t first = 0, second = 0;
    for (std::uint64_t line = 0; line < Segment::kDepth; ++line) {
      first = std::max(first, owner.lines[line].round.load());
      second = std::max(second, owner.second[line].round.load());
    }
    const std::uint64_t rest = owner.rest.is.load();
    return "published " + std::to_string(first) + " and " + std::to_string(second) + ", read " +
           std::to_string(owner.done.round.load()) + ", " + (rest < 3 ? kRests[rest] : "strange") + ", awaits " +
           std::to_string(owner.rest.awaits.load());
  }
};

}  // namespace aiocomms
