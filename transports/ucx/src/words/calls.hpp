// The calls of one lane of a live group: native code for calls that Python has made before (see
// aiocomms/live/registers.py). All calls hold the interpreter's lock.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/tensors.hpp"
#include "bindings/uncollected.hpp"
#include "bindings/unlocked.hpp"
#include "words/rounds.hpp"

namespace aiocomms {

enum class Collective { kAllReduce, kReduceScatter, kAllGather, kAllToAll, kBroadcast, kBarrier };

// The names in Python, in the order of Collective and of Operator.
constexpr std::array kCollectives{"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier"};
constexpr std::array kOperators{"sum", "product", "min", "max", "band", "bor", "bxor", "avg", "premul_sum"};

// A tensor of a call or of its result. It is kept alive.
struct Seen {
  nanobind::object tensor;
  View view;
};
using Tensors = std::vector<Seen>;

// The bytes of the first tensors.
inline std::size_t bytes_of(const Tensors& tensors, std::size_t count) {
  std::size_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += tensors[i].view.bytes();
  return sum;
}

inline std::size_t bytes_of(const Tensors& tensors) { return bytes_of(tensors, tensors.size()); }

// The header of an earlier call, by its collective, operator, dtype and shapes.
struct KnownCall {
  Collective kind;
  nanobind::object op;
  std::vector<std::vector<std::int64_t>> shapes;
  Reduction how;
  std::string header;

  bool is(Collective other, nanobind::handle given, const Tensors& all) const {
    const auto same = [&](const std::vector<std::int64_t>& shape, const Seen& it) {
      return it.view.dtype == how.dtype && std::ranges::equal(shape, it.view.shape);
    };
    return kind == other && given.is(op) && std::ranges::equal(shapes, all, same);
  }
};

class Calls {
 public:
  // The objects of Python that the calls need.
  struct Objects {
    nanobind::object partial;  // the class of results, a named tuple
    nanobind::object like;     // returns a new tensor with the shape and dtype of a tensor
    nanobind::object unset;    // the timeout of a call that has the default
    double longest;            // the longest timeout in seconds
  };

  Calls(Words& words, const LaneMemory& lane, std::size_t most, Objects objects)
      : rounds_(words, lane), most_(most), objects_(std::move(objects)) {
    for (std::size_t i = 0; i < names_.size(); ++i) names_[i] = PyUnicode_InternFromString(kCollectives[i]);
  }

  std::uint64_t arrive(std::uint64_t number, const nanobind::bytes& header,
                       const std::vector<std::pair<std::uintptr_t, std::size_t>>& given) {
    std::vector<Rounds::Bytes> parts;
    for (const auto& [address, count] : given) parts.push_back({reinterpret_cast<const std::byte*>(address), count});
    return arrive(number, {header.c_str(), header.size()}, parts);
  }

  // The number of this rank's next round, while call() may take part in that round. 0: call() does nothing.
  void arm(std::uint64_t number) { number_ = number; }
  std::uint64_t disarm() { return std::exchange(number_, 0); }

  // Returns None if nothing was done. Returns the round's word if this rank has only arrived; then it is disarmed.
  // Otherwise it returns the result. The new tensors are made first, because that runs Python code, which may raise.
  nanobind::object call(nanobind::handle kind, nanobind::handle given, nanobind::handle op, nanobind::handle timeout) {
    if (number_ == 0 || thread_ != PyThread_get_thread_ident() || !is_plain(timeout)) return nanobind::none();
    const auto which = collective(kind);
    const std::optional<Tensors> all = which ? tensors_of(*which, given) : std::nullopt;
    const std::shared_ptr<const KnownCall> known = all ? find(*which, op, *all) : nullptr;
    if (known == nullptr || bytes_of(*all) > most_) return nanobind::none();
    const std::optional<Tensors> outputs = outputs_of(*which, *all);
    if (!outputs) return nanobind::none();
    std::array<Rounds::Bytes, Rounds::kMostRanks> parts;
    const auto bytes = [](const Seen& it) -> Rounds::Bytes {
      return {static_cast<const std::byte*>(it.view.data), it.view.bytes()};
    };
    std::ranges::transform(*all, parts.begin(), bytes);
    const std::uint64_t number = disarm();
    if (number == 0) return nanobind::none();  // The Python code has called the lane.
    const std::uint64_t word = arrive(number, known->header, std::span(parts).first(all->size()));
    if (word == 0) {
      arm(number);
      return nanobind::none();
    }
    try {
      if ((word & rounds_.lane().decided()) && !rounds_.awaited(word)) {
        nanobind::object made = result(word, *known, *all, *outputs);
        if (fill(word, *known, *all, *outputs)) {
          arm(number + 1);
          return made;
        }
      }
    } catch (const nanobind::python_error&) {  // There is no memory for the result. Python code tries again.
    } catch (const std::bad_alloc&) {
    }
    return nanobind::int_(word);
  }

  // Whether the tensor now holds the result of a decided round, at which this rank arrived by all_reduce.
  bool finish(std::uint64_t word, nanobind::handle tensor, nanobind::handle op) {
    const std::optional<Tensors> all = tensors_of(Collective::kAllReduce, tensor);
    const std::shared_ptr<const KnownCall> known = all ? find(Collective::kAllReduce, op, *all) : nullptr;
    return known != nullptr && reduce(word, *known, *all);
  }

  void know(const nanobind::dict& holders) {
    for (const auto& [rank, holder] : holders)
      rounds_.know(nanobind::cast<std::size_t>(rank), nanobind::cast<std::uint64_t>(holder));
  }

  void know_call(nanobind::handle kind, nanobind::handle given, nanobind::object op, const std::string& reduction,
                 double factor, const nanobind::bytes& header) {
    const auto which = collective(kind);
    const auto name = std::ranges::find(kOperators, reduction);
    const std::optional<Tensors> all = which ? tensors_of(*which, given) : std::nullopt;
    if (!all || name == kOperators.end() || find(*which, op, *all) != nullptr) return;
    const DType dtype = all->empty() ? DType{} : all->front().view.dtype;
    const Reduction how{static_cast<Operator>(name - kOperators.begin()), dtype, factor};
    KnownCall call{*which, std::move(op), {}, how, {header.c_str(), header.size()}};
    for (const Seen& it : *all) call.shapes.emplace_back(it.view.shape.begin(), it.view.shape.end());
    auto kept = std::make_shared<const KnownCall>(std::move(call));
    const auto same = [&](const auto& it) { return it->kind == kept->kind && it->header == kept->header; };
    if (const auto found = std::ranges::find_if(known_, same); found != known_.end()) {
      found->swap(kept);  // The operator is equal, but another object.
    } else if (known_.size() < kKnown) {
      known_.push_back(std::move(kept));
    } else {
      known_[next_++ % kKnown].swap(kept);
    }
  }

 private:
  static constexpr std::uint64_t kBegin = 2;  // the number of a lane's first round
  static constexpr std::size_t kKnown = 16;   // the most known calls
  // A copy of so few bytes takes less time than releasing and retaking the interpreter's lock.
  static constexpr std::size_t kAtOnce = 4096;

  // Whether a timeout needs no further checks.
  bool is_plain(nanobind::handle timeout) const {
    if (timeout.is(objects_.unset)) return true;
    if (!PyFloat_CheckExact(timeout.ptr()) && !PyLong_CheckExact(timeout.ptr())) return false;
    const double seconds = PyFloat_AsDouble(timeout.ptr());
    PyErr_Clear();  // The number was too large.
    return 0 < seconds && seconds <= objects_.longest;
  }

  static std::optional<Unlocked> unlocked(std::size_t bytes) {
    return bytes > kAtOnce ? std::optional<Unlocked>(std::in_place) : std::optional<Unlocked>();
  }

  std::uint64_t arrive(std::uint64_t number, std::string_view header, std::span<const Rounds::Bytes> parts) {
    std::size_t bytes = 0;
    for (const Rounds::Bytes& part : parts) bytes += part.size();
    if (bytes > most_) return 0;
    const auto free = unlocked(bytes);
    return rounds_.arrive(number, header, parts);
  }

  std::optional<Collective> collective(nanobind::handle name) const {
    const auto found = std::ranges::find(names_, name.ptr());
    if (found == names_.end()) return {};
    return static_cast<Collective>(found - names_.begin());
  }

  // Nothing: a tensor is not certainly plain, or there is not one for each rank.
  std::optional<Tensors> tensors_of(Collective kind, nanobind::handle given) const {
    Tensors all;
    if (kind == Collective::kReduceScatter || kind == Collective::kAllToAll) {
      if (!PyList_CheckExact(given.ptr()) && !PyTuple_CheckExact(given.ptr())) return {};
      PyObject** const items = PySequence_Fast_ITEMS(given.ptr());
      const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(given.ptr()));
      if (count != rounds_.lane().size) return {};
      all.reserve(count);
      for (std::size_t i = 0; i < count; ++i) all.push_back({nanobind::borrow(items[i]), {}});
    } else if (kind != Collective::kBarrier) {
      all.push_back({nanobind::borrow(given), {}});
    }
    for (Seen& it : all) {
      const std::optional<View> view = plain_view(it.tensor, kind == Collective::kAllReduce);
      if (!view) return {};
      it.view = *view;
    }
    return all;
  }

  // A caller holds what it has found, because Python code may run meanwhile and replace it.
  std::shared_ptr<const KnownCall> find(Collective kind, nanobind::handle op, const Tensors& all) const {
    const auto found = std::ranges::find_if(known_, [&](const auto& it) { return it->is(kind, op, all); });
    return found == known_.end() ? nullptr : *found;
  }

  // New tensors for the result. Nothing: a mode of torch has made another tensor.
  std::optional<Tensors> outputs_of(Collective kind, const Tensors& all) const {
    const std::size_t rank = rounds_.lane().rank, size = rounds_.lane().size;
    switch (kind) {
      case Collective::kAllReduce:
      case Collective::kBarrier:
        return Tensors{};
      case Collective::kBroadcast:
        return outputs(all[0], 1);
      case Collective::kReduceScatter:
        return outputs(all[rank], 1);
      case Collective::kAllGather:
        return outputs(all[0], size);
      case Collective::kAllToAll:
        return outputs(all[rank], size);
    }
    return {};
  }

  std::optional<Tensors> outputs(const Seen& like, std::size_t count) const {
    Tensors made;
    made.reserve(count);
    while (made.size() < count) {
      nanobind::object tensor = objects_.like(like.tensor);
      const std::optional<View> view = plain_view(tensor, false);
      if (!view || view->dtype != like.view.dtype || view->count != like.view.count) return {};
      made.push_back({std::move(tensor), *view});
    }
    return made;
  }

  // Writes the result of a decided round. False: some rank has called something else, or a later round uses the areas.
  bool fill(std::uint64_t word, const KnownCall& known, const Tensors& all, const Tensors& outputs) {
    switch (known.kind) {
      case Collective::kAllReduce:
        return reduce(word, known, all);
      case Collective::kBarrier:
        return rounds_.same(word, known.header, 0);
      case Collective::kReduceScatter:
        return scatter(word, known, all, outputs[0].view);
      case Collective::kBroadcast:
      case Collective::kAllGather:
        return copy(word, known, all, 0, outputs);
      case Collective::kAllToAll:
        return copy(word, known, all, rounds_.lane().rank, outputs);
    }
    return false;
  }

  bool reduce(std::uint64_t word, const KnownCall& known, const Tensors& all) {
    const View& data = all[0].view;
    bool done = false;
    {
      const auto free = unlocked(data.bytes());
      const std::span<std::byte> own{static_cast<std::byte*>(data.data), data.bytes()};
      done = rounds_.reduce(word, known.header, known.how, own.size(), 0, own, own.data());
    }
    if (done || data.bytes() > Rounds::kBeside) note_write(all[0].tensor);
    return done;
  }

  // Copies the tensors `part` of the contributions into the outputs, by rank. With one output: that of the lowest rank.
  bool copy(std::uint64_t word, const KnownCall& known, const Tensors& all, std::size_t part, const Tensors& outputs) {
    const std::size_t from = bytes_of(all, part), count = all[part].view.bytes();
    std::vector<Rounds::Part> parts;
    for (std::size_t rank = 0; rank < rounds_.lane().size; ++rank) {
      if (!(word >> rank & 1)) continue;
      const View& to = outputs[outputs.size() == 1 ? 0 : rank].view;
      parts.push_back({rank, static_cast<std::byte*>(to.data), from, count});
      if (outputs.size() == 1) break;
    }
    const auto free = unlocked(count * parts.size());
    return rounds_.copy(word, known.header, bytes_of(all), parts);
  }

  bool scatter(std::uint64_t word, const KnownCall& known, const Tensors& all, const View& to) {
    const std::span<std::byte> data{static_cast<std::byte*>(to.data), to.bytes()};
    const auto free = unlocked(data.size());
    const std::size_t from = bytes_of(all, rounds_.lane().rank);
    return rounds_.reduce(word, known.header, known.how, bytes_of(all), from, data, nullptr);
  }

  nanobind::object value_of(std::uint64_t word, const KnownCall& known, const Tensors& all,
                            const Tensors& outputs) const {
    if (known.kind == Collective::kAllReduce) return all[0].tensor;
    if (known.kind == Collective::kBarrier) return nanobind::none();
    if (known.kind == Collective::kBroadcast || known.kind == Collective::kReduceScatter) return outputs[0].tensor;
    nanobind::dict each;
    for (std::size_t rank = 0; rank < outputs.size(); ++rank) {
      if (word >> rank & 1) each[nanobind::int_(rank)] = outputs[rank].tensor;
    }
    return each;
  }

  nanobind::object result(std::uint64_t word, const KnownCall& known, const Tensors& all, const Tensors& outputs) {
    const Uncollected uncollected;  // A finalizer could call the lane, which is not armed now.
    const nanobind::object value = value_of(word, known, all, outputs);
    const std::uint64_t bits = rounds_.bits_of(word);
    if (bits != bits_ || !ranks_) {
      nanobind::list ranks;
      for (std::size_t rank = 0; rank < rounds_.lane().size; ++rank) {
        if (bits >> rank & 1) ranks.append(rank);
      }
      ranks_ = nanobind::tuple(ranks);
      bits_ = bits;
    }
    const nanobind::int_ number(rounds_.lane().number_of(word) - kBegin);
    auto cls = reinterpret_cast<PyTypeObject*>(objects_.partial.ptr());
    PyObject* made = cls->tp_alloc(cls, 3);
    if (made == nullptr) nanobind::raise_python_error();
    PyTuple_SET_ITEM(made, 0, Py_NewRef(value.ptr()));
    PyTuple_SET_ITEM(made, 1, Py_NewRef(ranks_.ptr()));
    PyTuple_SET_ITEM(made, 2, Py_NewRef(number.ptr()));
    return nanobind::steal(made);
  }

  Rounds rounds_;
  std::size_t most_;
  Objects objects_;
  std::uint64_t number_ = 0;
  const unsigned long thread_ = PyThread_get_thread_ident();
  std::array<PyObject*, kCollectives.size()> names_;
  std::vector<std::shared_ptr<const KnownCall>> known_;
  std::size_t next_ = 0;
  std::uint64_t bits_ = 0;  // of the last result
  nanobind::object ranks_;
};

}  // namespace aiocomms
