#include "collectives/shared.hpp"

namespace aiocomms {

bool Shared::Wait::ready() {
  Segment& segment = shared_.segment;
  if (awaited_.what != Segment::Awaited::kAll) return segment.has_come(awaited_);
  for (int& rank = awaited_.rank; rank < segment.ranks(); ++rank) {
    if (!segment.published(rank, awaited_.round)) return false;
    if (segment.line(rank, awaited_.round).fingerprint != shared_.fingerprint) {
      shared_.disagrees = rank;
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
