// The module aiocomms_words. It has words of shared memory and the rounds of live groups (see
// aiocomms/live/registers.py). It also has copies into another process's memory, which yield to that process.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "bindings/tensors.hpp"
#include "bindings/unlocked.hpp"
#include "words/rounds.hpp"
#include "words/yielding_copy.hpp"

namespace nb = nanobind;

namespace aiocomms {
namespace {

// The header of an earlier call, by its operator, dtype and shape.
struct KnownCall {
  nb::object op;
  std::vector<std::int64_t> shape;
  Reduction how;
  std::string header;

  bool is(nb::handle given, const View& data) const {
    return given.is(op) && data.dtype == how.dtype &&
           std::equal(shape.begin(), shape.end(), data.shape.begin(), data.shape.end());
  }
};

// The operators' names in Python, in the order of Operator.
constexpr std::array kOperators{"sum", "product", "min", "max", "band", "bor", "bxor", "avg", "premul_sum"};
constexpr std::uint64_t kBegin = 2;  // the number of a lane's first round
constexpr std::size_t kKnown = 16;   // the most known calls of a lane
// A copy of so few bytes takes less time than releasing and retaking the interpreter's lock.
constexpr std::size_t kAtOnce = 4096;

std::span<const std::byte> bytes_at(std::uintptr_t address, std::size_t count) {
  return {reinterpret_cast<const std::byte*>(address), count};
}

class LaneRounds {
 public:
  LaneRounds(Words& words, const LaneMemory& lane, std::size_t most, nb::object partial)
      : rounds_(words, lane), most_(most), partial_(std::move(partial)) {}

  std::uint64_t arrive(std::uint64_t number, const nb::bytes& header,
                       const std::vector<std::pair<std::uintptr_t, std::size_t>>& given) {
    std::vector<Rounds::Bytes> parts;
    std::size_t bytes = 0;
    for (const auto& [address, count] : given) {
      parts.push_back(bytes_at(address, count));
      bytes += count;
    }
    if (bytes > most_) return 0;
    const std::string_view said{header.c_str(), header.size()};
    std::optional<Unlocked> unlocked;
    if (bytes > kAtOnce) unlocked.emplace();
    return rounds_.arrive(number, said, parts);
  }

  // Returns None if nothing was done. Returns the round's word if this rank has only arrived. Otherwise it returns the
  // result.
  nb::object all_reduce(std::uint64_t number, nb::handle tensor, nb::handle op) {
    const std::optional<View> data = plain_view(tensor, true);
    const KnownCall* call = data && data->bytes() <= most_ ? find(op, *data) : nullptr;
    if (call == nullptr) return nb::none();
    const Rounds::Bytes whole{static_cast<const std::byte*>(data->data), data->bytes()};
    std::uint64_t word;
    {
      std::optional<Unlocked> unlocked;
      if (whole.size() > kAtOnce) unlocked.emplace();
      word = rounds_.arrive(number, call->header, {&whole, 1});
    }
    if (word == 0) return nb::none();
    if ((word & rounds_.lane().decided()) && !rounds_.awaited(number) && reduce(word, tensor, *call, *data)) {
      return result(word, tensor);
    }
    return nb::int_(word);
  }

  // Whether the tensor now holds the result of a decided round, at which this rank arrived by all_reduce.
  bool finish(std::uint64_t word, nb::handle tensor, nb::handle op) {
    const std::optional<View> data = plain_view(tensor, true);
    const KnownCall* call = data ? find(op, *data) : nullptr;
    return call != nullptr && reduce(word, tensor, *call, *data);
  }

  void know(const nb::dict& holders) {
    for (const auto& [rank, holder] : holders)
      rounds_.know(nb::cast<std::size_t>(rank), nb::cast<std::uint64_t>(holder));
  }

  void know_call(nb::handle tensor, nb::object op, const std::string& kind, double factor, const nb::bytes& header) {
    const auto name = std::ranges::find(kOperators, kind);
    const std::optional<View> data = plain_view(tensor, true);
    if (!data || name == kOperators.end() || find(op, *data) != nullptr) return;
    const Reduction how{static_cast<Operator>(name - kOperators.begin()), data->dtype, factor};
    KnownCall call{std::move(op), {data->shape.begin(), data->shape.end()}, how, {header.c_str(), header.size()}};
    if (known_.size() < kKnown) {
      known_.push_back(std::move(call));
    } else {
      known_[next_++ % kKnown] = std::move(call);
    }
  }

 private:
  const KnownCall* find(nb::handle op, const View& data) const {
    const auto found = std::ranges::find_if(known_, [&](const KnownCall& it) { return it.is(op, data); });
    return found == known_.end() ? nullptr : &*found;
  }

  bool reduce(std::uint64_t word, nb::handle tensor, const KnownCall& call, const View& data) {
    const std::span<std::byte> whole{static_cast<std::byte*>(data.data), data.bytes()};
    note_write(tensor);
    std::optional<Unlocked> unlocked;
    if (whole.size() > kAtOnce) unlocked.emplace();
    return rounds_.reduce(word, call.header, call.how, whole);
  }

  nb::object result(std::uint64_t word, nb::handle tensor) {
    const std::uint64_t bits = rounds_.bits_of(word);
    if (bits != bits_ || !ranks_) {
      nb::list ranks;
      for (std::size_t rank = 0; rank < rounds_.lane().size; ++rank) {
        if (bits >> rank & 1) ranks.append(rank);
      }
      ranks_ = nb::tuple(ranks);
      bits_ = bits;
    }
    const nb::int_ number(rounds_.lane().number_of(word) - kBegin);
    auto cls = reinterpret_cast<PyTypeObject*>(partial_.ptr());
    PyObject* made = cls->tp_alloc(cls, 3);
    if (made == nullptr) nb::raise_python_error();
    PyTuple_SET_ITEM(made, 0, Py_NewRef(tensor.ptr()));
    PyTuple_SET_ITEM(made, 1, Py_NewRef(ranks_.ptr()));
    PyTuple_SET_ITEM(made, 2, Py_NewRef(number.ptr()));
    return nb::steal(made);
  }

  Rounds rounds_;
  std::size_t most_;
  nb::object partial_;  // the class of results, a named tuple
  std::vector<KnownCall> known_;
  std::size_t next_ = 0;
  std::uint64_t bits_ = 0;  // of the last result
  nb::object ranks_;
};

// A part of a tensor: the addresses of its destination and source, the bytes of an element, and the dimensions.
using Part = std::tuple<std::uintptr_t, std::uintptr_t, std::size_t,
                        std::vector<std::tuple<std::size_t, std::ptrdiff_t, std::ptrdiff_t>>>;

void copy_parts(YieldingCopy& copying, const std::vector<Part>& parts) {
  const Unlocked unlocked;
  give_way([&] {
    for (const auto& [to, from, element, given] : parts) {
      std::vector<Dim> dims;
      for (const auto& [count, to_next, from_next] : given) dims.push_back({count, to_next, from_next});
      copying.copy(reinterpret_cast<std::byte*>(to), reinterpret_cast<const std::byte*>(from), std::move(dims),
                   element);
    }
  });
}

}  // namespace
}  // namespace aiocomms

NB_MODULE(aiocomms_words, module) {
  using namespace aiocomms;
  nb::set_leak_warnings(false);  // The end of the process frees all that is left.
  module.attr("__version__") = AIOCOMMS_VERSION;
  nb::class_<YieldingCopy>(module, "YieldingCopy")
      .def(nb::init<>())
      .def("copy", &copy_parts, nb::arg("parts"))
      .def("stop", &YieldingCopy::stop);
  nb::class_<Words>(module, "Words")
      .def(nb::init<int, std::size_t>(), nb::arg("fd"), nb::arg("count"))
      .def("load", &Words::load, nb::arg("at"))
      .def("swap", &Words::swap, nb::arg("at"), nb::arg("expected"), nb::arg("desired"));
  nb::class_<LaneRounds>(module, "LaneRounds")
      .def(
          "__init__",
          [](LaneRounds* self, Words& words, std::size_t first, std::size_t places, std::size_t sleepers,
             std::size_t rank, std::size_t size, std::size_t most_ranks, std::uint64_t holder, std::uintptr_t areas,
             std::size_t stride, std::size_t most, nb::object partial) {
            const LaneMemory lane{
                first, places, sleepers, rank, size, most_ranks, holder, reinterpret_cast<std::byte*>(areas), stride};
            new (self) LaneRounds(words, lane, most, std::move(partial));
          },
          nb::keep_alive<1, 2>(), nb::kw_only(), nb::arg("words"), nb::arg("first"), nb::arg("places"),
          nb::arg("sleepers"), nb::arg("rank"), nb::arg("size"), nb::arg("most_ranks"), nb::arg("holder"),
          nb::arg("areas"), nb::arg("stride"), nb::arg("most"), nb::arg("partial"))
      .def("arrive", &LaneRounds::arrive)
      .def("all_reduce", &LaneRounds::all_reduce)
      .def("finish", &LaneRounds::finish)
      .def("know", &LaneRounds::know)
      .def("know_call", &LaneRounds::know_call);
}
