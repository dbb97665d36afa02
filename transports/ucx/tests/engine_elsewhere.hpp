// Events between the steps of a post beside the loop (engine/elsewhere.hpp). The op is withdrawn, its communicator is
// lost and closed, or the engine is closed. The post uses the op's memory until it leaves.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "engine_collectives.hpp"

namespace aiocomms {

constexpr int kOfInts = static_cast<int>(DType::Int32);

// Receives three numbers from the next rank, and sends three to the rank before.
struct Receiver {
  static constexpr std::int64_t kTag = 901;

  explicit Receiver(Comm& the_comm) : comm(the_comm) {}
  int src() const { return (comm.me + 1) % comm.size(); }
  int dst() const { return (comm.me + comm.size() - 1) % comm.size(); }
  bool recv(auto& place, Ticket ticket, Ints& into) const {
    return place.recv(ticket, comm.group, into.data(), into.size() * 4, src(), 0, kTag, kOfInts);
  }
  bool cancel(Ticket ticket) const { return comm.rank.engine->cancel(comm.group, src(), 0, kTag, ticket); }
  // The next receive gets the later messages, and a withdrawn receive has no outcome.
  void pass_on(Ticket withdrawn) {
    Rank& rank = comm.rank;
    const std::uint64_t round = ++comm.round;
    Ints given = filled(comm.me, 3, round), taken(3);
    const Ticket next = rank.post([&](Ticket ticket) { return recv(*rank.engine, ticket, taken); });
    const Ticket sent = rank.post([&](Ticket ticket) {
      return rank.engine->send(ticket, comm.group, given.data(), given.size() * 4, dst(), 0, kTag, kOfInts);
    });
    rank.finish(next, "the receive behind one that was withdrawn");
    rank.finish(sent, "a message to the receive behind one that was withdrawn");
    matches(taken, src(), round, "a message behind a receive that was withdrawn");
    expect(!rank.ended(withdrawn), "a receive has an outcome that was withdrawn amid its post");
  }

  Comm& comm;
};

// The withdrawal comes before or after the post's look.
inline void withdrawals_amid_a_post(Comm& comm) {
  Receiver receiver(comm);
  for (bool finished : {false, true}) {
    Elsewhere place(*comm.rank.engine, comm.group);
    Ints untouched(3, -1);
    const Ticket ticket = comm.rank.post([&](Ticket ticket) { return receiver.recv(place, ticket, untouched); });
    if (finished) expect(place.finish() == 0, "a receive is done of what nobody sends");
    expect(receiver.cancel(ticket), "a receive cannot be withdrawn amid its post");
    expect(!receiver.cancel(ticket), "a receive is withdrawn twice");
    comm.barrier();
    if (!finished) expect(place.finish() == 0, "what was withdrawn is done");
    place.leave();
    receiver.pass_on(ticket);
    expect(untouched == Ints(3, -1), "what was withdrawn is written to");
    comm.barrier();
  }
}

// The withdrawal comes at any moment of a running post.
inline void withdrawals_beside_a_post(Comm& comm, int count) {
  Receiver receiver(comm);
  Rank& rank = comm.rank;
  for (int at = 0; at < count; ++at) {
    Ints untouched(3, -1);
    std::thread thread;
    std::atomic<bool> over = false, withdrawn = false;
    const Ticket ticket = rank.post([&](Ticket ticket) {
      thread = std::thread([&, ticket] {
        Elsewhere place(*rank.engine, comm.group);
        receiver.recv(place, ticket, untouched);
        place.finish();
        place.leave();
        over = true;
      });
      return false;
    });
    while (!over && !withdrawn) {
      withdrawn = receiver.cancel(ticket);
      rank.turn();
    }
    thread.join();
    expect(withdrawn || receiver.cancel(ticket), "a receive cannot be withdrawn that nothing matches");
    comm.barrier();
    receiver.pass_on(ticket);
    comm.barrier();
  }
}

inline auto sum_of(Ints& data) {
  return [&](auto& it, Unequal&) { return run_all_reduce(it, kSum, data.data(), data.size()); };
}

// Ops that never end by themselves, after each step of their posts.
class Amid {
 public:
  explicit Amid(Comm& comm) : comm_(comm) {
    for (bool finished : {false, true}) {
      start(finished, [&](Elsewhere& place, Ticket ticket, Ints& data) {
        place.collective(ticket, comm_.group, 1, sum_of(data));
      });
      start(finished, [&](Elsewhere& place, Ticket ticket, Ints& data) {
        place.collective(ticket, std::uint64_t{9}, 1, sum_of(data));
      });
      start(finished, [&](Elsewhere& place, Ticket ticket, Ints& data) {
        const int src = (comm_.me + 1) % comm_.size();
        place.recv(ticket, comm_.group, data.data(), data.size() * 4, src, 0, 902, kOfInts);
      });
    }
  }
  // The communicator is lost by now. The remaining steps run, and no op does anything.
  void go_on() {
    for (auto& post : posts_) {
      if (post.finished) continue;
      expect(post.place->finish() == 0, "an op of a communicator that is lost is done");
    }
  }
  void leave() {
    for (auto& post : posts_) post.place->leave();
  }
  // The loop gets their outcomes.
  void end() {
    for (auto& post : posts_) {
      const Status status = comm_.rank.wait(post.ticket, "an op that was lost amid its post").status;
      expect(status == Status::kDropped, "it ends with %d", static_cast<int>(status));
    }
  }

 private:
  struct Post {
    std::unique_ptr<Elsewhere> place;
    Ticket ticket;
    bool finished;
    std::shared_ptr<Ints> data;
  };

  template <typename Begin>
  void start(bool finished, const Begin& begin) {
    auto data = std::make_shared<Ints>(3);
    auto place = std::make_unique<Elsewhere>(*comm_.rank.engine, comm_.group);
    const Ticket ticket = comm_.rank.post([&](Ticket ticket) {
      while (!place->placed()) begin(*place, ticket, *data);  // Another thread may have the engine.
      return false;
    });
    if (finished) expect(place->finish() == 0, "an op is done that the other ranks do not call");
    posts_.push_back({std::move(place), ticket, finished, std::move(data)});
  }

  Comm& comm_;
  std::vector<Post> posts_;
};

// The communicator is lost and closed during the posts' steps. The last rank calls nothing.
inline void losses_amid_posts(Comm& lost) {
  Rank& rank = lost.rank;
  std::optional<Amid> amid;
  if (lost.me != lost.size() - 1) amid.emplace(lost);
  rank.world.meeting.arrive_and_wait();
  rank.engine->lose_group(lost.group);
  rank.turn();
  if (amid && rank.random.below(2)) amid->go_on();
  rank.engine->close_group(lost.group);
  rank.turn();
  if (amid) {
    amid->leave();
    amid->end();
  }
  rank.world.meeting.arrive_and_wait();
}

}  // namespace aiocomms
