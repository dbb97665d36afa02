// The engine's interface to Python. In the engine only the files of this folder use Python. The caller keeps the
// tensors alive until the outcome.
//
// Some functions keep the interpreter's lock: `explain`, `is_plain`, `dtype_names`, `map_memory`, `number`, `address`,
// `fileno`, `notes_fileno`, `ready` and `parks`. They take no other lock, wait for nothing and do not call UCX. All
// other functions release it around their call of the engine. They use Python's objects only before and after that
// call. They read a tensor and copy bytes before it.
//
// A shortcut's post of a few bytes tries the engine's lock while it holds the interpreter's. It tries once, or on
// another thread for 10 µs. It releases the interpreter's lock before it waits for the engine's lock or for a peer
// (engine/held.hpp, engine/elsewhere.hpp). So no thread with the interpreter's lock waits long for the engine's lock.
// No thread with the engine's lock waits for the interpreter's lock, which the engine's thread never takes. A release
// may wait until another thread takes the interpreter's lock, which always succeeds.
//
// Python's threads may call the engine at the same time. The engine's own lock separates them. Python deletes an engine
// while it holds the interpreter's lock. By then the engine is closed.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "bindings/calls.hpp"
#include "bindings/kept.hpp"
#include "bindings/lanes.hpp"
#include "bindings/shortcuts.hpp"
#include "bindings/tensors.hpp"
#include "bindings/unlocked.hpp"
#include "collectives/shared_memory.hpp"
#include "engine/engine.hpp"
#include "net/speeds.hpp"

namespace nb = nanobind;

namespace aiocomms {
namespace {

constexpr int kNoDevice = -1;

using Released = nb::call_guard<Unlocked>;

bool is_list(nb::handle given) { return nb::isinstance<nb::tuple>(given) || nb::isinstance<nb::list>(given); }

Blocks blocks_of(nb::handle given, std::size_t size) {
  if (!is_list(given)) return cut(view_of(given), size);
  Blocks blocks;
  for (nb::handle tensor : given) {
    const View view = view_of(tensor);
    blocks.add(view.data, view.count, view.dtype);
  }
  return blocks;
}

// The functions read the tensors first, because that needs the GIL. The rest does not. place: an Engine or InLanes.
// number: the communicator's or the lane's. form: the number of the operation.
template <typename Place>
using Number = std::conditional_t<std::is_same_v<Place, InLanes>, std::uint64_t, std::uint32_t>;

template <typename Place>
double barrier_op(Place& place, Ticket ticket, Number<Place> number, int form, std::uint64_t detail) {
  Unlocked unlocked;
  return call_barrier(place, ticket, number, form, detail);
}

template <typename Place>
double broadcast_op(Place& place, Ticket ticket, Number<Place> number, int form, nb::handle tensor, int root) {
  const View data = view_of(tensor);
  Unlocked unlocked;
  return call_broadcast(place, ticket, number, form, data, root);
}

template <typename Place>
double all_reduce_op(Place& place, Ticket ticket, Number<Place> number, int form, nb::handle tensor, int op,
                     double factor) {
  const View data = view_of(tensor);
  const Reducing how(data.dtype, op, factor);
  Unlocked unlocked;
  return call_all_reduce(place, ticket, number, form, data, how);
}

template <typename Place>
double reduce_op(Place& place, Ticket ticket, Number<Place> number, int form, nb::handle tensor, int op, double factor,
                 int root) {
  const View data = view_of(tensor);
  const Reducing how(data.dtype, op, factor);
  Unlocked unlocked;
  return place.collective(
      ticket, number, fingerprint_of(form, how.fingerprint(), data.count, root),
      [&](auto& it, Unequal&) { return run_reduce(it, how.reduction, root, data.data, data.count); });
}

template <typename Place>
double reduce_scatter_op(Place& place, Ticket ticket, Number<Place> number, int form, std::size_t size,
                         nb::handle tensors, nb::handle output, int op, double factor) {
  const Blocks ins = blocks_of(tensors, size);
  const View out = view_of(output);
  const Reducing how(out.dtype, op, factor);
  Unlocked unlocked;
  return call_reduce_scatter(place, ticket, number, form, ins, out, how);
}

template <typename Place>
double all_gather_op(Place& place, Ticket ticket, Number<Place> number, int form, std::size_t size, nb::handle input,
                     nb::handle tensors) {
  const View in = view_of(input);
  const Blocks outs = blocks_of(tensors, size);
  Unlocked unlocked;
  return call_all_gather(place, ticket, number, form, in, outs);
}

template <typename Place>
double gather_op(Place& place, Ticket ticket, Number<Place> number, int form, nb::handle input, nb::handle tensors,
                 int root) {
  const View in = view_of(input);
  const Blocks outs = blocks_of(tensors, 1);
  Unlocked unlocked;
  return place.collective(ticket, number, fingerprint_of(form, static_cast<int>(in.dtype), in.bytes(), root),
                          [&](auto& it, Unequal&) { return run_gather(it, root, in.data, outs.data, in.bytes()); });
}

template <typename Place>
double scatter_op(Place& place, Ticket ticket, Number<Place> number, int form, nb::handle tensors, nb::handle output,
                  int root) {
  const Blocks ins = blocks_of(tensors, 1);
  const View out = view_of(output);
  Unlocked unlocked;
  return place.collective(
      ticket, number, fingerprint_of(form, static_cast<int>(out.dtype), out.bytes(), root),
      [&](auto& it, Unequal&) { return run_scatter(it, root, ins.inputs(), out.data, out.bytes()); });
}

// The blocks of one tensor have the same size on all ranks. Lists may differ, and are then checked.
template <typename Place>
double all_to_all_op(Place& place, Ticket ticket, Number<Place> number, int form, std::size_t size, nb::handle inputs,
                     nb::handle outputs) {
  const bool equal = !is_list(inputs);
  const Blocks ins = blocks_of(inputs, size), outs = blocks_of(outputs, size);
  Unlocked unlocked;
  return call_all_to_all(place, ticket, number, form, ins, outs, equal);
}

bool send_op(Engine& engine, Ticket ticket, std::uint32_t group, nb::handle tensor, int dst, int channel,
             std::int64_t tag) {
  const View data = view_of(tensor);
  Unlocked unlocked;
  return engine.send(ticket, group, data.data, data.bytes(), dst, channel, tag, static_cast<int>(data.dtype));
}

bool recv_op(Engine& engine, Ticket ticket, std::uint32_t group, nb::handle tensor, int src, int channel,
             std::int64_t tag) {
  const View data = view_of(tensor);
  Unlocked unlocked;
  return engine.recv(ticket, group, data.data, data.bytes(), src, channel, tag, static_cast<int>(data.dtype));
}

nb::object probe_op(Engine& engine, Ticket ticket, std::uint32_t group, int src, int channel, std::int64_t tag,
                    bool look_on) {
  std::optional<Engine::Found> found;
  {
    Unlocked unlocked;
    found = engine.probe(ticket, group, src, channel, tag, look_on);
  }
  return found ? nb::object(nb::make_tuple(found->bytes, found->dtype)) : nb::none();
}

nb::object take_op(Engine& engine, Ticket ticket, std::uint32_t group, nb::handle tensor, int src, int channel,
                   std::int64_t tag) {
  const View data = view_of(tensor);
  std::optional<bool> done;
  {
    Unlocked unlocked;
    done = engine.take(ticket, group, data.data, data.bytes(), src, channel, tag, static_cast<int>(data.dtype));
  }
  return done ? nb::object(nb::bool_(*done)) : nb::none();
}

template <auto put>
bool put_op(Engine& engine, Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset,
            nb::handle tensor) {
  const View data = view_of(tensor);
  Unlocked unlocked;
  return (engine.*put)(ticket, group, window, rank, offset, data.data, data.bytes(), nothing_held);
}

bool get_op(Engine& engine, Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset,
            nb::handle tensor) {
  const View data = view_of(tensor);
  Unlocked unlocked;
  return engine.get(ticket, group, window, rank, offset, data.data, data.bytes());
}

// The nonnegative numbers of a tensor, times a factor.
std::vector<std::uint64_t> numbers_of(nb::handle tensor, std::size_t factor) {
  const View view = view_of(tensor);
  if (view.bytes() != view.count * sizeof(std::uint64_t)) throw std::invalid_argument("numbers of another size");
  std::vector<std::uint64_t> numbers(view.count);
  if (view.count > 0) std::memcpy(numbers.data(), view.data, view.bytes());
  for (std::uint64_t& number : numbers) number *= factor;
  return numbers;
}

// Runs of `count` elements. Their offsets in the tensor and in a rank's part are in elements.
Windows::Runs runs_of(const View& data, std::uint64_t window, int rank, nb::handle offsets, nb::handle starts,
                      std::size_t count) {
  const std::size_t size = size_of(data.dtype);
  Windows::Runs runs{window, rank, count * size, numbers_of(offsets, size), numbers_of(starts, size)};
  if (runs.offsets.size() != runs.starts.size()) throw std::out_of_range("as many runs begin here as there");
  for (const std::uint64_t start : runs.starts) {
    if (runs.bytes > data.bytes() || start > data.bytes() - runs.bytes) {
      throw std::out_of_range("beyond the end of a tensor");
    }
  }
  return runs;
}

template <auto move>
bool runs_op(Engine& engine, Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, nb::handle tensor,
             nb::handle offsets, nb::handle starts, std::size_t count) {
  const View data = view_of(tensor);
  const Windows::Runs runs = runs_of(data, window, rank, offsets, starts, count);
  Unlocked unlocked;
  return (engine.*move)(ticket, group, runs, static_cast<std::byte*>(data.data));
}

template <bool (Engine::*tell)(Ticket, std::uint32_t, std::uint64_t, int, Held&)>
bool tell_op(Engine& engine, Ticket ticket, std::uint32_t group, std::uint64_t window, int rank) {
  return (engine.*tell)(ticket, group, window, rank, nothing_held);
}

std::string text(const nb::bytes& bytes) { return std::string(bytes.c_str(), bytes.size()); }

// The whole memory of a descriptor, as a tensor of bytes. Python's mmap would keep a copy of the descriptor.
nb::object map_memory(int fd, std::size_t bytes) {
  struct Mapping {
    void* memory;
    std::size_t bytes;
  };
  auto mapping = std::make_unique<Mapping>(Mapping{map_shared(fd, 0, bytes), bytes});
  nb::capsule owner(mapping.get(), [](void* raw) noexcept {
    const std::unique_ptr<Mapping> mapping(static_cast<Mapping*>(raw));
    munmap(mapping->memory, mapping->bytes);
  });
  void* memory = mapping.release()->memory;
  return nb::cast(nb::ndarray<nb::pytorch, std::uint8_t, nb::ndim<1>>(memory, {bytes}, owner));
}

// Returns the result of `call`, made without the interpreter's lock.
template <typename Call>
auto released(const Call& call) {
  Unlocked unlocked;
  return call();
}

template <typename Call>
nb::bytes released_bytes(const Call& call) {
  const std::string bytes = released(call);
  return nb::bytes(bytes.data(), bytes.size());
}

nb::bytes map_window(Engine& engine, std::uint32_t group, std::uint64_t window, nb::handle tensor, bool remote) {
  const View data = view_of(tensor);
  return released_bytes([&] { return engine.map_window(group, window, data.data, data.bytes(), remote); });
}

void open_window(Engine& engine, std::uint32_t group, std::uint64_t window, int rank, nb::handle mapped,
                 const nb::bytes& rkey, std::uint64_t address, std::size_t bytes) {
  void* data = mapped.is_none() ? nullptr : view_of(mapped).data;
  const std::string key = text(rkey);
  released([&] { engine.open_window(group, window, rank, data, key, address, bytes); });
}

void introduce(Engine& engine, int peer, const nb::bytes& address, int socket, int pid,
               std::pair<std::uint64_t, std::uint64_t> cookies, std::uint32_t name, int cores) {
  Introduction introduction{text(address), Socket(socket), pid, {cookies.first, cookies.second}, name};
  released([&] { engine.introduce(peer, std::move(introduction), cores); });
}

bool send_frame(Engine& engine, int peer, const nb::bytes& frame) {
  const std::string copy = text(frame);
  return released([&] { return engine.send_frame(peer, copy); });
}

// Returns pairs (peer, frame).
nb::object take_notes(Engine& engine) {
  const auto notes = released([&] { return engine.take_notes(); });
  nb::list taken;
  for (const auto& [peer, frame] : notes) taken.append(nb::make_tuple(peer, nb::bytes(frame.data(), frame.size())));
  return taken;
}

// Returns lists of (ticket, status, detail, detail) and of (kind, peer, group, detail, frame).
nb::object told_of(const std::vector<Outcome>& outcomes, const std::vector<Notice>& notices) {
  nb::list done, told;
  for (const Outcome& it : outcomes) {
    done.append(nb::make_tuple(it.ticket, static_cast<int>(it.status), it.details[0], it.details[1]));
  }
  for (const Notice& it : notices) {
    told.append(nb::make_tuple(static_cast<int>(it.kind), it.peer, it.group, it.detail,
                               nb::bytes(it.frame.data(), it.frame.size())));
  }
  return nb::make_tuple(done, told);
}

// Makes progress. Returns the outcomes and notices, or None.
nb::object progress(Engine& engine) {
  std::vector<Outcome> outcomes;
  std::vector<Notice> notices;
  released([&] { engine.progress(outcomes, notices); });
  if (outcomes.empty() && notices.empty()) return nb::none();
  try {
    return told_of(outcomes, notices);
  } catch (...) {  // There is no memory for Python's objects, and the outcomes are lost.
    released([&] { engine.fail("no memory for the outcomes of ops"); });
    throw;
  }
}

template <typename Place>
void define_collectives(nb::class_<Place>& place) {
  place
      .def("barrier", &barrier_op<Place>,
           nb::sig("def barrier(self, ticket: int, number: int, form: int, detail: int, /) -> float"))
      .def("broadcast", &broadcast_op<Place>,
           nb::sig("def broadcast(self, ticket: int, number: int, form: int, tensor: torch.Tensor, root: int, /) -> "
                   "float"))
      .def("all_reduce", &all_reduce_op<Place>,
           nb::sig("def all_reduce(self, ticket: int, number: int, form: int, tensor: torch.Tensor, op: int, factor: "
                   "float, /) -> float"))
      .def(
          "reduce", &reduce_op<Place>,
          nb::sig("def reduce(self, ticket: int, number: int, form: int, tensor: torch.Tensor, op: int, factor: float, "
                  "root: int, /) -> float"))
      .def("reduce_scatter", &reduce_scatter_op<Place>,
           nb::sig("def reduce_scatter(self, ticket: int, number: int, form: int, size: int, "
                   "inputs: torch.Tensor | Sequence[torch.Tensor], output: torch.Tensor, op: int, factor: float, /) "
                   "-> float"))
      .def("all_gather", &all_gather_op<Place>,
           nb::sig("def all_gather(self, ticket: int, number: int, form: int, size: int, input: torch.Tensor, "
                   "outputs: torch.Tensor | Sequence[torch.Tensor], /) -> float"))
      .def("gather", &gather_op<Place>,
           nb::sig("def gather(self, ticket: int, number: int, form: int, input: torch.Tensor, "
                   "outputs: Sequence[torch.Tensor], root: int, /) -> float"))
      .def("scatter", &scatter_op<Place>,
           nb::sig("def scatter(self, ticket: int, number: int, form: int, inputs: Sequence[torch.Tensor], "
                   "output: torch.Tensor, root: int, /) -> float"))
      .def("all_to_all", &all_to_all_op<Place>,
           nb::sig("def all_to_all(self, ticket: int, number: int, form: int, size: int, "
                   "inputs: torch.Tensor | Sequence[torch.Tensor], outputs: torch.Tensor | Sequence[torch.Tensor], /) "
                   "-> float"));
}

}  // namespace
}  // namespace aiocomms

NB_MODULE(_engine, module) {
  using namespace aiocomms;
  // Objects that the interpreter does not free at its end are no defect. C code or an interrupted thread may hold them.
  nb::set_leak_warnings(false);
  nb::exception<UcxError>(module, "UcxError", PyExc_RuntimeError);
  module.def(
      "explain", [](int error) { return std::string(ucs_status_string(static_cast<ucs_status_t>(-error))); },
      nb::arg("error"));
  module.def(
      "is_plain", [](nb::handle tensor, bool written) { return plain_view(tensor, written).has_value(); },
      nb::arg().none(), nb::arg(), nb::sig("def is_plain(tensor: object, written: bool, /) -> bool"));
  module.def("read_words_at", &read_words_at, nb::arg("impl"), nb::arg("keys"), nb::arg("autograd"), nb::arg("plain"));
  // Ops use ints. A member of an enumeration takes longer to make than a small message takes to arrive.
  nb::enum_<Status>(module, "Status", nb::is_arithmetic())
      .value("DONE", Status::kDone)
      .value("TRUNCATED", Status::kTruncated)
      .value("OTHER_DTYPE", Status::kDtype)
      .value("CLOSED", Status::kClosed)
      .value("UNEQUAL", Status::kUnequal)
      .value("BROKEN", Status::kBroken)
      .value("DROPPED", Status::kDropped);
  nb::enum_<Notice::Kind>(module, "NoticeKind", nb::is_arithmetic())
      .value("FRAME", Notice::kFrame)
      .value("LOST", Notice::kLost)
      .value("LEFT", Notice::kLeft)
      .value("DISAGREES", Notice::kDisagrees)
      .value("MISLED", Notice::kMisled)
      .value("FAILED", Notice::kFailed)
      .value("LANE_DISAGREES", Notice::kLaneDisagrees)
      .value("LANE_LEFT", Notice::kLaneLeft);
  nb::enum_<Operator>(module, "Operator", nb::is_arithmetic())
      .value("SUM", Operator::Sum)
      .value("PRODUCT", Operator::Product)
      .value("MIN", Operator::Min)
      .value("MAX", Operator::Max)
      .value("BAND", Operator::Band)
      .value("BOR", Operator::Bor)
      .value("BXOR", Operator::Bxor)
      .value("AVG", Operator::Avg)
      .value("PREMUL_SUM", Operator::PremulSum);
  module.def("dtype_names", &dtype_names, nb::sig("def dtype_names() -> tuple[str, ...]"));
  module.def(
      "measure_speeds",
      [] {
        const Speeds speeds = released([] { return measure_speeds(); });
        return nb::make_tuple(speeds.read, speeds.copied);
      },
      nb::sig("def measure_speeds() -> tuple[int, int]"));
  module.def("map_memory", &map_memory, nb::arg("fd"), nb::arg("bytes"),
             nb::sig("def map_memory(fd: int, bytes: int) -> torch.Tensor"));
  nb::class_<Kept>(module, "Kept")
      .def(
          "__init__",
          [](Kept* kept, const nb::list& tensors) {
            new (kept) Kept;
            for (nb::handle tensor : tensors) kept->add(tensor);
          },
          nb::arg("tensors"), nb::sig("def __init__(self, tensors: list[torch.Tensor]) -> None"));
  module.def("create_segment", &Segment::create, nb::arg("ranks"), nb::arg("with_pool"), Released());

  nb::class_<InLanes> lanes(module, "Lanes");
  define_collectives(lanes);
  nb::class_<Engine> engine(module, "Engine");
  define_collectives(engine);
  engine
      .def(
          "__init__",
          [](Engine* engine, int number, const std::vector<std::pair<std::string, std::string>>& options, int device) {
            std::optional<ucs_memory_type_t> memory;
            if (device != kNoDevice) memory = static_cast<ucs_memory_type_t>(device);
            new (engine) Engine(number, options, memory);
          },
          nb::arg("number"), nb::arg("options"), nb::arg("device") = kNoDevice, Released())
      .def("address", [](Engine& engine) { return nb::bytes(engine.address().data(), engine.address().size()); })
      .def_prop_ro("number", &Engine::number)
      .def("start", &Engine::start, Released())
      .def("introduce", &introduce, nb::arg("peer"), nb::arg("address"), nb::arg("socket"), nb::arg("pid"),
           nb::arg("cookies"), nb::arg("name"), nb::arg("cores"))
      .def("part", &Engine::part, nb::arg("peers"), nb::arg("sound"), nb::arg("patience"), Released())
      .def("fileno", &Engine::fileno)
      .def_prop_ro("ready", &Engine::ready)
      .def_prop_ro("parks", &Engine::parks)
      .def("progress", &progress,
           nb::sig("def progress(self) -> tuple[list[tuple[int, int, int, int]], "
                   "list[tuple[int, int, int, int, bytes]]] | None"))
      .def("close", &Engine::close, nb::arg("sound"), nb::arg("patience"), Released())
      .def(
          "halt",
          [](nb::handle_t<Engine> self) {
            self.inc_ref();  // The reference is never released.
            Engine& engine = nb::cast<Engine&>(self);
            released([&] { engine.halt(); });
          },
          nb::sig("def halt(self) -> None"))
      .def("send_frame", &send_frame, nb::arg("peer"), nb::arg("frame"))
      .def("notes_fileno", &Engine::notes_fileno)
      .def("take_notes", &take_notes, nb::sig("def take_notes(self) -> list[tuple[int, bytes]]"))
      .def("add_group", &Engine::add_group, nb::arg("rank"), nb::arg("peers"), Released())
      .def("open_group", &Engine::open_group, nb::arg("group"), nb::arg("their_ids"), nb::arg("segment"),
           nb::arg("pooled"), nb::arg("hosts"), nb::arg("readable"), nb::arg("in_place"), Released())
      .def("reads_all", &Engine::reads_all, nb::arg("peers"), Released())
      .def("lose_group", &Engine::lose_group, nb::arg("group"), Released())
      .def("close_group", &Engine::close_group, nb::arg("group"), Released())
      .def("signs", &Engine::signs, nb::arg("peers"), Released())
      .def("has_let_go", &Engine::has_let_go, nb::arg("group"), nb::arg("rank"), Released())
      .def("missing", &Engine::missing, nb::arg("group"), Released())
      .def("missing_in_lane", &Engine::missing_in_lane, nb::arg("group"), nb::arg("lane"), Released())
      .def("under_way_in_lane", &Engine::under_way_in_lane, nb::arg("group"), nb::arg("lane"), Released())
      .def("give_up_lane", &Engine::give_up_lane, nb::arg("group"), nb::arg("lane"), Released())
      .def("forget_lane", &Engine::forget_lane, nb::arg("group"), nb::arg("lane"), nb::arg("rank"), Released())
      .def(
          "lanes", [](Engine& engine, std::uint32_t group) { return InLanes{engine, group}; }, nb::arg("group"),
          nb::keep_alive<0, 1>())
      .def("send", &send_op,
           nb::sig("def send(self, ticket: int, group: int, tensor: torch.Tensor, dst: int, channel: int, tag: int, /) "
                   "-> bool"))
      .def("recv", &recv_op,
           nb::sig("def recv(self, ticket: int, group: int, tensor: torch.Tensor, src: int, channel: int, tag: int, /) "
                   "-> bool"))
      .def("probe", &probe_op,
           nb::sig("def probe(self, ticket: int, group: int, src: int, channel: int, tag: int, look_on: bool, /) -> "
                   "tuple[int, int] | None"))
      .def("take", &take_op,
           nb::sig("def take(self, ticket: int, group: int, tensor: torch.Tensor, src: int, channel: int, tag: int, /) "
                   "-> bool | None"))
      .def("cancel", &Engine::cancel,
           nb::sig("def cancel(self, group: int, src: int, channel: int, tag: int, ticket: int, /) -> bool"),
           Released())
      .def(
          "head", [](Engine& engine, Ticket ticket) { return released_bytes([&] { return engine.head(ticket); }); },
          nb::arg("ticket"))
      .def("map_window", &map_window,
           nb::sig("def map_window(self, group: int, window: int, tensor: torch.Tensor, remote: bool, /) -> bytes"))
      .def(
          "open_window", &open_window, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
          nb::arg(),
          nb::sig("def open_window(self, group: int, window: int, rank: int, mapped: torch.Tensor | None, rkey: bytes, "
                  "address: int, bytes: int, /) -> None"))
      .def("close_window", &Engine::close_window, nb::arg("group"), nb::arg("window"), Released())
      .def("put", &put_op<&Engine::put>,
           nb::sig("def put(self, ticket: int, group: int, window: int, rank: int, offset: int, tensor: torch.Tensor, "
                   "/) -> bool"))
      .def("put_signal", &put_op<&Engine::put_signal>,
           nb::sig("def put_signal(self, ticket: int, group: int, window: int, rank: int, offset: int, "
                   "tensor: torch.Tensor, /) -> bool"))
      .def("get", &get_op,
           nb::sig("def get(self, ticket: int, group: int, window: int, rank: int, offset: int, tensor: torch.Tensor, "
                   "/) -> bool"))
      .def("put_v", &runs_op<&Engine::put_v>,
           nb::sig("def put_v(self, ticket: int, group: int, window: int, rank: int, tensor: torch.Tensor, "
                   "offsets: torch.Tensor, starts: torch.Tensor, count: int, /) -> bool"))
      .def("get_v", &runs_op<&Engine::get_v>,
           nb::sig("def get_v(self, ticket: int, group: int, window: int, rank: int, tensor: torch.Tensor, "
                   "offsets: torch.Tensor, starts: torch.Tensor, count: int, /) -> bool"))
      .def("atomic", &Engine::atomic,
           nb::sig("def atomic(self, ticket: int, group: int, window: int, rank: int, offset: int, swap: bool, "
                   "bytes: int, first: int, second: int, /) -> bool"),
           Released())
      .def("signal", &tell_op<&Engine::signal>,
           nb::sig("def signal(self, ticket: int, group: int, window: int, rank: int, /) -> bool"), Released())
      .def("wait_signal", &tell_op<&Engine::wait_signal>,
           nb::sig("def wait_signal(self, ticket: int, group: int, window: int, rank: int, /) -> bool"), Released())
      .def("cancel_wait", &Engine::cancel_wait,
           nb::sig("def cancel_wait(self, group: int, window: int, rank: int, ticket: int, /) -> bool"), Released())
      .def("flush", &Engine::flush,
           nb::sig("def flush(self, ticket: int, group: int, window: int, rank: int, /) -> bool"), Released());

  define_shortcuts(module);

  module.attr("TURNS") = Pacer::kTurns;
  module.attr("MOST_TURNS") = Pacer::kMostTurns;
  module.attr("MEASURED_BYTES") = kMeasuredBytes;
  module.attr("NO_DEVICE") = kNoDevice;
  module.attr("HOST") = static_cast<int>(UCS_MEMORY_TYPE_HOST);
  module.attr("CUDA") = static_cast<int>(UCS_MEMORY_TYPE_CUDA);
}
