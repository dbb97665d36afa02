// Words of shared memory that processes change by compare-and-swap: the module aiocomms_words.
//
// All operations are sequentially consistent, and keep what a process writes to the rest of the memory behind or before
// them: whoever sees a word that was swapped sees what was written before, and nothing that is written afterwards is
// seen earlier (as a seqlock needs it). Nothing here waits for longer than it is told to spin, so the interpreter's
// lock is kept.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <utility>

#include "collectives/shared_memory.hpp"
#include "net/fence.hpp"
#include "net/relax.hpp"

namespace nb = nanobind;

namespace aiocomms {
namespace {

// A round of a lane, and where its words are; as aiocomms/live/registers.py has it.
struct Round {
  std::size_t lane, places;  // the first words of the lane, and of the places
  std::uint64_t number;
  std::size_t rank, size, most_ranks;
  std::uint64_t holder, spin_ns;

  std::uint64_t bit() const { return std::uint64_t{1} << rank; }
  std::uint64_t all() const { return (std::uint64_t{1} << size) - 1; }
  std::uint64_t decided() const { return std::uint64_t{1} << most_ranks; }
  std::size_t place() const { return places + rank; }
  std::size_t coming() const { return lane + 1; }
  std::size_t own() const { return lane + 2 + number % 2; }
  std::size_t other() const { return lane + 3 - number % 2; }
  bool is(std::uint64_t held, std::uint64_t which) const { return held / (2 * decided()) == which; }
  bool open(std::uint64_t held) const { return is(held, number) && !(held & decided()); }
};

class Words {
 public:
  Words(int fd, std::size_t count)
      : count_(count), bytes_(count * sizeof(Line)), lines_(static_cast<Line*>(map_shared(fd, 0, bytes_))) {}
  ~Words() { munmap(lines_, bytes_); }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  std::uint64_t load(std::size_t at) const {
    fence(std::memory_order_seq_cst);
    return line(at).load(std::memory_order_seq_cst);
  }
  // What it held.
  std::uint64_t swap(std::size_t at, std::uint64_t expected, std::uint64_t desired) {
    line(at).compare_exchange_strong(expected, desired, std::memory_order_seq_cst);
    fence(std::memory_order_seq_cst);
    return expected;
  }

  // Takes part in a round of a live group as aiocomms/live/rounds.py does, where all is as it nearly always is: this
  // rank was in the round before, which is decided, and comes early enough. Returns the word of the round: decided,
  // perhaps after some spinning, or not yet; 0: this rank has not arrived, and Python does all.
  std::uint64_t take_part(const Round& it, std::uintptr_t area, const nb::bytes& header, const nb::list& parts) {
    const std::uint64_t before = load(it.other());
    if (load(it.place()) != it.holder || !it.is(before, it.number - 1) || !(before & it.decided()) ||
        !(before & it.bit())) {
      return 0;
    }
    std::uint64_t held = load(it.own());
    if (it.is(held, it.number - 2)) {
      swap(it.own(), held, it.number * 2 * it.decided());
      held = load(it.own());
    }
    if (!it.open(held)) return 0;
    write(area, header, parts);
    for (std::uint64_t found = 0; it.open(held); held = found) {
      std::uint64_t wanted = held | it.bit();
      if (!((before | load(it.coming())) & ~wanted & it.all())) wanted |= it.decided();
      found = swap(it.own(), held, wanted);
      if (found == held) return wanted & it.decided() ? wanted : spin(it, wanted);
    }
    return 0;
  }

 private:
  // An area begins with the lengths of the header and of the data, which stands behind kHead bytes.
  static constexpr std::size_t kHead = 4096;
  struct Lengths {
    std::uint64_t header, data;
  };

  static void write(std::uintptr_t area, const nb::bytes& header, const nb::list& parts) {
    std::byte* const begin = reinterpret_cast<std::byte*>(area);
    std::byte* to = begin + kHead;
    for (nb::handle part : parts) {
      const auto [from, bytes] = nb::cast<std::pair<std::uintptr_t, std::size_t>>(part);
      std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
      to += bytes;
    }
    const Lengths lengths{header.size(), static_cast<std::uint64_t>(to - begin - kHead)};
    std::memcpy(begin, &lengths, sizeof lengths);
    std::memcpy(begin + sizeof lengths, header.c_str(), header.size());
  }

  std::uint64_t spin(const Round& it, std::uint64_t held) const {
    const auto ends = std::chrono::steady_clock::now() + std::chrono::nanoseconds(it.spin_ns);
    while (it.open(held) && std::chrono::steady_clock::now() < ends) {
      for (int i = 0; i < 16 && it.open(held = load(it.own())); ++i) relax();
    }
    return held;
  }

  // On a cache line of its own: ranks poll some while others change.
  struct alignas(64) Line {
    std::atomic<std::uint64_t> word;
  };

  std::atomic<std::uint64_t>& line(std::size_t at) const {
    if (at >= count_) throw nb::index_error("there is no such word");
    return lines_[at].word;
  }

  std::size_t count_;
  std::size_t bytes_;
  Line* lines_;
};

}  // namespace
}  // namespace aiocomms

NB_MODULE(aiocomms_words, module) {
  using aiocomms::Words;
  module.attr("__version__") = AIOCOMMS_VERSION;
  module.attr("LINE") = 64;
  nb::class_<Words>(module, "Words")
      .def(nb::init<int, std::size_t>(), nb::arg("fd"), nb::arg("count"))
      .def("load", &Words::load, nb::arg("at"))
      .def("swap", &Words::swap, nb::arg("at"), nb::arg("expected"), nb::arg("desired"))
      .def("take_part", [](Words& words, std::size_t lane, std::size_t places, std::uint64_t number, std::size_t rank,
                           std::size_t size, std::size_t most_ranks, std::uint64_t holder, std::uint64_t spin_ns,
                           std::uintptr_t area, const nb::bytes& header, const nb::list& parts) {
        return words.take_part({lane, places, number, rank, size, most_ranks, holder, spin_ns}, area, header, parts);
      });
}
