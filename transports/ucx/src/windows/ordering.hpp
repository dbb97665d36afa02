// One-sided operations on a rank's memory that UCX reaches, in the order of the calls. UCX does not keep that order by
// itself, and its fence waits, inside the call, for a peer that may have stopped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "net/worker.hpp"

namespace aiocomms {

struct Group;

// Those of one communicator on one other rank. An op begins once all before it have begun, and nothing is under way
// that it must come behind: puts of the same bytes and atomics, for a put or a get; gets too, for a put; all puts and
// gets, for an op that reaches no memory by itself. A get and an atomic are over when they are answered, a put when UCX
// has flushed the peer, of which `finished` tells.
struct Lane final : Pending {
  enum Kind { kPut, kGet, kTell };
  struct Op {
    Kind kind;
    std::uint64_t window;
    Pending* pending;          // told if the op does not begin
    std::uint64_t begin, end;  // of the peer's memory
    std::function<void()> start;
  };

  Lane(Group* the_group, int the_peer) : group(the_group), peer(the_peer) {}

  Group* group;  // null: it is closed
  const int peer;
  std::deque<Op> ops;                          // that have not begun
  std::map<std::uint64_t, std::uint64_t> put;  // from, to: since the last flush
  std::vector<ucp_rkey_h> keys;                // of closed windows, which UCX may still use
  int asked = 0;                               // atomics that are under way
  int got = 0;                                 // gets
  bool flushing = false;

  static constexpr std::size_t kMostPut = 1024;  // then it is flushed, too

  bool clean() const { return put.empty() && got == 0 && !flushing; }

  // Whether an op must wait for a flush.
  bool needs_flush(const Op& op) const {
    if (op.kind == kTell) return !put.empty();
    const auto after = put.lower_bound(op.end);
    return put.size() >= kMostPut || (after != put.begin() && std::prev(after)->second > op.begin);
  }
  // Whether it must wait for an answer.
  bool needs_answer(const Op& op) const { return (op.kind != kGet && got > 0) || (op.kind != kTell && asked > 0); }

  void finished(ucs_status_t status) override {
    flushing = false;
    if (status != UCS_OK) return end(status, [](const Op&) { return true; });
    put.clear();
    if (got == 0) forget();
  }

  // Those that `are` do not begin any more.
  template <typename Are>
  void end(ucs_status_t status, Are are) {
    for (Op& op : std::exchange(ops, {})) {
      if (are(op)) {
        op.pending->finished(status);
      } else {
        ops.push_back(std::move(op));
      }
    }
  }

  void forget() {
    for (ucp_rkey_h key : std::exchange(keys, {})) ucp_rkey_destroy(key);
  }
};

}  // namespace aiocomms
