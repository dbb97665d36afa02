#include "collectives/shared.hpp"

namespace aiocomms {

bool Shared::Wait::ready() {
  Segment& segment = shared_.segment;
  switch (what_) {
    case kWritable:
      return segment.writable(round_);
    case kOne:
      return segment.published(rank_, round_);
    case kSecond:
      return segment.published_second(rank_, round_);
    case kTurn:
      return true;
    case kNever:
      return false;
    case kAll:
      break;
  }
  for (; rank_ < segment.ranks(); ++rank_) {
    if (!segment.published(rank_, round_)) return false;
    if (segment.line(rank_, round_).fingerprint != shared_.fingerprint) {
      shared_.disagrees = rank_;
      return false;
    }
  }
  return true;
}

std::vector<int> Shared::missing() const {
  std::vector<int> absent;
  Segment& segment = const_cast<Segment&>(this->segment);
  for (int rank = 0; rank < segment.ranks(); ++rank) {
    if (!segment.published(rank, first_)) absent.push_back(rank);
  }
  return absent;
}

}  // namespace aiocomms
