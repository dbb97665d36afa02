#include "words/rounds.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "net/relax.hpp"

namespace aiocomms {
namespace {

// An area begins with the lengths of the header and of the data. The data begin after kHead bytes.
constexpr std::size_t kHead = 4096;
struct Lengths {
  std::uint64_t header, data;
};
// Bytes of a header that identify the writer.
constexpr std::size_t kHolder = 8;
// Bytes that are copied at once. From the size of the second-level cache on, glibc's other way of copying takes three
// times as long on Zen 5.
constexpr std::size_t kCopied = 256 * 1024;
// Nanoseconds for which a rank polls a round before it sleeps. It is about the cost of a wake-up, plus the time of
// copying the bytes once more.
constexpr std::size_t kSpin = 20'000;
constexpr std::size_t kBytesPerNs = 8;

}  // namespace

std::uint64_t Rounds::arrive(std::uint64_t number, std::string_view header, std::span<const Bytes> parts) {
  if (header.size() > kHead - sizeof(Lengths)) return 0;
  const std::uint64_t before = words_.load(lane_.word_of(number - 1));
  if (words_.load(lane_.place()) != lane_.holder || lane_.number_of(before) != number - 1 ||
      !(before & lane_.decided()) || !(before & lane_.bit())) {
    return 0;
  }
  const std::size_t own = lane_.word_of(number);
  std::uint64_t held = words_.load(own);
  if (lane_.number_of(held) == number - 2) {
    words_.swap(own, held, lane_.begun(number));
    held = words_.load(own);
  }
  if (!lane_.open(held, number)) return 0;
  write(number, header, parts);
  std::size_t bytes = 0;
  for (const Bytes& part : parts) bytes += part.size();
  for (std::uint64_t found = 0; lane_.open(held, number); held = found) {
    std::uint64_t wanted = held | lane_.bit();
    if (!((before | words_.load(lane_.coming())) & ~wanted & lane_.all())) wanted |= lane_.decided();
    found = words_.swap(own, held, wanted);
    if (found == held) return wanted & lane_.decided() ? wanted : spin(number, wanted, bytes);
  }
  return 0;
}

void Rounds::write(std::uint64_t number, std::string_view header, std::span<const Bytes> parts) const {
  std::byte* const begin = lane_.area(number, lane_.rank);
  Lengths lengths{header.size(), 0};
  for (const Bytes& part : parts) lengths.data += part.size();
  // The same call as two rounds before has the same header. Then its cache lines stay in the caches of all ranks.
  const auto put = [](std::byte* place, const void* from, std::size_t count) {
    if (std::memcmp(place, from, count) != 0) std::memcpy(place, from, count);
  };
  put(begin, &lengths, sizeof lengths);
  put(begin + sizeof lengths, header.data(), header.size());
  std::byte* to = begin + kHead;
  for (const Bytes& part : parts) {
    for (std::size_t done = 0; done < part.size(); done += kCopied) {
      std::memcpy(to + done, part.data() + done, std::min(kCopied, part.size() - done));
    }
    to += part.size();
  }
}

std::uint64_t Rounds::spin(std::uint64_t number, const std::uint64_t arrived, std::size_t bytes) const {
  std::uint64_t word = arrived;
  const auto ends = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kSpin + bytes / kBytesPerNs);
  while (lane_.open(word, number) && std::chrono::steady_clock::now() < ends) {
    for (int i = 0; i < 16 && lane_.open(word = words_.load(lane_.word_of(number)), number); ++i) relax();
  }
  return lane_.number_of(word) == number ? word : arrived;  // A process that was stopped may find a later round.
}

const std::byte* Rounds::contribution(std::uint64_t number, std::size_t rank, std::string_view header,
                                      std::size_t bytes) const {
  const std::byte* const begin = lane_.area(number, rank);
  Lengths lengths;
  std::memcpy(&lengths, begin, sizeof lengths);
  if (lengths.header != header.size() || lengths.data != bytes) return nullptr;
  std::uint64_t holder;
  std::memcpy(&holder, begin + sizeof lengths, kHolder);
  const bool same = holder == holders_[rank] && std::memcmp(begin + sizeof lengths + kHolder, header.data() + kHolder,
                                                            header.size() - kHolder) == 0;
  return same ? begin + kHead : nullptr;
}

bool Rounds::reduce(std::uint64_t word, std::string_view header, const Reduction& how, std::size_t bytes,
                    std::size_t from, std::span<std::byte> out, const std::byte* own) {
  std::array<const void*, kMostRanks> in;
  int count = 0;
  for (std::size_t rank = 0; rank < lane_.size; ++rank) {
    if (!(word >> rank & 1)) continue;
    const std::byte* begin = rank == lane_.rank ? own : nullptr;
    if (begin == nullptr) begin = contribution(lane_.number_of(word), rank, header, bytes);
    if (begin == nullptr) return false;
    in[static_cast<std::size_t>(count++)] = begin + from;
  }
  alignas(16) std::byte beside[kBeside];
  std::byte* const to = out.size() <= kBeside ? beside : out.data();
  aiocomms::reduce(how, to, in.data(), count, out.size() / size_of(how.dtype));
  if (!unchanged(word)) return false;
  if (to == beside && !out.empty()) std::memcpy(out.data(), to, out.size());
  return true;
}

bool Rounds::copy(std::uint64_t word, std::string_view header, std::size_t bytes, std::span<const Part> parts) {
  if (!same(word, header, bytes)) return false;
  for (const Part& part : parts) {
    const std::byte* const data = lane_.area(lane_.number_of(word), part.rank) + kHead;
    if (part.count != 0) std::memcpy(part.to, data + part.from, part.count);
  }
  return unchanged(word);
}

bool Rounds::same(std::uint64_t word, std::string_view header, std::size_t bytes) {
  for (std::size_t rank = 0; rank < lane_.size; ++rank) {
    if (word >> rank & 1 && contribution(lane_.number_of(word), rank, header, bytes) == nullptr) return false;
  }
  return unchanged(word);
}

}  // namespace aiocomms
