// What the ranks of one host tell each other about the collectives of lanes, in shared memory.
//
// Each rank writes entries, one behind the other, and every other rank reads all of them in that order, whatever it has
// called itself: so an entry keeps nobody waiting but for room, and room comes wherever somebody waits for an entry. An
// entry names its lane and carries a few bytes; how it is matched is its readers' business (engine/lanes.hpp).
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
  static constexpr std::uint64_t kCells = 128;       // entries of a rank that not all others have taken
  static constexpr std::size_t kInline = 32;         // bytes that travel in an entry itself
  static constexpr std::size_t kRoom = 64 * 1024;    // of a rank, for what does not
  static constexpr std::size_t kLargest = 4 * 1024;  // bytes of an entry; see docs/ucx.md

  enum Kind : std::uint32_t { kGives, kOrders };

  struct alignas(64) Cell {
    std::atomic<std::uint64_t> number;  // n + 1 once entry n is published
    std::uint64_t lane;
    std::uint64_t fingerprint;  // of the collective
    std::uint32_t bytes;
    Kind kind;
    std::byte data[kInline];
  };

  // An entry that its reader has not taken yet.
  struct Entry {
    const Cell* cell = nullptr;  // null: there is none
    const std::byte* data = nullptr;
  };

  static constexpr std::size_t bytes(int ranks) {  // whole pages
    return whole_pages(static_cast<std::size_t>(ranks) * part_for(ranks));
  }
  Board(int fd, std::size_t offset, int rank, int ranks);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  // Publish an entry. False: there is no room yet.
  bool write(Kind kind, std::uint64_t lane, std::uint64_t fingerprint, const void* data, std::size_t bytes);
  // The next entry of a rank, which stays where it is until it is taken.
  Entry next(int rank) {
    const Reader& reader = readers_[static_cast<std::size_t>(rank)];
    const Cell& cell = cells_of(rank)[reader.taken % kCells];
    if (cell.number.load(std::memory_order_seq_cst) != reader.taken + 1) return {};
    return {&cell, cell.bytes <= kInline ? cell.data : room_of(rank) + place(reader.room, cell.bytes) % kRoom};
  }
  void take(int rank);

 private:
  struct Reader {
    std::uint64_t taken = 0;  // entries
    std::uint64_t room = 0;   // bytes, up to the last entry's end
  };

  static constexpr std::size_t part_for(int ranks) {
    const std::size_t counters = rounded_up(static_cast<std::size_t>(ranks) * sizeof(std::uint64_t), sizeof(Cell));
    return kCells * sizeof(Cell) + kRoom + counters;
  }
  // Where an entry begins that comes behind `end`, counted without end: it lies in one piece.
  static std::uint64_t place(std::uint64_t end, std::size_t bytes) {
    return end % kRoom + bytes <= kRoom ? end : (end / kRoom + 1) * kRoom;
  }
  static std::uint64_t end_of(std::uint64_t end, std::size_t bytes) {
    return bytes <= kInline ? end : place(end, bytes) + rounded_up(bytes, sizeof(Cell));
  }
  std::byte* part_of(int rank) const { return memory_ + static_cast<std::size_t>(rank) * part_; }
  Cell* cells_of(int rank) const { return reinterpret_cast<Cell*>(part_of(rank)); }
  std::byte* room_of(int rank) const { return part_of(rank) + kCells * sizeof(Cell); }
  // Entries of each other rank that `rank` has taken.
  std::atomic<std::uint64_t>* taken_by(int rank) const {
    return reinterpret_cast<std::atomic<std::uint64_t>*>(room_of(rank) + kRoom);
  }
  void look_for_room();

  const int rank_, ranks_;
  const std::size_t part_;  // bytes of a rank's part
  std::byte* memory_;
  std::vector<Reader> readers_;  // by writer
  // As the writer: entries, the end of their bytes, and what all others have taken of both.
  std::uint64_t written_ = 0, filled_ = 0, freed_ = 0, free_room_ = 0;
  std::array<std::uint64_t, kCells> ends_{};
};

}  // namespace aiocomms
