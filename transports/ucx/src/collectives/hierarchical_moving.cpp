// The collectives of several hosts that move data without a reduction.
#include <algorithm>
#include <utility>

#include "collectives/hierarchical.hpp"
#include "collectives/pipeline.hpp"
#include "collectives/span.hpp"

namespace aiocomms {

using std::size_t;

namespace {

// Each block goes to one rank of each other host, its owner's counterpart. The counterpart spreads it there.
class AllGather final : public Stages {
 public:
  AllGather(const Reach& reach, const void* in, std::vector<void*> outs, Bytes bytes)
      : Stages(reach, (most_likes(reach) + 1) * reach.hosts.count(), 0),
        in_(static_cast<const std::byte*>(in)),
        outs_(std::move(outs)),
        bytes_(std::move(bytes)),
        longest_(*std::max_element(bytes_.begin(), bytes_.end())),
        unit_(std::min(longest_, unit_for(longest_, 1))),
        blocks_(reach.hosts.size(here())) {
    for (size_t step = 0; step < reach.hosts.count(); ++step) {
      const size_t host = (here() + step) % reach.hosts.count();
      for (size_t from = 0; from < reach.hosts.size(host); ++from) {
        blocks_[reach.hosts.like(from, host, here())].push_back(rank_at(host, from));
      }
      if (step != 0) takers_.push_back(rank_at(host, reach.hosts.like(place(), here(), host)));
    }
    for (const std::vector<int>& of_rank : blocks_) most_blocks_ = std::max(most_blocks_, of_rank.size());
  }

  size_t units() const override { return divided_up(longest_, unit_); }

  void exchange(size_t unit) override {
    for (size_t block = 1; block < blocks_[place()].size(); ++block) {
      const int from = blocks_[place()][block];
      recv(first, unit, from, at(outs_[from], piece(unit, from).offset), piece(unit, from).length);
    }
    const Span mine = piece(unit, me());
    for (int taker : takers_) send(first, unit, taker, at(in_, mine.offset), mine.length);
    copy_bytes(at(outs_[me()], mine.offset), at(in_, mine.offset), mine.length);
  }

  size_t results(size_t) const override { return blocks_.size() == 1 ? 0 : most_blocks_; }

  void give(size_t unit, size_t round, std::uint64_t number) override {
    if (round >= blocks_[place()].size()) return;
    const int rank = blocks_[place()][round];
    const Span span = piece(unit, rank);
    copy_in(number, 0, at(outs_[rank], span.offset), span.length);
  }

  bool takes(size_t unit, size_t round, size_t from) const override {
    return from != place() && round < blocks_[from].size() && piece(unit, blocks_[from][round]).length != 0;
  }

  void take(size_t unit, size_t round, size_t from, std::uint64_t number) override {
    const int rank = blocks_[from][round];
    const Span span = piece(unit, rank);
    copy_out(from, number, 0, at(outs_[rank], span.offset), span.length);
  }

 private:
  Span piece(size_t unit, int rank) const { return Span(unit, unit_, bytes_[rank]); }

  const std::byte* const in_;
  const std::vector<void*> outs_;
  const Bytes bytes_;
  const size_t longest_, unit_;
  std::vector<std::vector<int>> blocks_;  // the blocks that each rank of this host spreads, its own first
  std::vector<int> takers_;               // the ranks of other hosts that take this rank's block
  size_t most_blocks_ = 0;
};

// Blocks between the root and all other ranks. On each host the root's counterpart sends or receives for all.
class Rooted : public Stages {
 protected:
  Rooted(const Reach& reach, int root, size_t bytes)
      : Stages(reach, reach.hosts.count(), 0), root_(root), bytes_(bytes), root_at_(reach.hosts.of(root)) {
    for (size_t host = 0; host < reach.hosts.count(); ++host) most_ = std::max(most_, reach.hosts.size(host));
    speaker_ = reach.hosts.like(root_at_.place, root_at_.host, here());
    if (is_root()) blocks_ = make_scratch(reach.hosts.count() * most_ * bytes);
    if (speaks() && !is_root()) blocks_ = make_scratch(local_ranks() * bytes);
  }

  size_t units() const override { return 1; }
  bool is_root() const { return me() == root_; }
  bool speaks() const { return place() == speaker_; }
  int speaker_of(size_t host) const { return rank_at(host, reach.hosts.like(root_at_.place, root_at_.host, host)); }
  // On the root: the blocks of a host. On another host's speaker: the blocks of its own host.
  std::byte* blocks_of(size_t host) const { return at(blocks_.get(), is_root() ? host * most_ * bytes_ : 0); }

  const int root_;
  const size_t bytes_;
  const Hosts::Place root_at_;
  size_t most_ = 0, speaker_ = 0;
  Scratch blocks_;
};

class Gather final : public Rooted {
 public:
  Gather(const Reach& reach, int root, const void* in, std::vector<void*> outs, size_t bytes)
      : Rooted(reach, root, bytes), in_(in), outs_(std::move(outs)) {}

  size_t contributions(size_t) const override { return alone() ? 0 : 1; }
  void contribute(size_t, size_t, std::uint64_t number) override { copy_in(number, 0, in_, bytes_); }
  void reduce(size_t, size_t, std::uint64_t number) override {
    for (size_t from = 0; speaks() && from < local_ranks(); ++from) {
      const int rank = rank_at(here(), from);
      void* const out = is_root() ? outs_[rank] : at(blocks_.get(), from * bytes_);
      copy_bytes(out, rank == me() ? in_ : slot(from, number), bytes_);
    }
  }

  void exchange(size_t unit) override {
    if (is_root()) {
      if (alone()) copy_bytes(outs_[root_], in_, bytes_);
      for_each_other(
          [&](size_t host) { recv(first, unit, speaker_of(host), blocks_of(host), reach.hosts.size(host) * bytes_); });
    } else if (speaks() && here() != root_at_.host) {
      send(first, unit, root_, alone() ? in_ : blocks_.get(), local_ranks() * bytes_);
    }
  }

  void return_results(size_t) override {
    if (!is_root()) return;
    for_each_other([&](size_t host) {
      for (size_t from = 0; from < reach.hosts.size(host); ++from) {
        copy_bytes(outs_[rank_at(host, from)], at(blocks_of(host), from * bytes_), bytes_);
      }
    });
  }

 private:
  const void* const in_;
  const std::vector<void*> outs_;
};

class Scatter final : public Rooted {
 public:
  Scatter(const Reach& reach, int root, std::vector<const void*> ins, void* out, size_t bytes)
      : Rooted(reach, root, bytes), ins_(std::move(ins)), out_(out) {}

  void exchange(size_t unit) override {
    if (is_root()) {
      copy_bytes(out_, ins_[root_], bytes_);
      for_each_other([&](size_t host) {
        for (size_t to = 0; to < reach.hosts.size(host); ++to) {
          copy_bytes(at(blocks_of(host), to * bytes_), ins_[rank_at(host, to)], bytes_);
        }
        send(first, unit, speaker_of(host), blocks_of(host), reach.hosts.size(host) * bytes_);
      });
    } else if (speaks() && here() != root_at_.host) {
      recv(first, unit, root_, alone() ? out_ : blocks_.get(), local_ranks() * bytes_);
    }
  }

  size_t results(size_t) const override { return alone() ? 0 : 1; }
  void give(size_t, size_t, std::uint64_t number) override {
    for (size_t to = 0; speaks() && to < local_ranks(); ++to) {
      const void* const block = is_root() ? ins_[rank_at(here(), to)] : at(blocks_.get(), to * bytes_);
      copy_in(number, to * bytes_, block, bytes_);
    }
    if (speaks() && !is_root()) copy_bytes(out_, at(blocks_.get(), place() * bytes_), bytes_);
  }
  bool takes(size_t, size_t, size_t from) const override { return from == speaker_ && !speaks(); }
  void take(size_t, size_t, size_t from, std::uint64_t number) override {
    copy_out(from, number, place() * bytes_, out_, bytes_);
  }

 private:
  const std::vector<const void*> ins_;
  void* const out_;
};

// All blocks of a host for one rank of another host go to that rank's counterpart, which sends them together (Traff,
// Rougier: "MPI collectives and datatypes for hierarchical all-to-all communication", EuroMPI 2014).
class AllToAll final : public Stages {
 public:
  AllToAll(const Reach& reach, std::vector<const void*> ins, std::vector<void*> outs, size_t bytes)
      : Stages(reach, (most_likes(reach) + 1) * reach.hosts.count(), 0),
        ins_(std::move(ins)),
        outs_(std::move(outs)),
        bytes_(bytes) {
    for (size_t host = 0; host < reach.hosts.count(); ++host) {
      for (size_t to = 0; to < reach.hosts.size(host); ++to) {
        if (host != here() && reach.hosts.like(to, host, here()) == place()) collected_.push_back({host, to});
      }
    }
    leaving_ = make_scratch(collected_.size() * local_ranks() * bytes);
    arriving_ = make_scratch(reach.hosts.count() * reach.hosts.largest() * bytes);
  }

  size_t units() const override { return 1; }

  // One round for the blocks of each host.
  size_t contributions(size_t) const override { return alone() ? 0 : reach.hosts.count(); }
  void contribute(size_t, size_t round, std::uint64_t number) override {
    for (size_t to = 0; to < reach.hosts.size(round); ++to) {
      copy_in(number, to * bytes_, ins_[rank_at(round, to)], bytes_);
    }
  }
  void reduce(size_t, size_t round, std::uint64_t number) override {
    for (size_t from = 0; from < local_ranks(); ++from) {
      const std::byte* const theirs = slot(from, number);
      if (round == here()) copy_bytes(outs_[rank_at(here(), from)], at(theirs, place() * bytes_), bytes_);
      for (size_t at_place = 0; at_place < collected_.size(); ++at_place) {
        const Hosts::Place& to = collected_[at_place];
        if (to.host == round) copy_bytes(leaving(at_place, from), at(theirs, to.place * bytes_), bytes_);
      }
    }
  }

  void exchange(size_t unit) override {
    if (alone()) copy_bytes(outs_[me()], ins_[me()], bytes_);
    for_each_other([&](size_t host) {
      const int like = rank_at(host, reach.hosts.like(place(), here(), host));
      recv(first, unit, like, arriving(host), reach.hosts.size(host) * bytes_);
    });
    for (size_t at_place = 0; at_place < collected_.size(); ++at_place) {
      const int to = rank_at(collected_[at_place].host, collected_[at_place].place);
      send(first, unit, to, alone() ? ins_[to] : leaving(at_place, 0), local_ranks() * bytes_);
    }
  }

  void return_results(size_t) override {
    for_each_other([&](size_t host) {
      for (size_t from = 0; from < reach.hosts.size(host); ++from) {
        copy_bytes(outs_[rank_at(host, from)], at(arriving(host), from * bytes_), bytes_);
      }
    });
  }

 private:
  std::byte* leaving(size_t to, size_t from) const { return at(leaving_.get(), (to * local_ranks() + from) * bytes_); }
  std::byte* arriving(size_t host) const { return at(arriving_.get(), host * reach.hosts.largest() * bytes_); }

  const std::vector<const void*> ins_;
  const std::vector<void*> outs_;
  const size_t bytes_;
  std::vector<Hosts::Place> collected_;  // the ranks of other hosts for which this rank collects
  Scratch leaving_, arriving_;
};

}  // namespace

Task hierarchical_gather(Reach reach, int root, const void* in, std::vector<void*> outs, size_t bytes) {
  return run_pipeline(std::make_unique<Gather>(reach, root, in, std::move(outs), bytes));
}

Task hierarchical_scatter(Reach reach, int root, std::vector<const void*> ins, void* out, size_t bytes) {
  return run_pipeline(std::make_unique<Scatter>(reach, root, std::move(ins), out, bytes));
}

Task hierarchical_all_to_all(Reach reach, std::vector<const void*> ins, std::vector<void*> outs, size_t bytes) {
  return run_pipeline(std::make_unique<AllToAll>(reach, std::move(ins), std::move(outs), bytes));
}

Task hierarchical_all_gather(Reach reach, const void* in, std::vector<void*> outs, Bytes bytes) {
  return run_pipeline(std::make_unique<AllGather>(reach, in, std::move(outs), std::move(bytes)));
}

}  // namespace aiocomms
