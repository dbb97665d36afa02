// What tests see of a Segment that nobody else does.
#pragma once

#include <cstdint>

#include "collectives/segment.hpp"

namespace aiocomms {

struct SegmentInside {
  // What a rank has published and read: number + 1 of the round in each line, and the rounds below which it reads none.
  static std::uint64_t first(Segment& segment, std::uint64_t line) {
    return segment.owners_[segment.rank_].lines[line].round.load();
  }
  static std::uint64_t second(Segment& segment, std::uint64_t line) {
    return segment.owners_[segment.rank_].second[line].round.load();
  }
  static std::uint64_t read(Segment& segment) { return segment.owners_[segment.rank_].done.round.load(); }
  // Whether nobody has woken it since it began to block.
  static bool blocks(Segment& segment) { return segment.owners_[segment.rank_].rest.is.load() == Segment::kBlocked; }
};

}  // namespace aiocomms
