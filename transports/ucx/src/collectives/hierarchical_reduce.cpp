// The collectives of several hosts that reduce.
#include <algorithm>
#include <utility>

#include "collectives/hierarchical.hpp"
#include "collectives/pipeline.hpp"
#include "collectives/span.hpp"

namespace aiocomms {

using std::size_t;

namespace {

// Reductions that combine the folded contributions of the hosts.
class Reducing : public Stages {
 protected:
  Reducing(const Reach& reach, const Reduction& reduction, size_t first_messages, size_t second_messages)
      : Stages(reach, first_messages, second_messages),
        reduction_(reduction),
        between_(after_lifting(reduction)),
        size_(size_of(reduction.dtype)),
        lifted_(size_of(lifted(reduction.dtype))),
        inputs_(std::max(reach.hosts.count(), reach.hosts.size(here()))) {}

  size_t elements(size_t bytes) const { return std::max<size_t>(1, bytes / size_); }

  // inputs_: the folded contributions of the hosts. `own`: this host's, which may be `out`. It is overwritten if folded
  // elements are longer than those of the result.
  void combine(void* out, std::byte* own, size_t count) {
    void* const sum = size_ == lifted_ ? out : own;
    aiocomms::reduce(between_, sum, inputs_.data(), static_cast<int>(reach.hosts.count()), count);
    if (lowers(reduction_)) lower(reduction_, out, sum, count, reach.wire.size());
  }

  const Reduction reduction_, between_;
  const size_t size_, lifted_;
  std::vector<const void*> inputs_;
};

// One rank of each host holds each share of the data, and these ranks each reduce a part of it. There are as many
// shares as ranks on the largest host. A rank of a smaller host holds several neighbouring shares.
class AllReduce final : public Reducing {
 public:
  AllReduce(const Reach& reach, const Reduction& reduction, int root, void* data, size_t count)
      : Reducing(reach, reduction, most_messages(reach), most_messages(reach)),
        data_(static_cast<std::byte*>(data)),
        count_(count),
        root_host_(root < 0 ? -1 : static_cast<int>(reach.hosts.of(root).host)),
        takes_(root < 0 || root == me()),
        shares_(reach.hosts.largest()),
        first_share_(first_share(place())),
        own_(first_share(place() + 1) - first_share_),
        most_own_(most_likes(reach)) {
    const size_t line = std::max<size_t>(1, kLine / size_);
    share_ = rounded_up(divided_up(count, shares_), line);
    unit_ = std::min(share_,
                     rounded_up(std::max<size_t>(1, unit_for(share_ * lifted_, reach.hosts.count()) / lifted_), line));
    step_ = elements(Segment::kSlot / shares_ / kLine * kLine);
    part_ = rounded_up(divided_up(unit_, reach.hosts.count()), line);
    if (!sends_data_itself()) partial_ = make_scratch(kUnits * own_ * unit_ * lifted_);
    received_ = make_scratch(kUnits * own_ * reach.hosts.count() * part_ * lifted_);
    if (!takes_) results_ = make_scratch(kUnits * own_ * unit_ * size_);
  }

  size_t units() const override { return divided_up(share_, unit_); }

  size_t contributions(size_t unit) const override { return alone() ? 0 : divided_up(piece(unit, 0).length, step_); }

  void contribute(size_t unit, size_t round, std::uint64_t number) override {
    for (size_t share = 0; share < shares_; ++share) {
      if (share >= first_share_ && share < first_share_ + own_) continue;
      const Span span = piece(unit, share).within(round, step_);
      copy_in(number, share * step_ * size_, at(data_, span.offset * size_), span.length * size_);
    }
  }

  void reduce(size_t unit, size_t round, std::uint64_t number) override {
    for (size_t own = 0; own < own_; ++own) {
      const Span whole = piece(unit, first_share_ + own), span = whole.within(round, step_);
      for (size_t rank = 0; rank < local_ranks(); ++rank) {
        inputs_[rank] = rank == place() ? at(data_, span.offset * size_)
                                        : at(slot(rank, number), (first_share_ + own) * step_ * size_);
      }
      std::byte* const out = at(partial(unit, own), (span.offset - whole.offset) * lifted_);
      if (span.length) fold(reduction_, out, inputs_.data(), static_cast<int>(local_ranks()), span.length);
    }
  }

  void exchange(size_t unit) override {
    for (size_t own = 0; own < own_; ++own) {
      const Span whole = piece(unit, first_share_ + own);
      if (alone() && !sends_data_itself() && whole.length) {
        const void* const data = at(data_, whole.offset * size_);
        fold(reduction_, partial(unit, own), &data, 1, whole.length);
      }
      for_each_holder(own, [&](size_t host, int rank) {
        recv(first, unit, rank, received(unit, own, host), part(whole, here()).length * lifted_);
        const Span theirs = part(whole, host);
        send(first, unit, rank, at(partial(unit, own), (theirs.offset - whole.offset) * lifted_),
             theirs.length * lifted_);
      });
    }
  }

  void return_results(size_t unit) override {
    for (size_t own = 0; own < own_; ++own) {
      const Span whole = piece(unit, first_share_ + own), mine = part(whole, here());
      std::byte* const ours = at(partial(unit, own), (mine.offset - whole.offset) * lifted_);
      std::byte* const out = result(unit, own, mine.offset - whole.offset);
      for (size_t host = 0; host < reach.hosts.count(); ++host) {
        inputs_[host] = host == here() ? ours : received(unit, own, host);
      }
      if (mine.length) combine(out, ours, mine.length);
      for_each_holder(own, [&](size_t host, int rank) {
        const Span theirs = part(whole, host);
        if (is_given_to(here())) {
          recv(second, unit, rank, result(unit, own, theirs.offset - whole.offset), theirs.length * size_);
        }
        if (is_given_to(host)) send(second, unit, rank, out, mine.length * size_);
      });
    }
  }

  size_t results(size_t unit) const override {
    return alone() || !is_given_to(here()) ? 0 : most_own_ * slots_of(unit);
  }

  void give(size_t unit, size_t round, std::uint64_t number) override {
    const size_t own = round / slots_of(unit);
    if (own >= own_) return;
    const Span whole = piece(unit, first_share_ + own), span = whole.within(round % slots_of(unit), of_slot());
    copy_in(number, 0, result(unit, own, span.offset - whole.offset), span.length * size_);
  }

  bool takes(size_t unit, size_t round, size_t from) const override {
    return takes_ && from != place() && given(unit, round, from).length != 0;
  }

  void take(size_t unit, size_t round, size_t from, std::uint64_t number) override {
    const Span span = given(unit, round, from);
    copy_out(from, number, 0, at(data_, span.offset * size_), span.length * size_);
  }

 private:
  // A host's rank holds the shares first_share(place), ..., first_share(place + 1) - 1.
  size_t first_share(size_t place) const { return divided_up(place * shares_, local_ranks()); }
  static size_t most_messages(const Reach& reach) { return 2 * most_likes(reach) * (reach.hosts.count() - 1); }
  bool is_given_to(size_t host) const { return root_host_ < 0 || static_cast<size_t>(root_host_) == host; }
  bool sends_data_itself() const { return alone() && !lifts(reduction_); }

  // Visits the rank of each other host that holds this share.
  template <typename Each>
  void for_each_holder(size_t own, const Each& each) const {
    for_each_other(
        [&](size_t host) { each(host, rank_at(host, (first_share_ + own) * reach.hosts.size(host) / shares_)); });
  }

  Span piece(size_t unit, size_t share) const { return Span(share, share_, count_).within(unit, unit_); }
  Span part(const Span& piece, size_t host) const { return piece.within(host, part_); }
  size_t of_slot() const { return elements(Segment::kSlot); }
  size_t slots_of(size_t unit) const { return std::max<size_t>(1, divided_up(piece(unit, 0).length, of_slot())); }
  Span given(size_t unit, size_t round, size_t from) const {
    const size_t share = first_share(from) + round / slots_of(unit);
    if (share >= first_share(from + 1)) return Span(0, 0, 0);
    return piece(unit, share).within(round % slots_of(unit), of_slot());
  }

  size_t of_ring(size_t unit, size_t own) const { return unit % kUnits * own_ + own; }
  std::byte* partial(size_t unit, size_t own) const {
    if (sends_data_itself()) return at(data_, piece(unit, first_share_ + own).offset * size_);
    return at(partial_.get(), of_ring(unit, own) * unit_ * lifted_);
  }
  std::byte* received(size_t unit, size_t own, size_t host) const {
    return at(received_.get(), (of_ring(unit, own) * reach.hosts.count() + host) * part_ * lifted_);
  }
  std::byte* result(size_t unit, size_t own, size_t offset) const {
    if (takes_) return at(data_, (piece(unit, first_share_ + own).offset + offset) * size_);
    return at(results_.get(), (of_ring(unit, own) * unit_ + offset) * size_);
  }

  std::byte* const data_;
  const size_t count_;
  const int root_host_;  // -1: all hosts
  const bool takes_;     // this rank's data become the result
  const size_t shares_, first_share_, own_, most_own_;
  // elements of a share, of its piece in a unit, of that piece in a round, and of a host's part
  size_t share_, unit_, step_, part_;
  Scratch partial_, received_, results_;
};

// Every rank reduces the blocks for its counterparts on each host, and sends them there.
class ReduceScatter final : public Reducing {
 public:
  ReduceScatter(const Reach& reach, const Reduction& reduction, std::vector<const void*> ins, Bytes counts, void* out)
      : Reducing(reach, reduction, (most_likes(reach) + 1) * reach.hosts.count(), 0),
        ins_(std::move(ins)),
        counts_(std::move(counts)),
        out_(static_cast<std::byte*>(out)),
        longest_(*std::max_element(counts_.begin(), counts_.end())),
        unit_(std::min(longest_, std::max<size_t>(1, unit_for(longest_ * lifted_, 1) / lifted_))),
        step_(elements(Segment::kSlot / reach.hosts.largest() / kLine * kLine)) {
    const Hosts& hosts = reach.hosts;
    for (size_t host = 0; host < hosts.count(); ++host) {
      for (size_t at = 0; at < hosts.size(host); ++at) {
        if (hosts.like(at, host, here()) == place()) blocks_.push_back({host, at, rank_at(host, at)});
      }
      if (host != here()) givers_.push_back(rank_at(host, hosts.like(place(), here(), host)));
    }
    partial_ = make_scratch(kUnits * blocks_.size() * unit_ * lifted_);
    received_ = make_scratch(kUnits * hosts.count() * unit_ * lifted_);
  }

  size_t units() const override { return divided_up(longest_, unit_); }

  size_t contributions(size_t unit) const override { return alone() ? 0 : reach.hosts.count() * rounds_of_host(unit); }

  void contribute(size_t unit, size_t round, std::uint64_t number) override {
    const size_t host = round / rounds_of_host(unit);
    for (size_t at_host = 0; at_host < reach.hosts.size(host); ++at_host) {
      if (reach.hosts.like(at_host, host, here()) == place()) continue;
      const int rank = rank_at(host, at_host);
      const Span span = piece(unit, rank).within(round % rounds_of_host(unit), step_);
      copy_in(number, at_host * step_ * size_, at(ins_[rank], span.offset * size_), span.length * size_);
    }
  }

  void reduce(size_t unit, size_t round, std::uint64_t number) override {
    for (size_t block = 0; block < blocks_.size(); ++block) {
      if (blocks_[block].host != round / rounds_of_host(unit)) continue;
      const Span whole = piece(unit, blocks_[block].rank);
      const Span span = whole.within(round % rounds_of_host(unit), step_);
      for (size_t rank = 0; rank < local_ranks(); ++rank) {
        inputs_[rank] = rank == place() ? at(ins_[blocks_[block].rank], span.offset * size_)
                                        : at(slot(rank, number), blocks_[block].place * step_ * size_);
      }
      std::byte* const out = at(partial(unit, block), (span.offset - whole.offset) * lifted_);
      if (span.length) fold(reduction_, out, inputs_.data(), static_cast<int>(local_ranks()), span.length);
    }
  }

  void exchange(size_t unit) override {
    for (size_t from = 0; from < givers_.size(); ++from) {
      recv(first, unit, givers_[from], received(unit, from), piece(unit, me()).length * lifted_);
    }
    for (size_t block = 0; block < blocks_.size(); ++block) {
      const int rank = blocks_[block].rank;
      const Span span = piece(unit, rank);
      const void* const in = span.length ? at(ins_[rank], span.offset * size_) : nullptr;
      if (alone() && span.length) fold(reduction_, partial(unit, block), &in, 1, span.length);
      if (rank != me() && blocks_[block].host != here()) {
        send(first, unit, rank, partial(unit, block), span.length * lifted_);
      }
    }
  }

  void return_results(size_t unit) override {
    const Span span = piece(unit, me());
    if (span.length == 0) return;
    std::byte* ours = nullptr;
    for (size_t block = 0; block < blocks_.size(); ++block) {
      if (blocks_[block].rank == me()) ours = partial(unit, block);
    }
    for (size_t host = 0, from = 0; host < reach.hosts.count(); ++host) {
      inputs_[host] = host == here() ? ours : received(unit, from++);
    }
    combine(at(out_, span.offset * size_), ours, span.length);
  }

 private:
  struct Block {
    size_t host, place;
    int rank;
  };

  Span piece(size_t unit, int rank) const { return Span(unit, unit_, counts_[rank]); }
  size_t rounds_of_host(size_t unit) const { return divided_up(Span(unit, unit_, longest_).length, step_); }
  std::byte* partial(size_t unit, size_t block) const {
    return at(partial_.get(), (unit % kUnits * blocks_.size() + block) * unit_ * lifted_);
  }
  std::byte* received(size_t unit, size_t from) const {
    return at(received_.get(), (unit % kUnits * reach.hosts.count() + from) * unit_ * lifted_);
  }

  const std::vector<const void*> ins_;
  const Bytes counts_;
  std::byte* const out_;
  const size_t longest_, unit_, step_;
  std::vector<Block> blocks_;  // the blocks that this rank reduces, by host
  std::vector<int> givers_;    // the rank of each other host that reduces this rank's block
  Scratch partial_, received_;
};

}  // namespace

Task hierarchical_reduce(Reach reach, Reduction reduction, int root, void* data, size_t count) {
  return run_pipeline(std::make_unique<AllReduce>(reach, reduction, root, data, count));
}

Task hierarchical_reduce_scatter(Reach reach, Reduction reduction, std::vector<const void*> ins, Bytes counts,
                                 void* out) {
  return run_pipeline(std::make_unique<ReduceScatter>(reach, reduction, std::move(ins), std::move(counts), out));
}

}  // namespace aiocomms
