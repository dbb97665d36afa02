// The entries of one host's ranks about the collectives of lanes, in shared memory.
//
// Each rank writes its entries one behind the other. Every other rank reads all of them in that order, even for lanes
// that it has not called. So a writer only waits for room. A rank that waits for an entry also reads entries, which
// makes room. An entry names its lane and carries a few bytes. Its readers match it (engine/lanes.hpp).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/shared_memory.hpp"

namespace aiocomms {

class Board {
 public:
  static constexpr std::uint64_t kCells = 128;       // the most entries of a rank that some other rank has not taken
  static constexpr std::size_t kInline = 32;         // bytes inside an entry
  static constexpr std::size_t kRoom = 64 * 1024;    // bytes of a rank for larger data
  static constexpr std::size_t kLargest = 4 * 1024;  // the largest data of an entry, see docs/ucx.md

  enum Kind : std::uint32_t { kGives, kOrders };

  struct alignas(64) Cell {
    std::atomic<std::uint64_t> number;  // n + 1 once entry n is published
    std::uint64_t lane;
    std::uint64_t fingerprint;  // of the collective
    std::uint32_t bytes;
    Kind kind;
    std::byte data[kInline];
  };

  // An entry that its reader has not taken.
  struct Entry {
    const Cell* cell = nullptr;  // null: there is no entry
    const std::byte* data = nullptr;
  };

  static constexpr std::size_t bytes(int ranks) {  // whole pages
    return whole_pages(static_cast<std::size_t>(ranks) * part_for(ranks));
  }
  Board(int fd, std::size_t offset, int rank, int ranks);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  // Publishes an entry. False: there is no room yet.
  bool write(Kind kind, std::uint64_t lane, std::uint64_t fingerprint, const void* data, std::size_t bytes);
  // The next entry of a rank. It stays valid until it is taken.
  Entry next(int rank) {
    const Reader& reader = readers_[static_cast<std::size_t>(rank)];
    const Cell& cell = cells_of(rank)[reader.taken % kCells];
    if (cell.number.load(std::memory_order_seq_cst) != reader.taken + 1) return {};
    return {&cell, cell.bytes <= kInline ? cell.data : room_of(rank) + place(reader.room, cell.bytes) % kRoom};
  }
  void take(int rank);

 private:
  struct Reader {
    std::uint64_t taken = 0;  // number of entries
    std::uint64_t room = 0;   // bytes up to the end of the last entry
  };

  static constexpr std::size_t part_for(int ranks) {
    const std::size_t counters = rounded_up(static_cast<std::size_t>(ranks) * sizeof(std::uint64_t), sizeof(Cell));
    return kCells * sizeof(Cell) + kRoom + counters;
  }
  // The start of an entry behind `end`, as a count that never wraps. The entry is contiguous.
  static std::uint64_t place(std::uint64_t end, std::size_t bytes) {
    return end % kRoom + bytes <= kRoom ? end : (end / kRoom + 1) * kRoom;
  }
  static std::uint64_t end_of(std::uint64_t end, std::size_t bytes) {
    return bytes <= kInline ? end : place(end, bytes) + rounded_up(bytes, sizeof(Cell));
  }
  std::byte* part_of(int rank) const { return memory_ + static_cast<std::size_t>(rank) * part_; }
  Cell* cells_of(int rank) const { return reinterpret_cast<Cell*>(part_of(rank)); }
  std::byte* room_of(int rank) const { return part_of(rank) + kCells * sizeof(Cell); }
  // The number of entries of each other rank that `rank` has taken.
  std::atomic<std::uint64_t>* taken_by(int rank) const {
    return reinterpret_cast<std::atomic<std::uint64_t>*>(room_of(rank) + kRoom);
  }
  void look_for_room();

  const int rank_, ranks_;
  const std::size_t part_;  // bytes of one rank's part
  std::byte* memory_;
  std::vector<Reader> readers_;  // by writer
  // As the writer: its entries, the end of their bytes, and the entries and bytes that all others have taken.
  std::uint64_t written_ = 0, filled_ = 0, freed_ = 0, free_room_ = 0;
  std::array<std::uint64_t, kCells> ends_{};
};

}  // namespace aiocomms
