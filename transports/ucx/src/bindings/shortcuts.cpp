// The native ledger of a communicator. It counts the ops, records them in rings, and starts those that are plain.
//
// Communicators, lanes and windows have native methods, which start a plain op without a frame of Python's. An op is
// plain if its call has plain tensors and numbers, no hook comes before it, and nothing refuses ops. The native code
// does then, step by step, what Communicator._issue and UcxTransport.post do for such a call. Of a lane these are
// Lane._issue and LaneCollectives.post.
//
// The Python code stays the reference, and it alone decides anything. Of a call that is not plain nothing happens here:
// the method of the same name runs, and makes every error. Python also goes on with an op that does not end within its
// call.
//
// Nothing changes before the engine has an op, and an op is counted and recorded right after that. No code of Python's
// runs between the last look at the call and that moment. Other threads may run, for the engine lets go of the
// interpreter's lock where it waits (engine/held.hpp). They start no op meanwhile, so the number is still free.
//
// Other threads than the loop's start ops, too (Shortcuts::post), but not while the loop is amid a post. Such a thread
// keeps the interpreter's lock while an op gets its number, its record and, of a collective, its place in the engine.
// So numbers, records and places are in one order, and the loop finds none of it half done.
#include "bindings/shortcuts.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/calls.hpp"
#include "bindings/count.hpp"
#include "bindings/kept.hpp"
#include "bindings/lane_queues.hpp"
#include "bindings/lanes.hpp"
#include "bindings/ring.hpp"
#include "bindings/slots.hpp"
#include "bindings/tensors.hpp"
#include "bindings/unlocked.hpp"
#include "bindings/window_shortcuts.hpp"
#include "bindings/work.hpp"
#include "engine/elsewhere.hpp"
#include "engine/engine.hpp"

namespace nb = nanobind;

namespace aiocomms {
namespace {

constexpr int kArguments = 3;  // of a method that has a shortcut, at most
// Bytes that take less time to copy than it takes to let go of the interpreter's lock, and to get it back.
constexpr std::size_t kAtOnce = 4096;
constexpr int kTries = 3;  // of another thread to have the engine's lock beside the interpreter's

// What is asked for by name on the way, as Python keeps it.
struct Names {
  PyObject* posted = PyUnicode_InternFromString("_posted");
  PyObject* look_after = PyUnicode_InternFromString("look_after");
  PyObject* ended_at_once = PyUnicode_InternFromString("ended_at_once");
  PyObject* begin = PyUnicode_InternFromString("_begin");
  PyObject* adopted = PyUnicode_InternFromString("_adopted");
  PyObject* kept = PyUnicode_InternFromString("_kept");
  PyObject* posted_as = PyUnicode_InternFromString("_posted_as");
};

const Names& names() {
  static const Names* made = new Names;
  return *made;
}

bool overlap(const View& a, const View& b) {
  auto from = [](const View& it) { return reinterpret_cast<std::uintptr_t>(it.data); };
  return from(a) < from(b) + b.bytes() && from(b) < from(a) + a.bytes();
}

bool are_alike(const View& a, const View& b) {
  return a.dtype == b.dtype && std::equal(a.shape.begin(), a.shape.end(), b.shape.begin(), b.shape.end());
}

// Whether whole has a place for size parts, of which part is the one of that rank or lies elsewhere.
bool is_part(const View& part, const View& whole, int rank, int size) {
  if (part.dtype != whole.dtype || whole.count != part.count * static_cast<std::size_t>(size)) return false;
  auto place = static_cast<std::byte*>(whole.data) + static_cast<std::size_t>(rank) * part.bytes();
  return part.data == place || !overlap(part, whole);
}

template <typename Function>
PyType_Slot slot(int number, Function* function) {
  return {number, reinterpret_cast<void*>(function)};
}

// ------------------------------------------------------------------------------------------------ the communicator's

// An operator without a factor.
struct Defined {
  nb::object op;
  int number;
  std::uint32_t dtypes;  // for which it is defined: a bit for each DType

  bool takes(DType dtype) const { return dtypes >> static_cast<int>(dtype) & 1; }
};

struct Kind {
  nb::object record;
  int form = -1;  // -1: it is no collective
};

class Shortcuts;

using LineCall = PyObject* (Shortcuts::*)(const Caller&, Arguments, Py_ssize_t);
// shortcuts: the object's whose method it is. cls: the class that has the method.
using Start = PyObject* (*)(PyObject* shortcuts, PyObject* self, PyTypeObject* cls, Arguments args, Py_ssize_t count);

// How an op is called that native code starts.
struct Signature {
  const char* name;  // of its method, and of its record
  Kind Shortcuts::* kind;
  LineCall call;  // null: it is of a window
  Start start;
  // The arguments of the method come first, in their order. Only the record of a message has a channel, too. An
  // argument that is not given has a default that is plain.
  std::array<const char*, kArguments + 1> fields;
};

class Shortcuts {
 public:
  Shortcuts(Engine& engine, std::uint32_t group, int rank, int size, const nb::dict& kinds, const nb::list& operators,
            nb::object transport, nb::object line, std::size_t entries)
      : engine_(engine),
        group_(group),
        rank_(rank),
        size_(size),
        thread_(nb::cast<unsigned long>(line.attr("thread"))),
        held_{nb::cast(&engine),
              transport,
              line,
              transport.attr("_collectives"),
              transport.attr("shared").attr("pending"),
              line.attr("pre_hooks"),
              line.attr("post_hooks"),
              nb::cast(new Ring(entries), nb::rv_policy::take_ownership),
              transport.attr("lanes"),
              transport.attr("lanes").attr("pending"),
              transport.attr("lanes").attr("given_up"),
              line.attr("given_up"),
              nb::cast(new Ring(entries / 2), nb::rv_policy::take_ownership),
              transport.attr("call_count")} {
    for (const Signature& it : signatures()) {
      const nb::object found = kinds[it.name];
      Kind& kind = this->*it.kind;
      kind = {nb::object(found[0]), nb::cast<int>(found[1])};
      if (it.call == nullptr) continue;
      Record record{&kind, it.call, {}};
      for (const char* name : it.fields) {
        if (name != nullptr) record.fields.emplace_back(kind.record, name);
      }
      records_.push_back(std::move(record));
    }
    for (nb::handle it : operators) {
      operators_.push_back({nb::object(it[0]), nb::cast<int>(it[1]), nb::cast<std::uint32_t>(it[2])});
    }
  }

  static std::span<const Signature> signatures();

  nb::object rings() const { return held_[kRing]; }
  nb::object lanes() const { return held_[kLaneRing]; }
  bool windows() const { return windows_; }
  // How many other threads' ops are between their first step and their last.
  int elsewhere() const {
    int count = 0;
    for (const Posting* it = elsewhere_; it != nullptr; it = it->next) ++count;
    return count;
  }
  // Whether one of them is of a lane.
  bool elsewhere_in(std::uint64_t lane) const {
    const Posting* it = elsewhere_;
    while (it != nullptr && !(it->caller.in_lane() && it->caller.lane == lane)) it = it->next;
    return it != nullptr;
  }

  // These are the numbers of ops, of lanes' ops, and of collectives that are of no lane.
  long long issued = 0, laned = 0, calls = 0;
  bool refusing = false;  // ops are refused
  bool posting = false;   // the loop is between an op's number and its record: no other thread counts then
  bool held = false;      // collectives wait for something before they go to the engine
  bool recording = true;  // the ring gets what is called, and when it ended

  // Gives an op that Python starts its number, and records it. lane: its key in words; none: it is of no lane.
  long long begin(nb::handle kind, bool counted, nb::handle lane) {
    posting = true;
    const long long seq = issued;
    if (!lane.is_none() && line() != nullptr) {
      const nb::object named = nb::make_tuple(seq, lane);
      lane_ring()->append(named.ptr());
      ++laned;
    }
    ++issued;
    calls += counted;
    if (recording) ring().append(kind.ptr());
    return seq;
  }
  void note_end(nb::handle entry) {
    if (recording) ring().append(entry.ptr());
  }
  // The classes of works, which have the fields of WorkObject; and of what the transport is told of a pending message
  // of a lane. op_result: see WorkObject; a constant of a module. windows: whether they have shortcuts, too.
  void use(nb::object work, nb::object lane_work, nb::object part, nb::handle op_result, bool windows) {
    windows_ = windows;
    WorkObject::op_result = op_result.ptr();
    used_ = {std::move(work), std::move(lane_work), std::move(part)};
  }
  // The class of lanes.
  void know(nb::handle lane) { lane_ = LaneSlots(lane); }
  // From now on ops of the communicator go by its current lane.
  void follow(nb::object current) { used_[kCurrent] = std::move(current); }

  // Whose op it is that is called on `self`, with these shortcuts. A lane is asked for its number before its first op.
  // False: nobody's, perhaps with an exception.
  Caller caller(PyObject* own, PyObject* self, PyTypeObject* cls) const {
    nb::object found = nb::borrow(self);
    if (!lane_ || cls != lane_->cls) {
      if (!used_[kCurrent]) return {found, {}};
      PyObject* value = nullptr;
      if (PyContextVar_Get(used_[kCurrent].ptr(), nullptr, &value) != 0) return {};
      nb::object current = nb::steal(value);
      while (current && !current.is_none() && lane_->shortcuts.of(PyTuple_GET_ITEM(current.ptr(), 0)) != own) {
        current = nb::borrow(PyTuple_GET_ITEM(current.ptr(), 1));
      }
      if (!current || current.is_none()) return {found, {}};
      found = nb::borrow(PyTuple_GET_ITEM(current.ptr(), 0));
    }
    if (lane_->known.of(found.ptr()) == Py_None) {
      PyObject* given[] = {found.ptr()};
      if (!nb::steal(PyObject_VectorcallMethod(names().begin, given, 1, nullptr))) return {};
    }
    nb::object known = nb::borrow(lane_->known.of(found.ptr()));
    if (!known || known.is_none()) return {};
    const std::uint64_t number = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(known.ptr(), 0));
    return {std::move(found), std::move(known), number};
  }

  // Each returns a work; or null, perhaps with an exception: without one it was not taken.
  PyObject* all_reduce(const Caller& caller, Arguments args, Py_ssize_t count) {
    const Defined* op = count < 1 ? nullptr : find(args[1]);
    if (op == nullptr) return nullptr;
    const Started it = make(caller, all_reduce_, {args[0], op->op.ptr()});
    const std::optional<View> data = it.view(args[0], true);
    if (!data || !op->takes(data->dtype)) return nullptr;
    const Reducing how(data->dtype, op->number, 1.0);
    return start(caller, all_reduce_, it, args[0], nullptr, data->bytes(),
                 [&](auto& place, auto number, Ticket ticket) {
                   return call_all_reduce(place, ticket, number, all_reduce_.form, *data, how);
                 });
  }

  PyObject* barrier(const Caller& caller, Arguments, Py_ssize_t) {
    const Started it = make(caller, barrier_, {});
    if (!it.work) return nullptr;
    return start(caller, barrier_, it, Py_None, nullptr, 0, [&](auto& place, auto number, Ticket ticket) {
      return call_barrier(place, ticket, number, barrier_.form, 0);
    });
  }

  PyObject* broadcast(const Caller& caller, Arguments args, Py_ssize_t count) {
    const auto root = count < 2 ? std::nullopt : int_within(args[1], 0, size_ - 1);
    if (!root) return nullptr;
    const Started it = make(caller, broadcast_, {args[0], args[1]});
    const std::optional<View> data = it.view(args[0], true);
    if (!data) return nullptr;
    if (*root == rank_) it.written = nullptr;
    return start(caller, broadcast_, it, args[0], args[1], data->bytes(), [&](auto& place, auto number, Ticket ticket) {
      return call_broadcast(place, ticket, number, broadcast_.form, *data, static_cast<int>(*root));
    });
  }

  PyObject* all_gather_single(const Caller& caller, Arguments args, Py_ssize_t count) {
    if (count < 2) return nullptr;
    const Started it = make(caller, all_gather_single_, {args[0], args[1]});
    const std::optional<View> out = it.view(args[0], true), in = it.view(args[1], false);
    if (!out || !in || !is_part(*in, *out, rank_, size_)) return nullptr;
    const Blocks outs = cut(*out, static_cast<std::size_t>(size_));
    return start(caller, all_gather_single_, it, args[0], nullptr, out->bytes(),
                 [&](auto& place, auto number, Ticket ticket) {
                   return call_all_gather(place, ticket, number, all_gather_single_.form, *in, outs);
                 });
  }

  PyObject* all_to_all_single(const Caller& caller, Arguments args, Py_ssize_t count) {
    if (count < 2) return nullptr;
    const Started it = make(caller, all_to_all_single_, {args[0], args[1]});
    const std::optional<View> out = it.view(args[0], true), in = it.view(args[1], false);
    if (!out || !in || !are_alike(*out, *in) || overlap(*out, *in)) return nullptr;
    if (in->shape.empty() || in->shape[0] % size_ != 0) return nullptr;
    const auto size = static_cast<std::size_t>(size_);
    const Blocks outs = cut(*out, size), ins = cut(*in, size);
    return start(caller, all_to_all_single_, it, args[0], nullptr, in->bytes(),
                 [&](auto& place, auto number, Ticket ticket) {
                   return call_all_to_all(place, ticket, number, all_to_all_single_.form, ins, outs, true);
                 });
  }

  PyObject* reduce_scatter_single(const Caller& caller, Arguments args, Py_ssize_t count) {
    const Defined* op = count < 2 ? nullptr : find(args[2]);
    if (op == nullptr) return nullptr;
    const Started it = make(caller, reduce_scatter_single_, {args[0], args[1], op->op.ptr()});
    const std::optional<View> out = it.view(args[0], true), in = it.view(args[1], false);
    if (!out || !in || !op->takes(out->dtype) || !is_part(*out, *in, rank_, size_)) return nullptr;
    const Reducing how(out->dtype, op->number, 1.0);
    const Blocks ins = cut(*in, static_cast<std::size_t>(size_));
    return start(caller, reduce_scatter_single_, it, args[0], nullptr, in->bytes(),
                 [&](auto& place, auto number, Ticket ticket) {
                   return call_reduce_scatter(place, ticket, number, reduce_scatter_single_.form, ins, *out, how);
                 });
  }

  PyObject* send(const Caller& caller, Arguments args, Py_ssize_t count) {
    return message(caller, send_, args, count, false, [&](auto& place, auto ticket, const View& data, auto... where) {
      return place.send(ticket, group_, data.data, data.bytes(), where..., static_cast<int>(data.dtype));
    });
  }

  PyObject* recv(const Caller& caller, Arguments args, Py_ssize_t count) {
    return message(caller, recv_, args, count, true, [&](auto& place, auto ticket, const View& data, auto... where) {
      return place.recv(ticket, group_, data.data, data.bytes(), where..., static_cast<int>(data.dtype));
    });
  }

  bool takes() const { return is_plain() && PyThread_get_thread_ident() == thread_; }

  // An op that another thread than the loop's has called on target, by its record. Returns its work. Of one that is
  // pending keeper was told, by _posted_as and _kept(), before anybody could hear of its end.
  PyObject* post(PyObject* own, PyObject* target, PyObject* record, PyObject* keeper) {
    const auto found = std::find_if(records_.begin(), records_.end(), [&](const Record& it) {
      return it.kind->record.ptr() == reinterpret_cast<PyObject*>(Py_TYPE(record));
    });
    if (found == records_.end() || !takes_elsewhere()) return nullptr;
    PyTypeObject* lane = lane_ && PyObject_TypeCheck(target, lane_->cls) ? lane_->cls : nullptr;
    Caller of = caller(own, target, lane);
    const bool message = found->kind->form < 0;
    if (!of || (message && of.in_lane())) return nullptr;  // Python makes what is told of a lane's message
    of.record = record;
    of.keeper = keeper;
    PyObject* args[kArguments + 1] = {};
    for (std::size_t i = 0; i < found->fields.size(); ++i) {
      args[i] = found->fields[i].of(record);
      if (args[i] == nullptr) return nullptr;
    }
    if (message && int_within(args[kArguments], kUser, kUser) != kUser) return nullptr;
    const auto count = std::min<Py_ssize_t>(kArguments, std::ssize(found->fields));
    for (int tries = 0; tries < kTries; ++tries) {
      if (PyObject* work = (this->*found->call)(of, args, count); work != nullptr || PyErr_Occurred()) return work;
      if (!std::exchange(of.busy, false)) break;
      Unlocked unlocked;  // whoever has the engine's lock may be without a core, which this thread has
      engine_.wait_for_turn();
    }
    return nullptr;
  }

  int traverse(visitproc visit, void* arg) const {
    for (const nb::object& it : held_) Py_VISIT(it.ptr());
    for (const nb::object& it : used_) Py_VISIT(it.ptr());
    return 0;
  }
  // Nobody calls it any more, but a finalizer whose op ends. All is let go of at once: to let go may run code of
  // Python's, and takes() looks at all.
  void clear() {
    recording = false;
    const auto held = std::exchange(held_, {});
    const auto used = std::exchange(used_, {});
  }

 private:
  friend class WindowShortcuts<Shortcuts>;

  enum {
    kEngine,
    kTransport,
    kLine,
    kCollectives,
    kPending,
    kPreHooks,
    kPostHooks,
    kRing,
    kLanes,
    kPendingInLanes,
    kGivenUpInLanes,
    kGivenUp,
    kLaneRing,
    kPosted,
    kHeld
  };
  enum { kWork, kLaneWork, kPart, kCurrent, kUsed };

  static constexpr int kUser = 0;  // the channel of the program's own messages
  static constexpr std::int64_t kMostTag = INT32_MAX, kLeastTag = INT32_MIN;

  // A work that nobody knows of yet, and its number; of a message of a lane what the engine is to know it by, too.
  struct Started {
    nb::object work, part;
    mutable PyObject* written = nullptr;  // the tensor; null: it writes none on this rank
    mutable std::array<PyObject*, 2> tensors{};

    WorkObject& fields() const { return *reinterpret_cast<WorkObject*>(work.ptr()); }
    PyObject* known_by() const { return part ? part.ptr() : work.ptr(); }
    std::optional<View> view(PyObject* tensor, bool writes) const {
      if (writes) written = tensor;
      tensors[tensors[0] != nullptr] = tensor;
      return work ? plain_view(tensor, writes) : std::nullopt;
    }
    // Null: no memory.
    nb::object keep() const {
      if (tensors[0] == nullptr) return nb::none();
      try {
        auto kept = std::make_unique<Kept>();
        for (PyObject* tensor : tensors) {
          if (tensor != nullptr) kept->add(tensor);
        }
        return nb::cast(std::move(kept));
      } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return {};
      }
    }
    // Idempotent.
    void note_written() const {
      if (PyObject* tensor = std::exchange(written, nullptr)) note_write(tensor);
    }
  };

  // How an op is called whose record is there.
  struct Record {
    const Kind* kind;
    LineCall call;
    std::vector<PySlot> fields;
  };

  // One more is amid a post, for as long as this is there.
  class Amid {
   public:
    explicit Amid(int& posts) : posts_(posts) { ++posts_; }
    Amid(const Amid&) = delete;
    Amid& operator=(const Amid&) = delete;
    ~Amid() { --posts_; }

   private:
    int& posts_;
  };

  // An op of another thread, amid its post for as long as this is there.
  struct Posting {
    Posting(Posting*& among, const Caller& whose) : first(among), caller(whose), next(std::exchange(among, this)) {}
    Posting(const Posting&) = delete;
    Posting& operator=(const Posting&) = delete;
    ~Posting() {
      Posting** at = &first;
      while (*at != this) at = &(*at)->next;
      *at = next;
    }

    Posting*& first;
    const Caller& caller;
    Posting* next;
  };

  bool is_plain() const {
    return line() != nullptr && !refusing && !held && PyList_GET_SIZE(held_[kPreHooks].ptr()) == 0;
  }
  bool takes_elsewhere() const {
    return is_plain() && !posting && !watched() && PyThread_get_thread_ident() != thread_ && here_ == 0;
  }

  // Whether somebody hears of the end of each op, on the loop's thread, and how long it took.
  bool watched() const { return PyList_GET_SIZE(held_[kPostHooks].ptr()) != 0; }
  // False: no memory.
  bool note_call(const Started& it) const {
    const nb::object now = nb::steal(PyFloat_FromDouble(static_cast<double>(now_ns()) * 1e-9));
    if (now) it.fields().set(WorkObject::kCalled, now.ptr());
    return static_cast<bool>(now);
  }

  PyObject* line() const { return held_[kLine].ptr(); }
  Count& posted_count() const { return *nb::inst_ptr<Count>(held_[kPosted]); }
  LaneQueues& lane_queues() const { return *nb::inst_ptr<LaneQueues>(held_[kPendingInLanes]); }
  Ring& ring() const { return *nb::inst_ptr<Ring>(held_[kRing]); }
  Ring* lane_ring() const { return nb::inst_ptr<Ring>(held_[kLaneRing]); }

  bool takes(const Caller& caller) const {
    if (!(caller.elsewhere() ? takes_elsewhere() : takes())) return false;
    if (!caller.in_lane()) return true;
    PyObject* given_up = held_[kGivenUp].ptr();
    return lane_->closed.of(caller.self.ptr()) == Py_False &&
           (PyDict_GET_SIZE(given_up) == 0 || PyDict_Contains(given_up, caller.number()) == 0);
  }

  // given: null: the default.
  const Defined* find(PyObject* given) const {
    if (given == nullptr) return &operators_.front();
    for (const Defined& it : operators_) {
      if (it.op.ptr() == given) return &it;
    }
    return nullptr;
  }

  Started make(const Caller& caller, const Kind& kind, std::initializer_list<PyObject*> args) const {
    const nb::object& cls = used_[caller.in_lane() ? kLaneWork : kWork];
    WorkObject* made = new_work(reinterpret_cast<PyTypeObject*>(cls.ptr()), line(), issued);
    if (made == nullptr) return {};
    if (caller.elsewhere()) {
      made->at(WorkObject::kOp) = Py_NewRef(caller.record);
    } else {
      made->kind = kind.record.ptr();
      std::transform(args.begin(), args.end(), made->arguments.begin(), [](PyObject* it) { return Py_NewRef(it); });
    }
    if (caller.in_lane()) {
      made->at(WorkObject::kLane) = Py_NewRef(caller.words());
      made->at(WorkObject::kNumber) = Py_NewRef(caller.number());
    }
    return {nb::steal(made->object()), {}};
  }

  // post: bool post(place, Ticket, const View&, int peer, int channel, std::int64_t tag): whether it is done.
  template <typename Post>
  PyObject* message(const Caller& caller, const Kind& kind, Arguments args, Py_ssize_t count, bool written,
                    const Post& post) {
    const auto peer = count < 2 ? std::nullopt : int_within(args[1], 0, size_ - 1);
    nb::object tag = count < 3 ? nb::steal(PyLong_FromLong(0)) : nb::borrow(args[2]);
    const auto tagged = int_within(tag.ptr(), kLeastTag, kMostTag);
    if (!peer || *peer == rank_ || !tagged) return nullptr;
    Started it = make(caller, kind, {args[0], args[1], tag.ptr()});
    const std::optional<View> data = it.view(args[0], written);
    nb::object channel = nb::steal(PyLong_FromLong(kUser));
    nb::object kept = nb::steal(PyTuple_Pack(3, args[1], tag.ptr(), channel.ptr()));
    if (!data || !kept) return nullptr;
    if (caller.in_lane()) {
      auto part = reinterpret_cast<PyTypeObject*>(used_[kPart].ptr());
      it.part = nb::steal(part->tp_alloc(part, 0));
      if (!it.part) return nullptr;
    }
    const std::int64_t on_wire = caller.in_lane() ? tag_in_lane(caller.lane, *tagged) : *tagged;
    return start(caller, kind, it, args[0], kept.ptr(), data->bytes(), [&](auto& place, auto, Ticket ticket) {
      const bool done = post(place, ticket, *data, static_cast<int>(*peer), kUser, on_wire);
      return done ? static_cast<double>(now_ns()) * 1e-9 : 0.0;
    });
  }

  // As start, of an op of one rank, on the loop's thread. post: bool post(Ticket, Held&): whether it is done.
  template <typename Post>
  PyObject* start_single(const Caller& caller, const Kind& kind, const Started& it, PyObject* result, PyObject* kept,
                         std::size_t bytes, const Post& post) {
    return start_here(caller, kind, it, result, kept, bytes, [&](Ticket ticket, Held& held) {
      return post(ticket, held) ? static_cast<double>(now_ns()) * 1e-9 : 0.0;
    });
  }

  // Posts an op whose arguments are plain. kept: the numbers that the recorder keeps of it; null: it has none.
  // bytes: that it may copy before it looks whether it has to wait.
  // call: double call(place, number, Ticket), as in calls.hpp: when it was done, in seconds; 0: it is not.
  template <typename Call>
  PyObject* start(const Caller& caller, const Kind& kind, const Started& it, PyObject* result, PyObject* kept,
                  std::size_t bytes, const Call& call) {
    if (caller.elsewhere()) return start_elsewhere(caller, kind, it, result, kept, call);
    return start_here(caller, kind, it, result, kept, bytes,
                      [&](Ticket ticket, Held& held) { return hand_over(caller, ticket, held, call); });
  }

  // call: double call(Ticket, Held&).
  template <typename Call>
  PyObject* start_here(const Caller& caller, const Kind& kind, const Started& it, PyObject* result, PyObject* kept,
                       std::size_t bytes, const Call& call) {
    if (watched() && !note_call(it)) return nullptr;
    const nb::object named = name_of(caller, it);
    if (!may_go_on(caller, it, named)) return nullptr;
    const Amid amid(here_);
    double at = 0;
    try {
      const auto meanwhile = [&] { it.note_written(); };
      Unlockable held(meanwhile);
      if (bytes > kAtOnce) held.let_go();
      at = call(reinterpret_cast<Ticket>(it.known_by()), held);
    } catch (...) {  // with nothing changed
      return nullptr;
    }
    it.note_written();
    const nb::object index = at == 0 ? index_of(caller, kind) : nb::object();
    count(caller, kind, named);
    return at != 0 ? end(kind, it, result, kept, at) : posted(caller, it, index, kind.form >= 0);
  }

  // What the recorder keeps of an op's lane; null: it is of none, or no memory.
  nb::object name_of(const Caller& caller, const Started& it) const {
    if (!caller.in_lane()) return {};
    const nb::object seq = nb::steal(PyLong_FromLongLong(it.fields().seq));
    return nb::steal(seq ? PyTuple_Pack(2, seq.ptr(), caller.words()) : nullptr);
  }

  // This is the last look: to make a work may have run a finalizer, which may have done anything.
  [[gnu::always_inline]] bool may_go_on(const Caller& caller, const Started& it, const nb::object& named) const {
    return takes(caller) && issued == it.fields().seq && (!caller.in_lane() || named);
  }

  // Gives an op its number, and records it. What the rings drive out goes last, for that may run code of Python's.
  [[gnu::always_inline]] void count(const Caller& caller, const Kind& kind, const nb::object& named) {
    ++issued;
    if (caller.in_lane()) {
      ++laned;
    } else if (kind.form >= 0) {
      ++calls;
      posted_count().next();
    }
    if (recording) ring().append(kind.record.ptr());
    if (named) lane_ring()->append(named.ptr());
  }

  // The number of a collective, or of its lane; -1: it is none.
  nb::object index_of(const Caller& caller, const Kind& kind) const {
    if (kind.form < 0) return nb::steal(PyLong_FromLong(-1));
    if (caller.in_lane()) return nb::borrow(caller.number());
    return nb::steal(PyLong_FromUnsignedLongLong(posted_count().value));
  }

  // As start, on another thread than the loop's. The op is noted before the engine has it. From then on the engine uses
  // its memory, and the loop may hear of what becomes of a collective, though not of its ticket before leave(). The op
  // is counted before it goes on, for the loop may start others then. The end that is recorded has the op's number, for
  // it may come behind other types.
  template <typename Call>
  [[gnu::noinline]] PyObject* start_elsewhere(const Caller& caller, const Kind& kind, const Started& it,
                                              PyObject* result, PyObject* kept, const Call& call) {
    const bool collective = kind.form >= 0;
    const nb::object& owner = held_[collective && caller.in_lane() ? kLanes : kTransport];
    const nb::object ticket = nb::steal(PyLong_FromVoidPtr(it.work.ptr()));
    const nb::object look_after = nb::steal(PyObject_GetAttr(owner.ptr(), names().look_after));
    const std::uint64_t before = posted_count().value;
    const nb::object index = index_of(caller, kind);
    const nb::object entry = entry_of(owner, it.work, index, it), named = name_of(caller, it);
    if (!ticket || !look_after || !entry) return nullptr;
    if (!may_go_on(caller, it, named) || posted_count().value != before) return nullptr;
    const auto forget_all = [&] {
      if (collective) forget(caller, it, index);
      remove(held_[kPending], ticket);
    };
    if (PyDict_SetItem(held_[kPending].ptr(), ticket.ptr(), entry.ptr()) != 0) return nullptr;
    Elsewhere place(engine_, group_);
    const auto begin = [&] {
      const auto on = reinterpret_cast<Ticket>(it.work.ptr());
      caller.in_lane() ? call(place, caller.lane, on) : call(place, group_, on);
    };
    if (collective) {
      if (!note(caller, it, index)) return remove(held_[kPending], ticket), nullptr;
      try {
        begin();
      } catch (...) {  // with nothing changed
      }
      caller.busy = !place.placed();
      if (caller.busy) return forget_all(), nullptr;
    }
    count(caller, kind, named);
    const Posting amid(elsewhere_, caller);
    double at = 0;
    try {
      Unlocked unlocked;
      if (!collective) begin();
      at = place.finish();
    } catch (const std::exception& error) {  // of a message, which was not sent
      forget_all();
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
    it.note_written();
    if (at != 0) {
      forget_all();
      return end_elsewhere(kind, it, result, kept, at);
    }
    // In two steps, for a signal handler may raise as soon as code of Python's runs.
    const nb::object as = nb::steal(PyTuple_Pack(4, caller.self.ptr(), it.work.ptr(), look_after.ptr(), index.ptr()));
    const bool given = as && PyObject_SetAttr(caller.keeper, names().posted_as, as.ptr()) == 0;
    const auto told = nb::steal(given ? PyObject_CallMethodNoArgs(caller.keeper, names().kept) : nullptr);
    {
      Unlocked unlocked;
      place.leave();
    }
    return told ? Py_NewRef(it.work.ptr()) : nullptr;
  }

  // The engine is done with it; if the loop has ended it meanwhile, that is how it has ended.
  PyObject* end_elsewhere(const Kind& kind, const Started& it, PyObject* result, PyObject* kept, double at) {
    const nb::object row = row_of(kind, it, kept != nullptr ? kept : Py_None, at);
    if (!row) return nullptr;
    if (!it.fields().is_done()) {
      it.fields().complete(result);
      if (recording) ring().append(row.ptr());
    }
    return Py_NewRef(it.work.ptr());
  }

  // What the recorder keeps of an op that has ended. Null: no memory.
  static nb::object row_of(const Kind& kind, const Started& it, PyObject* kept, double at) {
    const nb::object seq = nb::steal(PyLong_FromLongLong(it.fields().seq)), when = nb::steal(PyFloat_FromDouble(at));
    if (!seq || !when) return {};
    return nb::steal(PyTuple_Pack(6, seq.ptr(), kind.record.ptr(), when.ptr(), kept, Py_None, Py_None));
  }

  template <typename Call>
  double hand_over(const Caller& caller, Ticket ticket, Held& held, const Call& call) {
    if (!caller.in_lane()) {
      Holding<Engine> place{engine_, held};
      return call(place, group_, ticket);
    }
    InLanes lanes{engine_, group_};
    Holding<InLanes> place{lanes, held};
    return call(place, caller.lane, ticket);
  }

  PyObject* end(const Kind& kind, const Started& it, PyObject* result, PyObject* kept, double at) {
    it.fields().complete(result);
    if (recording && kept == nullptr) ring().append(at);
    if (recording && kept != nullptr) {
      const nb::object row = row_of(kind, it, kept, at);
      if (!row) return nullptr;
      ring().append(row.ptr());
    }
    if (watched()) {
      PyObject* given[] = {line(), it.work.ptr()};
      nb::object told = nb::steal(PyObject_VectorcallMethod(names().ended_at_once, given, 2, nullptr));
      if (!told) return nullptr;
    }
    return Py_NewRef(it.work.ptr());
  }

  // The engine has the op, and uses its memory: it is kept before anything else can happen.
  // index: the number of a collective, or of its lane; -1: it is none.
  PyObject* posted(const Caller& caller, const Started& it, const nb::object& index, bool collective) {
    const nb::object& owner = held_[collective && caller.in_lane() ? kLanes : kTransport];
    nb::object ticket = nb::steal(PyLong_FromVoidPtr(it.known_by()));
    if (!ticket || !set_pending(ticket, owner, it.work, index, it) || (collective && !note(caller, it, index))) {
      Py_INCREF(it.work.ptr());  // for good, and with it the tensors
      Py_XINCREF(it.part.ptr());
      return nullptr;
    }
    if (it.part && !adopt(caller, it, ticket, index)) return nullptr;
    nb::object look_after = nb::steal(PyObject_GetAttr(owner.ptr(), names().look_after));
    if (!look_after) return nullptr;
    PyObject* given[] = {caller.self.ptr(), it.work.ptr(), look_after.ptr(), index.ptr()};
    return PyObject_VectorcallMethod(names().posted, given, 4, nullptr);
  }

  // Have the outcome told to an object.
  bool set_pending(const nb::object& ticket, const nb::object& owner, const nb::object& told, const nb::object& index,
                   const Started& it) {
    const nb::object entry = entry_of(owner, told, index, it);
    return entry && PyDict_SetItem(held_[kPending].ptr(), ticket.ptr(), entry.ptr()) == 0;
  }
  static nb::object entry_of(const nb::object& owner, const nb::object& told, const nb::object& index,
                             const Started& it) {
    const nb::object kept = it.keep();
    return nb::steal(index && kept ? PyTuple_Pack(4, owner.ptr(), told.ptr(), index.ptr(), kept.ptr()) : nullptr);
  }

  // A collective is pending: among the communicator's, or behind those of its lane.
  bool note(const Caller& caller, const Started& it, const nb::object& index) {
    if (!caller.in_lane()) return PyDict_SetItem(held_[kCollectives].ptr(), index.ptr(), it.work.ptr()) == 0;
    try {
      lane_queues().add(caller.lane, it.work);
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
      return false;
    }
    return true;
  }

  // It is pending no more.
  void forget(const Caller& caller, const Started& it, const nb::object& index) {
    if (!caller.in_lane()) return remove(held_[kCollectives], index);
    if (lane_queues().remove(caller.lane, it.work)) remove(held_[kGivenUpInLanes], index);  // the last of its lane
  }
  static void remove(const nb::object& from, const nb::object& key) {
    if (PyDict_Contains(from.ptr(), key.ptr()) == 1) PyDict_DelItem(from.ptr(), key.ptr());
  }

  // From now on a message of a lane is as Python starts it: its part of the op's run is told the outcome.
  bool adopt(const Caller& caller, const Started& it, const nb::object& ticket, const nb::object& index) {
    PyObject* given[] = {caller.self.ptr(), it.work.ptr(), Py_NewRef(it.part.ptr())};
    if (!nb::steal(PyObject_VectorcallMethod(names().adopted, given, 3, nullptr))) return false;  // kept for good
    const int there = PyDict_Contains(held_[kPending].ptr(), ticket.ptr());
    if (there < 0 || (there > 0 && !set_pending(ticket, held_[kTransport], it.part, index, it))) return false;
    Py_DECREF(it.part.ptr());
    return true;
  }

  Engine& engine_;
  const std::uint32_t group_;
  const int rank_, size_;
  const unsigned long thread_;
  std::array<nb::object, kHeld> held_;
  std::array<nb::object, kUsed> used_;
  std::optional<LaneSlots> lane_;
  Kind all_reduce_, all_gather_single_, all_to_all_single_, barrier_, broadcast_, recv_, reduce_scatter_single_, send_;
  Kind get_, put_, put_signal_, signal_, wait_signal_;  // of windows
  std::vector<Defined> operators_;
  std::vector<Record> records_;
  bool windows_ = false;
  int here_ = 0;                  // posts that the loop is amid, one within the other
  Posting* elsewhere_ = nullptr;  // those of other threads
};

// ----------------------------------------------------------------------------------------------------- what is called

using OfWindow = WindowShortcuts<Shortcuts>;

template <LineCall method>
PyObject* start_on_line(PyObject* shortcuts, PyObject* self, PyTypeObject* cls, Arguments args, Py_ssize_t count) {
  Shortcuts& it = *nb::inst_ptr<Shortcuts>(shortcuts);
  if (!it.takes()) return nullptr;
  const Caller caller = it.caller(shortcuts, self, cls);
  return caller ? (it.*method)(caller, args, count) : nullptr;
}

template <PyObject* (OfWindow::*method)(Arguments, Py_ssize_t)>
PyObject* start_on_window(PyObject* shortcuts, PyObject*, PyTypeObject*, Arguments args, Py_ssize_t count) {
  OfWindow& it = *nb::inst_ptr<OfWindow>(shortcuts);
  return it.takes() ? (it.*method)(args, count) : nullptr;
}

template <LineCall call, typename... Fields>
constexpr Signature on_line(const char* name, Kind Shortcuts::* kind, Fields... fields) {
  return {name, kind, call, start_on_line<call>, {fields...}};
}

template <PyObject* (OfWindow::*call)(Arguments, Py_ssize_t), typename... Fields>
constexpr Signature on_window(const char* name, Kind Shortcuts::* kind, Fields... fields) {
  return {name, kind, nullptr, start_on_window<call>, {fields...}};
}

std::span<const Signature> Shortcuts::signatures() {
  using It = Shortcuts;
  static constexpr Signature all[] = {
      on_line<&It::all_reduce>("all_reduce", &It::all_reduce_, "tensor", "op"),
      on_line<&It::all_gather_single>("all_gather_single", &It::all_gather_single_, "output", "input"),
      on_line<&It::all_to_all_single>("all_to_all_single", &It::all_to_all_single_, "output", "input"),
      on_line<&It::barrier>("barrier", &It::barrier_),
      on_line<&It::broadcast>("broadcast", &It::broadcast_, "tensor", "root"),
      on_line<&It::recv>("recv", &It::recv_, "tensor", "src", "tag", "channel"),
      on_line<&It::reduce_scatter_single>("reduce_scatter_single", &It::reduce_scatter_single_, "output", "input",
                                          "op"),
      on_line<&It::send>("send", &It::send_, "tensor", "dst", "tag", "channel"),
      on_window<&OfWindow::get>("get", &It::get_, "tensor", "src", "offset"),
      on_window<&OfWindow::put>("put", &It::put_, "tensor", "dst", "offset"),
      on_window<&OfWindow::put_signal>("put_signal", &It::put_signal_, "tensor", "dst", "offset"),
      on_window<&OfWindow::signal>("signal", &It::signal_, "dst"),
      on_window<&OfWindow::wait_signal>("wait_signal", &It::wait_signal_, "src")};
  return all;
}

PyTypeObject* method_type = nullptr;

// Stands for a method of Python's in the class of communicators, lanes or windows. It calls that one for what it does
// not take.
struct Method {
  PyObject_HEAD vectorcallfunc call;
  PyObject* function;
  Start start;
  Py_ssize_t arguments;
  PyObject* names[kArguments];  // interned
  PyTypeObject* cls;            // whose instances, and its subclasses', have the slot; borrowed: it has the function
  PySlot shortcuts;
  PyTypeObject* type;  // of the shortcuts: another plug-in's, or None, are not looked at
};

// The arguments in their order, at least so many as there are names; false: there are others, or too many.
bool fill(const Method& it, Arguments args, Py_ssize_t count, PyObject* keywords, PyObject** filled) {
  if (count > it.arguments) return false;
  std::copy(args, args + count, filled);
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const auto end = it.names + it.arguments;
    const auto found = std::find(it.names, end, PyTuple_GET_ITEM(keywords, i));
    if (found == end || filled[found - it.names] != nullptr) return false;
    filled[found - it.names] = args[count + i];
  }
  return true;
}

PyObject* call_start(PyObject* self, Arguments args, size_t flagged, PyObject* keywords) {
  auto it = reinterpret_cast<Method*>(self);
  const Py_ssize_t count = PyVectorcall_NARGS(flagged);
  PyObject* found = count > 0 && PyObject_TypeCheck(args[0], it->cls) ? it->shortcuts.of(args[0]) : nullptr;
  if (found != nullptr && Py_IS_TYPE(found, it->type)) {
    PyObject* filled[kArguments + 1] = {};
    if (fill(*it, args + 1, count - 1, keywords, filled)) {
      const Py_ssize_t given = std::find(filled, filled + kArguments, nullptr) - filled;
      const bool gap = std::any_of(filled + given, filled + kArguments, [](PyObject* it) { return it != nullptr; });
      PyObject* work = nullptr;
      try {
        if (!gap) work = it->start(found, args[0], it->cls, filled, given);
      } catch (const std::bad_alloc&) {  // before the engine has anything
      }
      if (work != nullptr || PyErr_Occurred()) return work;
    }
  }
  return PyObject_Vectorcall(it->function, args, flagged, keywords);
}

void method_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Py_CLEAR(reinterpret_cast<Method*>(self)->function);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

int method_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<Method*>(self)->function);
  return 0;
}

int method_clear(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Method*>(self)->function);
  return 0;
}

PyObject* method_bind(PyObject* self, PyObject* instance, PyObject*) {
  return instance == nullptr || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

// Its name, documentation, annotations and the like are the function's; and that is what `inspect` looks at.
PyObject* method_attribute(PyObject* self, PyObject* name) {
  PyObject* function = reinterpret_cast<Method*>(self)->function;
  if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(function);
  if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0) return PyObject_GenericGetAttr(self, name);
  return PyObject_GetAttr(function, name);
}

PyMemberDef method_members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, call), READONLY, nullptr},
                                {nullptr, 0, 0, 0, nullptr}};

PyTypeObject* make_method_type() {
  PyType_Slot slots[] = {slot(Py_tp_dealloc, method_dealloc), slot(Py_tp_traverse, method_traverse),
                         slot(Py_tp_clear, method_clear),     slot(Py_tp_call, PyVectorcall_Call),
                         slot(Py_tp_descr_get, method_bind),  slot(Py_tp_getattro, method_attribute),
                         slot(Py_tp_members, method_members), {0, nullptr}};
  constexpr unsigned flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                             Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  PyType_Spec spec = {"aiocomms_ucx._engine.Method", sizeof(Method), 0, flags, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// In the place of a method of that name; of one that there is no shortcut for, the method itself.
template <typename Shortcut>
nb::object method_of(nb::handle cls, nb::handle function) {
  const auto name = nb::cast<std::string>(function.attr("__name__"));
  for (const Signature& it : Shortcuts::signatures()) {
    if (name != it.name || (it.call == nullptr) != std::is_same_v<Shortcut, OfWindow>) continue;
    const PySlot shortcuts(cls, "_shortcuts");
    auto method = PyObject_GC_New(Method, method_type);
    if (method == nullptr) nb::raise_python_error();
    method->call = call_start;
    method->function = function.inc_ref().ptr();
    method->start = it.start;
    method->arguments = 0;
    for (; method->arguments < kArguments && it.fields[method->arguments] != nullptr; ++method->arguments) {
      method->names[method->arguments] = PyUnicode_InternFromString(it.fields[method->arguments]);
    }
    method->cls = reinterpret_cast<PyTypeObject*>(cls.ptr());
    method->shortcuts = shortcuts;
    method->type = reinterpret_cast<PyTypeObject*>(nb::type<Shortcut>().ptr());
    PyObject_GC_Track(method);
    return nb::steal(reinterpret_cast<PyObject*>(method));
  }
  return nb::borrow(function);
}

template <typename T>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<T>(self)->traverse(visit, arg) : 0;
}

template <typename T>
int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<T>(self)->clear();
  return 0;
}

template <typename T>
std::array<PyType_Slot, 3> collected() {
  return {slot(Py_tp_traverse, traverse<T>), slot(Py_tp_clear, clear<T>), {0, nullptr}};
}

}  // namespace

void define_shortcuts(nb::module_& module) {
  method_type = make_method_type();
  if (method_type == nullptr) nb::raise_python_error();
  static auto of_ring = collected<Ring>(), of_shortcuts = collected<Shortcuts>(), of_window = collected<OfWindow>();
  static auto of_queues = collected<LaneQueues>();

  nb::class_<Ring>(module, "Ring", nb::type_slots(of_ring.data()))
      .def(nb::init<std::size_t>(), nb::arg("capacity"))
      .def(
          "append", [](Ring& ring, nb::handle entry) { ring.append(entry.ptr()); }, nb::arg("entry").none(),
          nb::sig("def append(self, entry: object, /) -> None"))
      .def("__len__", &Ring::size)
      .def(
          "__iter__", [](Ring& ring) { return nb::iter(ring.copy()); },
          nb::sig("def __iter__(self) -> collections.abc.Iterator[object]"));
  nb::class_<Count>(module, "Count").def(nb::init<>()).def_ro("value", &Count::value).def("next", &Count::next);
  nb::class_<LaneQueues>(module, "LaneQueues", nb::type_slots(of_queues.data()))
      .def(nb::init<>())
      .def("add", &LaneQueues::add, nb::sig("def add(self, lane: int, work: object, /) -> None"))
      .def("remove", &LaneQueues::remove, nb::sig("def remove(self, lane: int, work: object, /) -> bool"))
      .def("__contains__", &LaneQueues::contains, nb::sig("def __contains__(self, lane: int, /) -> bool"))
      .def("__len__", &LaneQueues::size);
  nb::class_<OfWindow>(module, "WindowShortcuts", nb::type_slots(of_window.data()));
  nb::class_<Shortcuts>(module, "Shortcuts", nb::type_slots(of_shortcuts.data()))
      .def(nb::init<Engine&, std::uint32_t, int, int, const nb::dict&, const nb::list&, nb::object, nb::object,
                    std::size_t>(),
           nb::sig("def __init__(self, engine: Engine, group: int, rank: int, size: int, "
                   "kinds: dict[str, tuple[type, int]], operators: list[tuple[object, int, int]], "
                   "transport: object, line: object, entries: int, /) -> None"))
      .def_static("fields", &work_fields, nb::sig("def fields() -> type"))
      .def_ro("issued", &Shortcuts::issued)
      .def_ro("laned", &Shortcuts::laned)
      .def_rw("calls", &Shortcuts::calls)
      .def_rw("refusing", &Shortcuts::refusing)
      .def_rw("posting", &Shortcuts::posting)
      .def_rw("held", &Shortcuts::held)
      .def_rw("recording", &Shortcuts::recording)
      .def("begin", &Shortcuts::begin, nb::arg("kind"), nb::arg("counted"), nb::arg("lane").none(),
           nb::sig("def begin(self, kind: type, counted: bool, lane: str | None, /) -> int"))
      .def("end", &Shortcuts::note_end, nb::sig("def end(self, entry: object, /) -> None"))
      .def_prop_ro("ring", &Shortcuts::rings, nb::sig("def ring(self) -> Ring"))
      .def_prop_ro("lanes", &Shortcuts::lanes, nb::sig("def lanes(self) -> Ring"))
      .def_prop_ro("elsewhere", &Shortcuts::elsewhere)
      .def("elsewhere_in", &Shortcuts::elsewhere_in, nb::arg("lane"))
      .def_static(
          "method", [](nb::handle cls, nb::handle function) { return method_of<Shortcuts>(cls, function); },
          nb::sig("def method(of: type, function: collections.abc.Callable[..., object], /) -> "
                  "collections.abc.Callable[..., object]"))
      .def_static(
          "window_method", [](nb::handle cls, nb::handle function) { return method_of<OfWindow>(cls, function); },
          nb::sig("def window_method(of: type, function: collections.abc.Callable[..., object], /) -> "
                  "collections.abc.Callable[..., object]"))
      .def("use", &Shortcuts::use, nb::arg("work"), nb::arg("lane_work"), nb::arg("part"), nb::arg("op_result"),
           nb::kw_only(), nb::arg("windows"),
           nb::sig("def use(self, work: type, lane_work: type, part: type, op_result: object, *, windows: bool) "
                   "-> None"))
      .def("know", &Shortcuts::know, nb::sig("def know(self, lane: type, /) -> None"))
      .def("follow", &Shortcuts::follow, nb::sig("def follow(self, current: object, /) -> None"))
      .def(
          "post",
          [](Shortcuts& of, nb::handle target, nb::handle record, nb::handle keeper) {
            PyObject* work = of.post(nb::find(of).ptr(), target.ptr(), record.ptr(), keeper.ptr());
            if (work == nullptr && PyErr_Occurred()) nb::raise_python_error();
            return work != nullptr ? nb::steal(work) : nb::none();
          },
          nb::sig("def post(self, target: object, record: object, keeper: object, /) -> typing.Any"))
      .def(
          "window",
          [](Shortcuts& of, nb::object comm, nb::object info) {
            if (!of.windows()) return nb::object(nb::none());
            return nb::cast(OfWindow(nb::find(of), std::move(comm), std::move(info)));
          },
          nb::sig("def window(self, comm: object, info: object, /) -> WindowShortcuts | None"));
}

}  // namespace aiocomms
