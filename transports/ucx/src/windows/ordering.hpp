// One-sided operations on a rank's memory that UCX reaches, in the order of the calls. UCX does not keep that order by
// itself, and its fence waits, inside the call, for a peer that may have stopped.
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

// The operations of one communicator on one other rank. An op begins once all before it have begun, and nothing is
// under way that it must come behind: a put or a get comes behind puts of the same bytes and behind atomics; a put also
// behind gets; an op that reaches no memory by itself behind all puts and gets. A get and an atomic are over when they
// are answered, a put when UCX has flushed the peer, of which `finished` tells.
struct Lane final : Pending {
  enum Kind { kPut, kGet, kTell };
  struct Op {
    Kind kind;
    std::uint64_t window;
    Pending* pending;                  // told if the op does not begin
    std::function<void()> start;       // never called if the op does not begin
    std::uint64_t begin = 0, end = 0;  // of the peer's memory
  };

  Lane(Group* the_group, int the_peer, Network& the_network) : group(the_group), peer(the_peer), network(the_network) {}

  Group* group;  // null: it is closed
  const int peer;
  Network& network;
  std::list<Op> ops;                           // that have not begun
  std::map<std::uint64_t, std::uint64_t> put;  // from, to: since the last flush
  std::vector<ucp_rkey_h> keys;                // of closed windows, which UCX may still use
  int atomics = 0;                             // that are under way
  int gets = 0;                                // likewise
  bool flushing = false;

  static constexpr std::size_t kMostPuts = 1024;  // then they are flushed, too

  bool clean() const { return put.empty() && gets == 0 && !flushing; }

  // Whether an op must wait for a flush.
  bool needs_flush(const Op& op) const {
    if (op.kind == kTell) return !put.empty();
    const auto after = put.lower_bound(op.end);
    return put.size() >= kMostPuts || (after != put.begin() && std::prev(after)->second > op.begin);
  }
  // Whether it must wait for an answer.
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

  // Operations for which `is_ended` holds are not started any more.
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
