// The rounds of one lane of a live group as aiocomms/live/rounds.py has them, where all is as it nearly always is. Of
// whatever else it says that it was not done, and Python does it.
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

// Where the words and areas of a lane are, and whose rounds these are; as aiocomms/live/registers.py has it.
struct LaneMemory {
  std::size_t first, places, sleepers;  // the lane's first word, the first place's, and the word before the sleepers'
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

  Rounds(Words& words, const LaneMemory& lane) : words_(words), lane_(lane) {}

  // Contributes to a round. Returns its word, perhaps after some spinning; 0: this rank has not arrived.
  std::uint64_t arrive(std::uint64_t number, std::string_view header, std::span<const Bytes> parts);
  // Whether somebody sleeps until the round is decided.
  bool awaited(std::uint64_t number) const { return words_.load(lane_.sleepers + lane_.word_of(number)) != 0; }
  // Reduces what the ranks of a decided round have contributed, in their order, into this rank's own contribution.
  // False: they have called something else, or a later round has the areas; then `data` may hold anything.
  bool reduce(std::uint64_t word, std::string_view header, const Reduction& how, std::span<std::byte> data);
  // From now on ranks are known by these numbers, with which the headers of their contributions begin.
  void know(std::size_t rank, std::uint64_t holder) { holders_.at(rank) = holder; }
  std::uint64_t bits_of(std::uint64_t word) const { return word & (lane_.decided() - 1); }
  const LaneMemory& lane() const { return lane_; }

 private:
  void write(std::uint64_t number, std::string_view header, std::span<const Bytes> parts) const;
  // Its data, if it is the same call with as many bytes; else null.
  const std::byte* contribution(std::uint64_t number, std::size_t rank, std::string_view header,
                                std::size_t bytes) const;
  std::uint64_t spin(std::uint64_t number, std::uint64_t word, std::size_t bytes) const;

  Words& words_;
  LaneMemory lane_;
  std::array<std::uint64_t, kMostRanks> holders_{};
};

}  // namespace aiocomms
