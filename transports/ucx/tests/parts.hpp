// The surroundings of the engine's parts in their tests. There is no engine, no UCX and no other process, and the test
// sets the clock. UCX is a Network that records its calls.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "engine/groups.hpp"
#include "engine/inbox.hpp"
#include "engine/pacer.hpp"
#include "engine/reports.hpp"
#include "engine/request.hpp"

namespace aiocomms {

inline unsigned checks = 0, failures = 0;

inline void check(bool holds, const char* what, const char* file, int line) {
  ++checks;
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "FAILED at %s:%d: %s\n", file, line, what);
}
#define CHECK(condition) check((condition), #condition, __FILE__, __LINE__)

// The tests of each part, one file each.
void test_board();
void test_pacer();
void test_inbox();
void test_offers();
void test_pool();
void test_windows();
void test_filling();
void test_speeds();

// UCX as a list of its calls. Calls with a Pending stay unfinished until the test ends them.
class FakeUcx final : public Network {
 public:
  struct Told {
    int peer;
    Header header;
    std::string what;
  };
  std::vector<Told> told;
  std::vector<void*> released;
  std::vector<int> refused;
  std::vector<Pending*> under_way;
  std::vector<std::string> calls;
  ucs_status_t answer = UCS_INPROGRESS;  // for all calls except tell()

  // Ends the oldest unfinished call.
  void finish(ucs_status_t status = UCS_OK) {
    Pending* pending = under_way.front();
    under_way.erase(under_way.begin());
    pending->finished(status);
  }

  ucs_status_t tell(int peer, Header header, const void* what, std::size_t bytes, Pending*) override {
    told.push_back({peer, header, std::string(static_cast<const char*>(what), what ? bytes : 0)});
    return UCS_OK;
  }
  ucs_status_t fetch(void* descriptor, void* data, std::size_t bytes, Memory, Pending* pending) override {
    std::memcpy(data, descriptor, bytes);
    return call("fetch", pending);
  }
  ucs_status_t fetch_beginning(void* descriptor, Beginning* beginning, Pending* pending) override {
    std::memcpy(beginning->data, descriptor, beginning->room);
    return call("fetch_beginning", pending);
  }
  void release(void* descriptor) override { released.push_back(descriptor); }
  void refuse(int peer) override { refused.push_back(peer); }
  ucs_status_t put(int, ucp_rkey_h, std::uint64_t, const void*, std::size_t, Pending* pending) override {
    return call("put", pending);
  }
  ucs_status_t get(int, ucp_rkey_h, std::uint64_t, void*, std::size_t, Pending* pending) override {
    return call("get", pending);
  }
  ucs_status_t flush(int, Pending* pending) override { return call("flush", pending); }
  ucp_mem_h map(void*, std::size_t) override { return nullptr; }
  void unmap(ucp_mem_h) override {}
  std::string pack(ucp_mem_h) override { return "key"; }
  ucp_rkey_h unpack(int, const std::string&) override { return reinterpret_cast<ucp_rkey_h>(this); }
  void destroy(ucp_rkey_h) override { calls.push_back("destroy"); }

 private:
  ucs_status_t call(const char* name, Pending* pending) {
    calls.push_back(name);
    if (answer == UCS_INPROGRESS) under_way.push_back(pending);
    return answer;
  }
};

// Two ranks. This one is rank 0, and peer 0 of its family.
struct Desk : Inbox::Owner {
  Pacer pacer;
  Reports reports{pacer};
  FakeUcx ucx;
  Groups groups;
  std::vector<Peer> peers;
  Inbox inbox;
  Group& group;
  std::vector<Header> handled;
  std::vector<Request*> pulled;
  Ticket last_ticket = 0;

  explicit Desk(Peer other = {}, bool device = false, std::uint32_t first = 0)
      : peers{Peer{}, other}, inbox(peers, device, groups, ucx, *this, first), group(groups.at(groups.add(0, {0, 1}))) {
    group.their_ids = {group.id, 7};
  }
  ~Desk() { group.drop_schedules(); }

  void handle(Group&, const Header& header, const void*) override { handled.push_back(header); }
  bool agrees(Group& where, const Header&) override { return where.disagrees < 0; }
  void pull(Request* receive, const Header&, const Offer&) override { pulled.push_back(receive); }
  void failed(Group& where) noexcept override { reports.fail(where); }

  // An op whose post has returned.
  Operation* operation() {
    reports.make_room();
    auto op = new Operation(reports, group, ++last_ticket);
    op->leave_post(0);
    return op;
  }
  Operation* receive(void* data, std::size_t bytes, std::int64_t tag, std::uint8_t dtype = 4) {
    Operation* op = operation();
    op->data = data;
    op->bytes = bytes;
    op->dtype = dtype;
    inbox.post(op, Key(1, 0, tag));
    return op;
  }
  Header header(std::uint32_t order, std::int64_t tag, std::uint64_t bytes) const {
    return {.group = group.id, .order = order, .source = 1, .dtype = 4, .peer = 1, .tag = tag, .bytes = bytes};
  }
  std::vector<Outcome> outcomes() {
    std::vector<Outcome> taken;
    std::vector<Notice> notices;
    reports.collect(taken, notices);
    return taken;
  }
  void lose() {
    group.lost = true;
    inbox.release(group);
  }
};

}  // namespace aiocomms
