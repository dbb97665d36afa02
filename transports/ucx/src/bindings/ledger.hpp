// The native ledger of a communicator. It counts the ops, records them in rings, and starts those that are plain.
//
// Communicators, lanes and windows have native methods, which start a plain op without a frame of Python's. An op is
// plain if its call has plain tensors and numbers, no hook comes before it, and nothing refuses ops. The native code
// then does, step by step, the same as Communicator._issue and UcxTransport.post. For a lane these are Lane._issue and
// LaneCollectives.post.
//
// The Python code stays the reference. The native code does nothing for a call that is not plain. The method of the
// same name then runs, and makes every error. Python also continues with an op that does not end within its call.
//
// Nothing changes before the engine has an op. The op is counted and recorded right after that. No Python code runs
// between the last check of the call and that moment. Other threads may run, because the engine releases the
// interpreter's lock while it waits (engine/held.hpp). They start no op meanwhile, so the number is still free.
//
// Other threads than the loop's start ops too (Shortcuts::post), but not during a post of the loop. Such a thread keeps
// the interpreter's lock while an op gets its number and its record. It also keeps it while a collective gets its place
// in the engine. So numbers, records and places have one order, and the loop sees no partial state.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/calls.hpp"
#include "bindings/count.hpp"
#include "bindings/lane_queues.hpp"
#include "bindings/lanes.hpp"
#include "bindings/names.hpp"
#include "bindings/plain.hpp"
#include "bindings/ring.hpp"
#include "bindings/signatures.hpp"
#include "bindings/slots.hpp"
#include "bindings/started.hpp"
#include "bindings/tensors.hpp"
#include "bindings/unlocked.hpp"
#include "bindings/window_shortcuts.hpp"
#include "bindings/work.hpp"
#include "engine/elsewhere.hpp"
#include "engine/engine.hpp"

namespace aiocomms {

namespace nb = nanobind;

// A copy of so few bytes takes less time than releasing and retaking the interpreter's lock.
inline constexpr std::size_t kAtOnce = 4096;
inline constexpr int kTries = 3;  // of another thread to take the engine's lock while it holds the interpreter's
inline constexpr int kUser = 0;   // the channel of the program's own messages

inline double now() { return static_cast<double>(now_ns()) * 1e-9; }

// Calls a function when its scope ends.
template <typename End>
struct AtEnd {
  End end;
  ~AtEnd() { end(); }
};

class Shortcuts {
 public:
  Shortcuts(Engine& engine, std::uint32_t group, int rank, int size, const nb::dict& kinds, const nb::list& operators,
            nb::object transport, nb::object line, std::size_t entries)
      : engine_(engine),
        group_(group),
        plain_(rank, size, operators),
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
    const auto add = [&]<std::size_t i>() {
      const nb::object found = kinds[kSignatures[i].name];
      kinds_[i] = {nb::object(found[0]), nb::cast<int>(found[1])};
      if constexpr (kSignatures[i].of != Of::kWindows) records_.push_back(Record::of<Name{i}>(kinds_[i]));
    };
    [&]<std::size_t... all>(std::index_sequence<all...>) {
      (add.template operator()<all>(), ...);
    }(std::make_index_sequence<kNames>());
  }

  nb::object rings() const { return held_[kRing]; }
  nb::object lanes() const { return held_[kLaneRing]; }
  // The number of other threads' ops between their first step and their last: those of a lane, or all.
  std::ptrdiff_t elsewhere(std::optional<std::uint64_t> lane) const {
    return std::count_if(elsewhere_.begin(), elsewhere_.end(),
                         [&](const Caller* it) { return !lane || (it->in_lane() && it->lane == *lane); });
  }

  // The numbers of all ops, of ops of lanes, and of collectives outside lanes.
  long long issued = 0, laned = 0, calls = 0;
  bool refusing = false;  // ops are refused
  bool posting = false;   // The loop is between an op's number and its record. No other thread counts then.
  bool held = false;      // collectives wait before they go to the engine
  bool recording = true;  // the ring records calls and ends

  // Numbers and records an op that Python starts. lane: its key in words, or None outside lanes.
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
  // The classes of works, with the fields of WorkObject, and the class of a lane's pending message. op_result: see
  // WorkObject, a constant of a module.
  void use(nb::object work, nb::object lane_work, nb::object part, nb::handle op_result) {
    WorkObject::op_result = op_result.ptr();
    used_ = {std::move(work), std::move(lane_work), std::move(part)};
  }
  // Sets the class of lanes.
  void know(nb::handle lane) { lane_ = LaneSlots(lane); }
  // From now on ops of the communicator use its current lane.
  void follow(nb::object current) { used_[kCurrent] = std::move(current); }

  // Returns the owner of an op that is called on `self`, with these shortcuts. A lane is asked for its number before
  // its first op. False: there is no owner, perhaps with an exception.
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

  // Starts an op if its call is plain. Returns its work or null. Null without an exception means that the op is not
  // taken. window: null for other ops.
  template <Name name>
  PyObject* start(const Caller& caller, const WindowShortcuts* window, Arguments args, Py_ssize_t count) {
    constexpr const Signature& as = signature_of(name);
    constexpr int rank = std::max(as.index_of(Role::kRank), as.index_of(Role::kPeer));
    Plain call;
    if (!plain_.fill<name>(args, count, call)) return nullptr;
    Started it{call, kinds_[static_cast<std::size_t>(name)]};
    it.work = make(caller, it, window);
    if (!it.work || !plain_.look<name>(call)) return nullptr;
    if constexpr (as.has(Role::kOffset)) {
      if (call.tensors[0].dtype != window->dtype) return nullptr;
    }
    if (window != nullptr && !window->open()) return nullptr;
    if constexpr (rank >= 0) it.numbers = nb::borrow(call.given[rank]);
    if constexpr (as.of == Of::kMessages) {
      it.numbers = nb::steal(PyTuple_Pack(3, call.given[1], call.given[2], user_.ptr()));
      if (!it.numbers || (caller.in_lane() && !make_part(it))) return nullptr;
      if (caller.in_lane()) call.number = tag_in_lane(caller.lane, call.number);
    }
    it.result = is_tensor(as.arguments[0].role) ? call.given[0] : Py_None;
    const auto post = [&](auto& place, auto number, Ticket ticket) { return hand<name>(place, number, ticket, call); };
    if constexpr (as.of != Of::kWindows) {
      if (caller.elsewhere()) return start_elsewhere(caller, it, post);
    }
    return start_here(caller, it, [&](Ticket ticket, Held& held) {
      Holding<Engine> engine{engine_, held};
      if constexpr (as.of == Of::kWindows) return post(engine, window->number, ticket);
      if constexpr (as.of == Of::kCollectives) {
        InLanes lanes{engine_, group_};
        Holding<InLanes> place{lanes, held};
        if (caller.in_lane()) return post(place, caller.lane, ticket);
      }
      return post(engine, group_, ticket);
    });
  }

  bool takes() const { return is_plain() && PyThread_get_thread_ident() == thread_; }

  // Starts an op that another thread than the loop's has called on target, by its record. Returns its work. keeper
  // receives a pending op by _posted_as and _kept(), before its end can become known.
  PyObject* post(PyObject* own, PyObject* target, PyObject* record, PyObject* keeper);

  int traverse(visitproc visit, void* arg) const {
    for (const nb::object& it : held_) Py_VISIT(it.ptr());
    for (const nb::object& it : used_) Py_VISIT(it.ptr());
    return 0;
  }
  // Only a finalizer may still call it, when its op ends. All references are released together. A release may run
  // Python code, and takes() reads all of them.
  void clear() {
    recording = false;
    const auto held = std::exchange(held_, {});
    const auto used = std::exchange(used_, {});
  }

 private:
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

  // The call of an op whose record exists.
  struct Record {
    template <Name name>
    static Record of(const Kind& kind) {
      Record record{kind.record.ptr(), &Shortcuts::start<name>, {}, {}};
      for (const Argument& it : signature_of(name).arguments) {
        if (it.name != nullptr) record.fields.emplace_back(kind.record, it.name);
      }
      if (signature_of(name).of == Of::kMessages) record.channel.emplace(kind.record, "channel");
      return record;
    }

    PyObject* type;
    PyObject* (Shortcuts::*start)(const Caller&, const WindowShortcuts*, Arguments, Py_ssize_t);
    std::vector<PySlot> fields;     // in the order of the method's arguments
    std::optional<PySlot> channel;  // empty: it is not a message
  };

  bool is_plain() const {
    return line() != nullptr && !refusing && !held && PyList_GET_SIZE(held_[kPreHooks].ptr()) == 0;
  }
  bool takes_elsewhere() const {
    return is_plain() && !posting && !watched() && PyThread_get_thread_ident() != thread_ && here_ == 0;
  }

  // Whether a hook on the loop's thread gets the end and the duration of each op.
  bool watched() const { return PyList_GET_SIZE(held_[kPostHooks].ptr()) != 0; }
  // False: no memory.
  bool note_call(const Started& it) const {
    const nb::object called = nb::steal(PyFloat_FromDouble(now()));
    if (called) it.fields().set(WorkObject::kCalled, called.ptr());
    return static_cast<bool>(called);
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

  // Makes a work with the arguments of its record. Null: no memory.
  nb::object make(const Caller& caller, const Started& it, const WindowShortcuts* window) const {
    const nb::object& cls = used_[caller.in_lane() ? kLaneWork : kWork];
    WorkObject* made = new_work(reinterpret_cast<PyTypeObject*>(cls.ptr()), line(), issued);
    if (made == nullptr) return {};
    if (caller.elsewhere()) {
      made->at(WorkObject::kOp) = Py_NewRef(caller.record);
    } else {
      made->kind = it.kind.record.ptr();
      auto next = made->arguments.begin();
      if (window != nullptr) *next++ = Py_NewRef(window->info.ptr());
      std::transform(it.call.given.begin(), it.call.given.end(), next, [](PyObject* one) { return Py_XNewRef(one); });
    }
    if (caller.in_lane()) {
      made->at(WorkObject::kLane) = Py_NewRef(caller.words());
      made->at(WorkObject::kNumber) = Py_NewRef(caller.number());
    }
    return nb::steal(made->object());
  }
  // False: no memory.
  bool make_part(Started& it) const {
    auto part = reinterpret_cast<PyTypeObject*>(used_[kPart].ptr());
    it.part = nb::steal(part->tp_alloc(part, 0));
    return static_cast<bool>(it.part);
  }

  // Passes an op to the engine. place: an Engine or a class with its methods. number: the communicator's, the lane's or
  // the window's. Returns when the op was done, in seconds. 0: it is not done.
  template <Name name, typename Place, typename Number>
  double hand(Place& place, [[maybe_unused]] Number number, Ticket ticket, const Plain& call) const {
    const int form = kinds_[static_cast<std::size_t>(name)].form;
    const auto size = static_cast<std::size_t>(plain_.size());
    const auto& [first, second] = call.tensors;
    const auto how = [&] { return Reducing(first.dtype, call.op->number, 1.0); };
    if constexpr (name == Name::kAllGatherSingle) {
      return call_all_gather(place, ticket, number, form, second, cut(first, size));
    } else if constexpr (name == Name::kAllReduce) {
      return call_all_reduce(place, ticket, number, form, first, how());
    } else if constexpr (name == Name::kAllToAllSingle) {
      return call_all_to_all(place, ticket, number, form, cut(second, size), cut(first, size), true);
    } else if constexpr (name == Name::kBarrier) {
      return call_barrier(place, ticket, number, form, 0);
    } else if constexpr (name == Name::kBroadcast) {
      return call_broadcast(place, ticket, number, form, first, call.rank);
    } else if constexpr (name == Name::kReduceScatterSingle) {
      return call_reduce_scatter(place, ticket, number, form, cut(second, size), first, how());
    } else {
      return hand_single<name>(place, number, ticket, call) ? now() : 0;
    }
  }

  // The same for an op that not every rank calls. Returns whether it is done.
  template <Name name, typename Place, typename Number>
  bool hand_single(Place& place, [[maybe_unused]] Number number, Ticket ticket, const Plain& call) const {
    const View& it = call.tensors[0];
    if constexpr (signature_of(name).of == Of::kMessages) {
      const auto post = [&](auto... where) {
        return name == Name::kSend ? place.send(where...) : place.recv(where...);
      };
      return post(ticket, group_, it.data, it.bytes(), call.rank, kUser, call.number, static_cast<int>(it.dtype));
    } else if constexpr (signature_of(name).has(Role::kOffset)) {
      constexpr auto method = [] {
        if constexpr (name == Name::kGet) return &Engine::get;
        if constexpr (name == Name::kPut) return &Engine::put;
        if constexpr (name == Name::kPutSignal) return &Engine::put_signal;
      }();
      const auto offset = static_cast<std::uint64_t>(call.number) * size_of(it.dtype);
      return place.call(method, ticket, group_, number, call.rank, offset, it.data, it.bytes());
    } else {
      constexpr auto method = name == Name::kSignal ? &Engine::signal : &Engine::wait_signal;
      return place.call(method, ticket, group_, number, call.rank);
    }
  }

  // call: double call(Ticket, Held&).
  template <typename Call>
  PyObject* start_here(const Caller& caller, const Started& it, const Call& call) {
    if (watched() && !note_call(it)) return nullptr;
    const nb::object named = name_of(caller, it);
    if (!may_go_on(caller, it, named)) return nullptr;
    ++here_;
    const AtEnd posted_here{[this] { --here_; }};
    double at = 0;
    try {
      const auto meanwhile = [&] { it.call.note_written(); };
      Unlockable held(meanwhile);
      if (it.call.bytes() > kAtOnce) held.let_go();
      at = call(reinterpret_cast<Ticket>(it.known_by()), held);
    } catch (...) {  // Nothing has changed.
      return nullptr;
    }
    it.call.note_written();
    const nb::object index = at == 0 ? index_of(caller, it) : nb::object();
    count(caller, it, named);
    return at != 0 ? end(it, at) : posted(caller, it, index);
  }

  // The recorder's entry for an op of a lane. Null: the op has no lane, or there is no memory.
  nb::object name_of(const Caller& caller, const Started& it) const {
    if (!caller.in_lane()) return {};
    const nb::object seq = nb::steal(PyLong_FromLongLong(it.fields().seq));
    return nb::steal(seq ? PyTuple_Pack(2, seq.ptr(), caller.words()) : nullptr);
  }

  // This is the last check. Making a work may have run a finalizer, which may have changed anything.
  [[gnu::always_inline]] bool may_go_on(const Caller& caller, const Started& it, const nb::object& named) const {
    return takes(caller) && issued == it.fields().seq && (!caller.in_lane() || named);
  }

  // Numbers and records an op. The entries that the rings drop are released last, because that may run Python code.
  [[gnu::always_inline]] void count(const Caller& caller, const Started& it, const nb::object& named) {
    ++issued;
    if (caller.in_lane()) {
      ++laned;
    } else if (it.collective()) {
      ++calls;
      posted_count().next();
    }
    if (recording) ring().append(it.kind.record.ptr());
    if (named) lane_ring()->append(named.ptr());
  }

  // The number of a collective, or of its lane. -1: it is not a collective.
  nb::object index_of(const Caller& caller, const Started& it) const {
    if (!it.collective()) return nb::steal(PyLong_FromLong(-1));
    if (caller.in_lane()) return nb::borrow(caller.number());
    return nb::steal(PyLong_FromUnsignedLongLong(posted_count().value));
  }

  // Like start_here, on another thread than the loop's.
  //
  // The op is noted before the engine has it. From then on the engine uses its memory. The loop may receive reports
  // about a collective, but none about its ticket before leave(). The op is counted before it continues, because the
  // loop may then start others. The recorded end has the op's number, because ends of other types may come before it.
  template <typename Call>
  [[gnu::noinline]] PyObject* start_elsewhere(const Caller& caller, const Started& it, const Call& call) {
    const bool collective = it.collective();
    const nb::object& owner = held_[collective && caller.in_lane() ? kLanes : kTransport];
    const nb::object ticket = nb::steal(PyLong_FromVoidPtr(it.work.ptr()));
    const nb::object look_after = nb::steal(PyObject_GetAttr(owner.ptr(), names().look_after));
    const std::uint64_t before = posted_count().value;
    const nb::object index = index_of(caller, it);
    const nb::object entry = it.entry(owner, it.work, index), named = name_of(caller, it);
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
      } catch (...) {  // Nothing has changed.
      }
      caller.busy = !place.placed();
      if (caller.busy) return forget_all(), nullptr;
    }
    count(caller, it, named);
    elsewhere_.push_back(&caller);
    const AtEnd posted_elsewhere{[&] { std::erase(elsewhere_, &caller); }};
    double at = 0;
    try {
      Unlocked unlocked;
      if (!collective) begin();
      at = place.finish();
    } catch (const std::exception& error) {  // The op is a message that was not sent.
      forget_all();
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
    it.call.note_written();
    if (at != 0) {
      forget_all();
      return end_elsewhere(it, at);
    }
    // There are two steps, because a signal handler may raise as soon as Python code runs.
    const nb::object as = nb::steal(PyTuple_Pack(4, caller.self.ptr(), it.work.ptr(), look_after.ptr(), index.ptr()));
    const bool given = as && PyObject_SetAttr(caller.keeper, names().posted_as, as.ptr()) == 0;
    const auto told = nb::steal(given ? PyObject_CallMethodNoArgs(caller.keeper, names().kept) : nullptr);
    {
      Unlocked unlocked;
      place.leave();
    }
    return told ? Py_NewRef(it.work.ptr()) : nullptr;
  }

  // The engine has finished the op. If the loop has ended it meanwhile, the loop's outcome counts.
  PyObject* end_elsewhere(const Started& it, double at) {
    const nb::object row = it.row(at);
    if (!row) return nullptr;
    if (!it.fields().is_done()) {
      it.fields().complete(it.result);
      if (recording) ring().append(row.ptr());
    }
    return Py_NewRef(it.work.ptr());
  }

  PyObject* end(const Started& it, double at) {
    it.fields().complete(it.result);
    if (recording && !it.numbers) ring().append(at);
    if (recording && it.numbers) {
      const nb::object row = it.row(at);
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

  // The engine has the op and uses its memory. The op is noted before anything else can happen. index: the number of a
  // collective, or of its lane. -1: it is not a collective.
  PyObject* posted(const Caller& caller, const Started& it, const nb::object& index) {
    const bool collective = it.collective();
    const nb::object& owner = held_[collective && caller.in_lane() ? kLanes : kTransport];
    nb::object ticket = nb::steal(PyLong_FromVoidPtr(it.known_by()));
    if (!ticket || !set_pending(ticket, owner, it.work, index, it) || (collective && !note(caller, it, index))) {
      Py_INCREF(it.work.ptr());  // The work and its tensors are never released.
      Py_XINCREF(it.part.ptr());
      return nullptr;
    }
    if (it.part && !adopt(caller, it, ticket, index)) return nullptr;
    nb::object look_after = nb::steal(PyObject_GetAttr(owner.ptr(), names().look_after));
    if (!look_after) return nullptr;
    PyObject* given[] = {caller.self.ptr(), it.work.ptr(), look_after.ptr(), index.ptr()};
    return PyObject_VectorcallMethod(names().posted, given, 4, nullptr);
  }

  // Sets the object that receives the outcome.
  bool set_pending(const nb::object& ticket, const nb::object& owner, const nb::object& told, const nb::object& index,
                   const Started& it) {
    const nb::object entry = it.entry(owner, told, index);
    return entry && PyDict_SetItem(held_[kPending].ptr(), ticket.ptr(), entry.ptr()) == 0;
  }

  // Notes a pending collective: among the communicator's, or behind those of its lane.
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

  // The collective is not pending any more.
  void forget(const Caller& caller, const Started& it, const nb::object& index) {
    if (!caller.in_lane()) return remove(held_[kCollectives], index);
    // This collective was the last of its lane.
    if (lane_queues().remove(caller.lane, it.work)) remove(held_[kGivenUpInLanes], index);
  }
  static void remove(const nb::object& from, const nb::object& key) {
    if (PyDict_Contains(from.ptr(), key.ptr()) == 1) PyDict_DelItem(from.ptr(), key.ptr());
  }

  // From now on a lane's message is like one that Python started. Its part of the op's run receives the outcome.
  bool adopt(const Caller& caller, const Started& it, const nb::object& ticket, const nb::object& index) {
    PyObject* given[] = {caller.self.ptr(), it.work.ptr(), Py_NewRef(it.part.ptr())};
    // The reference to the part is never released.
    if (!nb::steal(PyObject_VectorcallMethod(names().adopted, given, 3, nullptr))) return false;
    const int there = PyDict_Contains(held_[kPending].ptr(), ticket.ptr());
    if (there < 0 || (there > 0 && !set_pending(ticket, held_[kTransport], it.part, index, it))) return false;
    Py_DECREF(it.part.ptr());
    return true;
  }

  Engine& engine_;
  const std::uint32_t group_;
  const PlainCalls plain_;
  const unsigned long thread_;
  std::array<nb::object, kHeld> held_;
  std::array<nb::object, kUsed> used_;
  std::optional<LaneSlots> lane_;
  std::array<Kind, kNames> kinds_;
  std::vector<Record> records_;
  const nb::object user_ = nb::steal(PyLong_FromLong(kUser));
  int here_ = 0;                          // nested posts of the loop
  std::vector<const Caller*> elsewhere_;  // the callers whose ops other threads are posting
};

}  // namespace aiocomms
