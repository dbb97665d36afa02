// The only file that knows Python. Tensors come as addresses; whoever calls keeps them alive until the outcome.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <cstring>

#include "collectives.hpp"
#include "engine.hpp"

namespace nb = nanobind;

namespace aiocomms {
namespace {

using Address = std::uintptr_t;
using Addresses = std::vector<Address>;
using Released = nb::call_guard<nb::gil_scoped_release>;

void* at(Address address) { return reinterpret_cast<void*>(address); }

Inputs inputs(const Addresses& addresses) {
  Inputs all;
  for (Address address : addresses) all.push_back(at(address));
  return all;
}

Outputs outputs(const Addresses& addresses) {
  Outputs all;
  for (Address address : addresses) all.push_back(at(address));
  return all;
}

// The fingerprint of a collective: what all ranks must agree on. (Mixed as in Vigna's splitmix64.)
template <typename... Parts>
std::uint64_t mark_of(Parts... parts) {
  std::uint64_t mark = 0x9E3779B97F4A7C15u;
  auto mix = [&](std::uint64_t part) {
    mark = (mark ^ part) * 0xBF58476D1CE4E5B9u;
    mark ^= mark >> 29;
  };
  (mix(static_cast<std::uint64_t>(parts)), ...);
  return mark;
}

std::uint64_t mark_of_list(std::uint64_t mark, const Bytes& sizes) {
  for (std::size_t size : sizes) mark = mark_of(mark, size);
  return mark;
}

struct Reducing {
  int dtype, op;
  double factor;
  Reduction reduction() const { return {static_cast<Operator>(op), static_cast<DType>(dtype), factor}; }
  std::uint64_t mark() const { return mark_of(dtype, op, std::bit_cast<std::uint64_t>(factor)); }
};

// form: which operation it is, as a number.
bool barrier_op(Engine& engine, Ticket ticket, std::uint32_t group, int form, std::uint64_t detail) {
  return engine.collective(ticket, group, mark_of(form, detail), [](Group& it, Unequal&) { return run_barrier(it); });
}

bool broadcast_op(Engine& engine, Ticket ticket, std::uint32_t group, int form, Address data, std::size_t bytes,
                  int dtype, int root) {
  return engine.collective(ticket, group, mark_of(form, root, dtype, bytes),
                           [&](Group& it, Unequal&) { return run_broadcast(it, root, at(data), bytes); });
}

bool all_reduce_op(Engine& engine, Ticket ticket, std::uint32_t group, int form, Address data, std::size_t count,
                   int dtype, int op, double factor) {
  Reducing how{dtype, op, factor};
  return engine.collective(ticket, group, mark_of(form, how.mark(), count),
                           [&](Group& it, Unequal&) { return run_all_reduce(it, how.reduction(), at(data), count); });
}

bool reduce_op(Engine& engine, Ticket ticket, std::uint32_t group, int form, Address data, std::size_t count, int dtype,
               int op, double factor, int root) {
  Reducing how{dtype, op, factor};
  return engine.collective(ticket, group, mark_of(form, how.mark(), count, root),
                           [&](Group& it, Unequal&) { return run_reduce(it, how.reduction(), root, at(data), count); });
}

bool reduce_scatter_op(Engine& engine, Ticket ticket, std::uint32_t group, int form, const Addresses& ins,
                       const Bytes& counts, Address out, int dtype, int op, double factor) {
  Reducing how{dtype, op, factor};
  return engine.collective(ticket, group, mark_of_list(mark_of(form, how.mark()), counts), [&](Group& it, Unequal&) {
    return run_reduce_scatter(it, how.reduction(), inputs(ins), counts, at(out));
  });
}

bool all_gather_op(Engine& engine, Ticket ticket, std::uint32_t group, int form, Address in, const Addresses& outs,
                   const Bytes& bytes, int dtype) {
  return engine.collective(ticket, group, mark_of_list(mark_of(form, dtype), bytes),
                           [&](Group& it, Unequal&) { return run_all_gather(it, at(in), outputs(outs), bytes); });
}

bool gather_op(Engine& engine, Ticket ticket, std::uint32_t group, int form, Address in, const Addresses& outs,
               std::size_t bytes, int dtype, int root) {
  return engine.collective(ticket, group, mark_of(form, dtype, bytes, root),
                           [&](Group& it, Unequal&) { return run_gather(it, root, at(in), outputs(outs), bytes); });
}

bool scatter_op(Engine& engine, Ticket ticket, std::uint32_t group, int form, const Addresses& ins, Address out,
                std::size_t bytes, int dtype, int root) {
  return engine.collective(ticket, group, mark_of(form, dtype, bytes, root),
                           [&](Group& it, Unequal&) { return run_scatter(it, root, inputs(ins), at(out), bytes); });
}

bool all_to_all_op(Engine& engine, Ticket ticket, std::uint32_t group, int form, const Addresses& ins,
                   const Bytes& in_bytes, const Addresses& outs, const Bytes& out_bytes, int dtype, bool equal) {
  std::uint64_t mark = mark_of(form, dtype, equal ? in_bytes[0] : 0);
  return engine.collective(ticket, group, mark, [&](Group& it, Unequal& unequal) {
    return run_all_to_all(it, inputs(ins), in_bytes, outputs(outs), out_bytes, equal, unequal);
  });
}

// What has happened: (ticket, status, detail, detail) and (kind, peer, group, detail, frame).
nb::object progress(Engine& engine) {
  std::vector<Outcome> outcomes;
  std::vector<Notice> notices;
  {
    nb::gil_scoped_release released;
    engine.progress(outcomes, notices);
  }
  if (outcomes.empty() && notices.empty()) return nb::none();
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

std::string text(const nb::bytes& bytes) { return std::string(bytes.c_str(), bytes.size()); }

}  // namespace
}  // namespace aiocomms

NB_MODULE(_engine, module) {
  using namespace aiocomms;
  nb::exception<UcxError>(module, "UcxError", PyExc_RuntimeError);
  module.def(
      "explain", [](int error) { return std::string(ucs_status_string(static_cast<ucs_status_t>(-error))); },
      nb::arg("error"));
  module.def("create_segment", &Segment::create, nb::arg("ranks"));

  nb::class_<Engine>(module, "Engine")
      .def(nb::init<int, int, const std::vector<std::pair<std::string, std::string>>&>(), nb::arg("rank"),
           nb::arg("size"), nb::arg("options"), Released())
      .def("address",
           [](Engine& engine) {
             std::string address = engine.address();
             return nb::bytes(address.data(), address.size());
           })
      .def(
          "start",
          [](Engine& engine, const std::vector<nb::bytes>& addresses, const std::vector<int>& sockets,
             const std::vector<int>& pids, bool crowded) {
            std::vector<std::string> texts;
            for (const nb::bytes& address : addresses) texts.push_back(text(address));
            engine.start(texts, sockets, pids, crowded);
          },
          nb::arg("addresses"), nb::arg("sockets"), nb::arg("pids"), nb::arg("crowded"))
      .def("fileno", &Engine::fileno)
      .def_prop_ro("ready", &Engine::ready)
      .def("progress", &progress,
           nb::sig("def progress(self) -> tuple[list[tuple[int, int, int, int]], "
                   "list[tuple[int, int, int, int, bytes]]] | None"))
      .def("close", &Engine::close, nb::arg("sound"), nb::arg("patience"), Released())
      .def(
          "send_frame",
          [](Engine& engine, int peer, const nb::bytes& frame) { return engine.send_frame(peer, text(frame)); },
          nb::arg("peer"), nb::arg("frame"))
      .def("add_group", &Engine::add_group, nb::arg("rank"), nb::arg("peers"))
      .def("open_group", &Engine::open_group, nb::arg("group"), nb::arg("their_ids"), nb::arg("segment"),
           nb::arg("hosts"), nb::arg("readable"))
      .def("reads_all", &Engine::reads_all, nb::arg("peers"))
      .def("lose_group", &Engine::lose_group, nb::arg("group"), Released())
      .def("close_group", &Engine::close_group, nb::arg("group"), Released())
      .def("missing", &Engine::missing, nb::arg("group"), Released())
      .def(
          "send",
          [](Engine& engine, Ticket ticket, std::uint32_t group, Address data, std::size_t bytes, int dst, int channel,
             std::int64_t tag,
             int dtype) { return engine.send(ticket, group, at(data), bytes, dst, channel, tag, dtype); },
          nb::sig("def send(self, ticket: int, group: int, data: int, bytes: int, dst: int, channel: int, tag: "
                  "int, dtype: int, /) -> bool"),
          Released())
      .def(
          "recv",
          [](Engine& engine, Ticket ticket, std::uint32_t group, Address data, std::size_t bytes, int src, int channel,
             std::int64_t tag,
             int dtype) { return engine.recv(ticket, group, at(data), bytes, src, channel, tag, dtype); },
          nb::sig("def recv(self, ticket: int, group: int, data: int, bytes: int, src: int, channel: int, tag: "
                  "int, dtype: int, /) -> bool"),
          Released())
      .def("cancel", &Engine::cancel,
           nb::sig("def cancel(self, group: int, src: int, channel: int, tag: int, ticket: int, /) -> bool"),
           Released())
      .def("barrier", &barrier_op,
           nb::sig("def barrier(self, ticket: int, group: int, form: int, detail: int, /) -> bool"), Released())
      .def("broadcast", &broadcast_op,
           nb::sig("def broadcast(self, ticket: int, group: int, form: int, data: int, bytes: int, dtype: int, "
                   "root: int, /) -> bool"),
           Released())
      .def("all_reduce", &all_reduce_op,
           nb::sig("def all_reduce(self, ticket: int, group: int, form: int, data: int, count: int, dtype: int, "
                   "op: int, factor: float, /) -> bool"),
           Released())
      .def("reduce", &reduce_op,
           nb::sig("def reduce(self, ticket: int, group: int, form: int, data: int, count: int, dtype: int, op: "
                   "int, factor: float, root: int, /) -> bool"),
           Released())
      .def("reduce_scatter", &reduce_scatter_op,
           nb::sig("def reduce_scatter(self, ticket: int, group: int, form: int, ins: list[int], counts: "
                   "list[int], out: int, dtype: int, op: int, factor: float, /) -> bool"),
           Released())
      .def("all_gather", &all_gather_op,
           nb::sig("def all_gather(self, ticket: int, group: int, form: int, input: int, outs: list[int], bytes: "
                   "list[int], dtype: int, /) -> bool"),
           Released())
      .def("gather", &gather_op,
           nb::sig("def gather(self, ticket: int, group: int, form: int, input: int, outs: list[int], bytes: "
                   "int, dtype: int, root: int, /) -> bool"),
           Released())
      .def("scatter", &scatter_op,
           nb::sig("def scatter(self, ticket: int, group: int, form: int, ins: list[int], out: int, bytes: int, "
                   "dtype: int, root: int, /) -> bool"),
           Released())
      .def("all_to_all", &all_to_all_op,
           nb::sig("def all_to_all(self, ticket: int, group: int, form: int, ins: list[int], in_bytes: "
                   "list[int], outs: list[int], out_bytes: list[int], dtype: int, equal: bool, /) -> bool"),
           Released())
      .def(
          "map_window",
          [](Engine& engine, std::uint32_t group, std::uint64_t window, Address data, std::size_t bytes, bool remote) {
            std::string rkey = engine.map_window(group, window, at(data), bytes, remote);
            return nb::bytes(rkey.data(), rkey.size());
          },
          nb::arg("group"), nb::arg("window"), nb::arg("data"), nb::arg("bytes"), nb::arg("remote"))
      .def(
          "open_window",
          [](Engine& engine, std::uint32_t group, std::uint64_t window, int rank, Address mapped, const nb::bytes& rkey,
             std::uint64_t address) { engine.open_window(group, window, rank, at(mapped), text(rkey), address); },
          nb::arg("group"), nb::arg("window"), nb::arg("rank"), nb::arg("mapped"), nb::arg("rkey"), nb::arg("address"))
      .def("close_window", &Engine::close_window, nb::arg("group"), nb::arg("window"), Released())
      .def(
          "put",
          [](Engine& engine, Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset,
             Address data,
             std::size_t bytes) { return engine.put(ticket, group, window, rank, offset, at(data), bytes); },
          nb::sig("def put(self, ticket: int, group: int, window: int, rank: int, offset: int, data: int, "
                  "bytes: int, /) -> bool"),
          Released())
      .def(
          "get",
          [](Engine& engine, Ticket ticket, std::uint32_t group, std::uint64_t window, int rank, std::uint64_t offset,
             Address data,
             std::size_t bytes) { return engine.get(ticket, group, window, rank, offset, at(data), bytes); },
          nb::sig("def get(self, ticket: int, group: int, window: int, rank: int, offset: int, data: int, "
                  "bytes: int, /) -> bool"),
          Released())
      .def("atomic", &Engine::atomic,
           nb::sig("def atomic(self, ticket: int, group: int, window: int, rank: int, offset: int, swap: bool, "
                   "bytes: int, first: int, second: int, /) -> bool"),
           Released())
      .def("signal", &Engine::signal,
           nb::sig("def signal(self, ticket: int, group: int, window: int, rank: int, /) -> bool"), Released())
      .def("wait_signal", &Engine::wait_signal,
           nb::sig("def wait_signal(self, ticket: int, group: int, window: int, rank: int, /) -> bool"), Released())
      .def("cancel_wait", &Engine::cancel_wait,
           nb::sig("def cancel_wait(self, group: int, window: int, rank: int, ticket: int, /) -> bool"), Released())
      .def("flush", &Engine::flush,
           nb::sig("def flush(self, ticket: int, group: int, window: int, rank: int, /) -> bool"), Released());

  module.attr("TURNS") = Engine::kTurns;
}
