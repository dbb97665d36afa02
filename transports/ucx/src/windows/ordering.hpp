// Orders one-sided operations on memory that UCX accesses, in the order of the calls. UCX does not keep that order
// itself. Its fence waits inside the call for a peer that may have stopped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <utility>
#include <vector>

#include "net/network.hpp"

namespace aiocomms {

struct Group;

// The operations of one communicator on one other rank. An op begins after all earlier ops have begun, and after all
// unfinished ops that it must follow.
//
// A put or a get follows puts of the same bytes, and all atomics. A put also follows gets. A kTell op accesses no
// memory through UCX, and follows all puts and gets. A get or an atomic ends with its answer. A put ends when UCX has
// flushed the peer, which `finished` reports.
struct Lane final : Pending {
  enum Kind { kPut, kGet, kTell };
  struct Op {
    Kind kind;
    std::uint64_t window;
    Pending* pending;                  // called if the op does not begin
    std::function<void()> start;       // never called if the op does not begin
    std::uint64_t begin = 0, end = 0;  // in the peer's memory
  };

  Lane(Group* the_group, int the_peer, Network& the_network) : group(the_group), peer(the_peer), network(the_network) {}

  Group* group;  // null: the group is closed
  const int peer;
  Network& network;
  std::list<Op> ops;                           // that have not begun
  std::map<std::uint64_t, std::uint64_t> put;  // the ranges (begin, end) of the puts since the last flush
  std::vector<ucp_rkey_h> keys;                // keys of closed windows, which UCX may still use
  int atomics = 0;                             // unfinished atomics
  int gets = 0;                                // unfinished gets
  bool flushing = false;

  static constexpr std::size_t kMostPuts = 1024;  // this many puts are flushed

  bool clean() const { return put.empty() && gets == 0 && !flushing; }

  // Whether an op must wait for a flush.
  bool needs_flush(const Op& op) const {
    if (op.kind == kTell) return !put.empty();
    const auto after = put.lower_bound(op.end);
    return put.size() >= kMostPuts || (after != put.begin() && std::prev(after)->second > op.begin);
  }
  // Whether an op must wait for an answer.
  bool needs_answer(const Op& op) const { return (op.kind != kGet && gets > 0) || (op.kind != kTell && atomics > 0); }

  void flush() noexcept {
    flushing = true;
    follow(this, network.flush(peer, this));
  }

  void finished(ucs_status_t status) noexcept override {
    flushing = false;
    if (status != UCS_OK) return end_ops(status, [](const Op&) { return true; });
    put.clear();
    if (gets == 0) destroy_keys();
  }

  // Ends the ops for which `is_ended` holds. They never begin.
  template <typename IsEnded>
  void end_ops(ucs_status_t status, IsEnded is_ended) noexcept {
    std::list<Op> ended;
    for (auto op = ops.begin(); op != ops.end();) {
      const auto next = std::next(op);
      if (is_ended(*op)) ended.splice(ended.end(), ops, op);
      op = next;
    }
    for (Op& op : ended) op.pending->finished(status);
  }

  void destroy_keys() noexcept {
    for (ucp_rkey_h key : std::exchange(keys, {})) network.destroy(key);
  }
};

}  // namespace aiocomms
