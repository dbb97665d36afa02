#include "collectives/board.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace aiocomms {

Board::Board(int fd, std::size_t offset, int rank, int ranks)
    : rank_(rank), ranks_(ranks), part_(part_for(ranks)), readers_(static_cast<std::size_t>(ranks)) {
  memory_ = static_cast<std::byte*>(map_shared(fd, offset, bytes(ranks)));
}

Board::~Board() { munmap(memory_, bytes(ranks_)); }

void Board::look_for_room() {
  std::uint64_t taken = written_;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != rank_) taken = std::min(taken, taken_by(rank)[rank_].load(std::memory_order_seq_cst));
  }
  if (taken == freed_) return;
  freed_ = taken;
  free_room_ = ends_[(taken - 1) % kCells];
}

bool Board::write(Kind kind, std::uint64_t lane, std::uint64_t fingerprint, const void* data, std::size_t bytes) {
  const std::uint64_t end = end_of(filled_, bytes);
  const auto fits = [&] { return written_ - freed_ < kCells && end - free_room_ <= kRoom; };
  if (!fits()) {
    look_for_room();
    if (!fits()) return false;
  }
  Cell& cell = cells_of(rank_)[written_ % kCells];
  if (bytes) std::memcpy(bytes <= kInline ? cell.data : room_of(rank_) + place(filled_, bytes) % kRoom, data, bytes);
  cell.lane = lane;
  cell.fingerprint = fingerprint;
  cell.bytes = static_cast<std::uint32_t>(bytes);
  cell.kind = kind;
  filled_ = ends_[written_ % kCells] = end;
  cell.number.store(++written_, std::memory_order_seq_cst);
  return true;
}

void Board::take(int rank) {
  Reader& reader = readers_[static_cast<std::size_t>(rank)];
  reader.room = end_of(reader.room, cells_of(rank)[reader.taken % kCells].bytes);
  taken_by(rank_)[rank].store(++reader.taken, std::memory_order_seq_cst);
}

}  // namespace aiocomms
