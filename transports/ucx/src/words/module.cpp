// The module aiocomms_words. It has words of shared memory and the rounds of live groups (see
// aiocomms/live/registers.py). It also has copies into another process's memory, which yield to that process.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>

#include "bindings/unlocked.hpp"
#include "words/calls.hpp"
#include "words/yielding_copy.hpp"

namespace nb = nanobind;

namespace aiocomms {
namespace {

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
  module.def("read_words_at", &read_words_at);
  nb::class_<YieldingCopy>(module, "YieldingCopy")
      .def(nb::init<>())
      .def("copy", &copy_parts, nb::arg("parts"))
      .def("stop", &YieldingCopy::stop);
  nb::class_<Words>(module, "Words")
      .def(nb::init<int, std::size_t>(), nb::arg("fd"), nb::arg("count"))
      .def("load", &Words::load, nb::arg("at"))
      .def("swap", &Words::swap, nb::arg("at"), nb::arg("expected"), nb::arg("desired"));
  nb::class_<Calls>(module, "LaneRounds")
      .def(
          "__init__",
          [](Calls* self, Words& words, std::size_t first, std::size_t places, std::size_t sleepers, std::size_t rank,
             std::size_t size, std::size_t most_ranks, std::uint64_t holder, std::uintptr_t areas, std::size_t stride,
             std::size_t most, nb::object partial, nb::object like, nb::object unset, double longest) {
            const LaneMemory lane{
                first, places, sleepers, rank, size, most_ranks, holder, reinterpret_cast<std::byte*>(areas), stride};
            new (self) Calls(words, lane, most, {std::move(partial), std::move(like), std::move(unset), longest});
          },
          nb::keep_alive<1, 2>(), nb::kw_only(), nb::arg("words"), nb::arg("first"), nb::arg("places"),
          nb::arg("sleepers"), nb::arg("rank"), nb::arg("size"), nb::arg("most_ranks"), nb::arg("holder"),
          nb::arg("areas"), nb::arg("stride"), nb::arg("most"), nb::arg("partial"), nb::arg("like"), nb::arg("unset"),
          nb::arg("longest"))
      .def("arm", &Calls::arm)
      .def("disarm", &Calls::disarm)
      .def("arrive", nb::overload_cast<std::uint64_t, const nb::bytes&,
                                       const std::vector<std::pair<std::uintptr_t, std::size_t>>&>(&Calls::arrive))
      .def("call", &Calls::call, nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none())
      .def("finish", &Calls::finish)
      .def("know", &Calls::know)
      .def("know_call", &Calls::know_call, nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
           nb::arg());
}
