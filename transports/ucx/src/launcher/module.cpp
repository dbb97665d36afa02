// The module aiocomms_launcher: the launcher's interface to Python.
//
// The rule for the interpreter's lock: a function that may wait releases it first. Other functions only take the
// launcher's lock, under which no thread waits. mark() calls CUDA with the interpreter's lock, as torch's own events
// do.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>

#include "bindings/unlocked.hpp"
#include "launcher/launcher.hpp"

namespace nb = nanobind;

namespace aiocomms {
namespace {

using Address = std::uintptr_t;
using Released = nb::call_guard<Unlocked>;
using Ended = std::tuple<std::uint64_t, int, int>;

template <typename Pointer>
Pointer to(Address address) {
  return reinterpret_cast<Pointer>(address);
}

GpuApi api_of(const nb::dict& functions) {
  GpuApi api;
  api.each([&](const char* name, auto& function) {
    function = to<std::remove_reference_t<decltype(function)>>(nb::cast<Address>(functions[name]));
  });
  return api;
}

// Each call is a tuple of the numbers of LaunchCall, in that order.
std::vector<LaunchCall> calls_of(const nb::list& given) {
  std::vector<LaunchCall> calls;
  calls.reserve(given.size());
  for (nb::handle each : given) {
    const auto call = nb::cast<nb::tuple>(each);
    if (call.size() != 7) throw nb::value_error("a call has seven numbers");
    const int what = nb::cast<int>(call[0]);
    if (what < LaunchCall::kCopy || what > LaunchCall::kRecv) throw nb::value_error("there is no such call");
    calls.push_back({static_cast<LaunchCall::What>(what), to<const void*>(nb::cast<Address>(call[1])),
                     to<void*>(nb::cast<Address>(call[2])), nb::cast<std::size_t>(call[3]), nb::cast<int>(call[4]),
                     nb::cast<int>(call[5]), nb::cast<int>(call[6])});
  }
  return calls;
}

std::vector<Ended> ended_of(std::vector<LaunchOutcome> outcomes) {
  std::vector<Ended> ended;
  ended.reserve(outcomes.size());
  for (const LaunchOutcome& outcome : outcomes) ended.emplace_back(outcome.id, outcome.kind, outcome.code);
  return ended;
}

void define_kinds(nb::module_& module) {
  module.attr("COPY") = static_cast<int>(LaunchCall::kCopy);
  module.attr("ALL_REDUCE") = static_cast<int>(LaunchCall::kAllReduce);
  module.attr("REDUCE") = static_cast<int>(LaunchCall::kReduce);
  module.attr("BROADCAST") = static_cast<int>(LaunchCall::kBroadcast);
  module.attr("ALL_GATHER") = static_cast<int>(LaunchCall::kAllGather);
  module.attr("REDUCE_SCATTER") = static_cast<int>(LaunchCall::kReduceScatter);
  module.attr("SEND") = static_cast<int>(LaunchCall::kSend);
  module.attr("RECV") = static_cast<int>(LaunchCall::kRecv);
  module.attr("DONE") = static_cast<int>(LaunchOutcome::kDone);
  module.attr("NCCL_FAILED") = static_cast<int>(LaunchOutcome::kNccl);
  module.attr("CUDA_FAILED") = static_cast<int>(LaunchOutcome::kCuda);
  module.attr("DROPPED") = static_cast<int>(LaunchOutcome::kDropped);
  module.attr("ASLEEP") = static_cast<int>(LaunchOutcome::kAsleep);
}

// A Python object's reference to a C++ object. nanobind's own conversion of a shared_ptr keeps the Python object alive.
// It would take the interpreter's lock when the last reference ends, perhaps under the launcher's lock.
template <typename T>
struct Shared {
  std::shared_ptr<T> it;
};

using SharedLauncher = Shared<Launcher>;
using SharedPort = Shared<LaunchPort>;
using SharedLine = Shared<CommLine>;
using SharedMark = Shared<PooledEvent>;

void define_hand_over(nb::class_<SharedLauncher>& launcher) {
  using My = const SharedLauncher&;
  launcher.def("open", [](My my) { return SharedPort{my.it->open()}; })
      .def(
          "add",
          [](My my, const SharedPort& port, Address stream, Address comm) {
            return SharedLine{my.it->add(port.it, to<GpuStream>(stream), to<NcclComm>(comm))};
          },
          nb::arg("port"), nb::arg("stream"), nb::arg("comm"))
      .def(
          "mark", [](My my, Address stream) { return SharedMark{my.it->mark(to<GpuStream>(stream))}; },
          nb::arg("stream"))
      .def(
          "join", [](My my, Address stream, const SharedMark& mark) { my.it->join(to<GpuStream>(stream), *mark.it); },
          nb::arg("stream"), nb::arg("mark"), Released())
      .def(
          "launch",
          [](My my, const SharedLine& line, const SharedMark& after, const nb::list& calls) {
            return my.it->launch(line.it, after.it, calls_of(calls));
          },
          nb::sig("def launch(self, line: Line, after: Mark, calls: list[tuple[int, int, int, int, int, int, int]]) -> "
                  "int"),
          nb::arg("line"), nb::arg("after"), nb::arg("calls"))
      .def(
          "wait_stream",
          [](My my, const SharedPort& port, std::uint64_t id, Address stream) {
            my.it->wait_stream(*port.it, id, to<GpuStream>(stream));
          },
          nb::arg("port"), nb::arg("id"), nb::arg("stream"), Released())
      .def(
          "take", [](My my, const SharedPort& port) { return ended_of(my.it->take(*port.it)); }, nb::arg("port"))
      .def("cuda_error", [](My my, int code) { return my.it->cuda_error(code); }, nb::arg("code"));
}

void define_ends(nb::class_<SharedLauncher>& launcher) {
  using My = const SharedLauncher&;
  launcher.def(
              "cut", [](My my, const SharedLine& line) { my.it->cut(*line.it); }, nb::arg("line"))
      .def(
          "cut_all", [](My my, const SharedPort& port) { my.it->cut(*port.it); }, nb::arg("port"))
      .def(
          "settle",
          [](My my, const SharedLine& line, double patience) {
            return my.it->settle(*line.it, Launcher::Patience(patience));
          },
          nb::arg("line"), nb::arg("patience"), Released())
      .def(
          "settle_all", [](My my, const SharedPort& port) { my.it->settle_all(*port.it); }, nb::arg("port"), Released())
      .def(
          "drain", [](My my, const SharedLine& line) { my.it->drain(*line.it); }, nb::arg("line"), Released())
      .def(
          "drain_all", [](My my, const SharedPort& port) { my.it->drain(*port.it); }, nb::arg("port"), Released())
      .def(
          "close", [](My my, const SharedPort& port) { my.it->close(*port.it); }, nb::arg("port"))
      .def(
          "end", [](My my, double patience) { my.it->end(Launcher::Patience(patience)); }, nb::arg("patience"),
          Released());
}

}  // namespace

NB_MODULE(aiocomms_launcher, module) {
  nb::set_leak_warnings(false);  // The end of the process frees all that is left.
  module.def("version", [] { return AIOCOMMS_VERSION; });
  define_kinds(module);
  nb::class_<SharedMark>(module, "Mark");
  nb::class_<SharedLine>(module, "Line");
  nb::class_<SharedPort>(module, "Port").def_prop_ro("fd", [](const SharedPort& port) { return port.it->fd; });
  nb::class_<SharedLauncher> launcher(module, "Launcher");
  define_hand_over(launcher);
  define_ends(launcher);
  module.def(
      "make",
      [](const nb::dict& functions, int device, int spin_us) {
        return SharedLauncher{
            std::make_shared<Launcher>(api_of(functions), device, std::chrono::microseconds(spin_us))};
      },
      nb::sig("def make(functions: dict[str, int], device: int, spin_us: int) -> Launcher"), nb::arg("functions"),
      nb::arg("device"), nb::arg("spin_us"));
}

}  // namespace aiocomms
