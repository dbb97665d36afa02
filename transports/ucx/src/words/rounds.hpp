// The common case of aiocomms/live/rounds.py: the rounds of one lane of a live group. In all other cases it does
// nothing and reports so, and Python does the work.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/reduce.hpp"
#include "words/words.hpp"

namespace aiocomms {

// The words and areas of a lane, and the rank that uses them, as in aiocomms/live/registers.py.
struct LaneMemory {
  std::size_t first, places, sleepers;  // the lane's first word, the first place, and the word before the sleepers
  std::size_t rank, size, most_ranks;
  std::uint64_t holder;
  std::byte* areas;  // two for each rank
  std::size_t stride;

  std::uint64_t bit() const { return std::uint64_t{1} << rank; }
  std::uint64_t all() const { return (std::uint64_t{1} << size) - 1; }
  std::uint64_t decided() const { return std::uint64_t{1} << most_ranks; }
  std::uint64_t begun(std::uint64_t number) const { return number * 2 * decided(); }
  std::uint64_t number_of(std::uint64_t word) const { return word / (2 * decided()); }
  bool open(std::uint64_t word, std::uint64_t number) const { return number_of(word) == number && !(word & decided()); }
  std::size_t place() const { return places + rank; }
  std::size_t coming() const { return first + 1; }
  std::size_t word_of(std::uint64_t number) const { return first + 2 + number % 2; }
  std::byte* area(std::uint64_t number, std::size_t of) const { return areas + (number % 2 * size + of) * stride; }
};

class Rounds {
 public:
  using Bytes = std::span<const std::byte>;
  static constexpr std::size_t kMostRanks = 32;
  // Results up to this size are reduced outside the program's memory, which stays unchanged on failure.
  static constexpr std::size_t kBeside = 1024;

  Rounds(Words& words, const LaneMemory& lane) : words_(words), lane_(lane) {}

  // Contributes to a round, and may spin. Returns the round's word. 0: this rank has not arrived.
  std::uint64_t arrive(std::uint64_t number, std::string_view header, std::span<const Bytes> parts);
  // Whether a rank of the round sleeps until the round is decided. Other ranks with a bit there died in their sleep.
  bool awaited(std::uint64_t word) const {
    return words_.load(lane_.sleepers + lane_.word_of(lane_.number_of(word))) & bits_of(word);
  }
  // Reduces the bytes from `from` on of the contributions of a decided round, in the order of ranks. The contributions
  // have `bytes` bytes each. False: some rank has called something else, or a later round uses the areas. `out` may
  // then hold anything. own: this rank's contribution, which may be `out`. Null: it is read from the area.
  bool reduce(std::uint64_t word, std::string_view header, const Reduction& how, std::size_t bytes, std::size_t from,
              std::span<std::byte> out, const std::byte* own);
  // A copy from a rank's contribution: from its byte `from` on, `count` bytes.
  struct Part {
    std::size_t rank;
    std::byte* to;
    std::size_t from, count;
  };
  // Copies from contributions of `bytes` bytes each. False: as for reduce().
  bool copy(std::uint64_t word, std::string_view header, std::size_t bytes, std::span<const Part> parts);
  // Whether all ranks of a decided round have made the same call.
  bool same(std::uint64_t word, std::string_view header, std::size_t bytes);
  // Sets the number that identifies a rank. The headers of its contributions begin with it.
  void know(std::size_t rank, std::uint64_t holder) { holders_.at(rank) = holder; }
  std::uint64_t bits_of(std::uint64_t word) const { return word & (lane_.decided() - 1); }
  const LaneMemory& lane() const { return lane_; }

 private:
  void write(std::uint64_t number, std::string_view header, std::span<const Bytes> parts) const;
  // Returns a rank's data if it has made the same call with equally many bytes, else null.
  const std::byte* contribution(std::uint64_t number, std::size_t rank, std::string_view header,
                                std::size_t bytes) const;
  bool unchanged(std::uint64_t word) const {
    const std::uint64_t number = lane_.number_of(word);
    return lane_.number_of(words_.load(lane_.word_of(number))) == number;
  }
  // Returns the round's word, after some time even if the round is not decided. arrived: the word with this rank.
  std::uint64_t spin(std::uint64_t number, std::uint64_t arrived, std::size_t bytes) const;

  Words& words_;
  LaneMemory lane_;
  std::array<std::uint64_t, kMostRanks> holders_{};
};

}  // namespace aiocomms
