// The collectives of several hosts that move data without changing it.
#include <algorithm>
#include <utility>

#include "collectives/hierarchical.hpp"
#include "collectives/pipeline.hpp"
#include "collectives/span.hpp"
#include "net/copy.hpp"

namespace aiocomms {

using std::size_t;

namespace {

// Each block goes to one rank of each other host, the like of its own, which hands it out there.
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
    copy_bytes(own_slot(number), at(outs_[rank], span.offset), span.length);
  }

  bool takes(size_t unit, size_t round, size_t from) const override {
    return from != place() && round < blocks_[from].size() && piece(unit, blocks_[from][round]).length != 0;
  }

  void take(size_t unit, size_t round, size_t from, std::uint64_t number) override {
    const int rank = blocks_[from][round];
    const Span span = piece(unit, rank);
    copy_bytes(at(outs_[rank], span.offset), slot(from, number), span.length);
  }

 private:
  Span piece(size_t unit, int rank) const { return Span(unit, unit_, bytes_[rank]); }

  const std::byte* const in_;
  const std::vector<void*> outs_;
  const Bytes bytes_;
  const size_t longest_, unit_;
  std::vector<std::vector<int>> blocks_;  // that each rank of this host hands out: its own first
  std::vector<int> takers_;               // of this rank's block, on other hosts
  size_t most_blocks_ = 0;
};

}  // namespace

Task hierarchical_all_gather(Reach reach, const void* in, std::vector<void*> outs, Bytes bytes) {
  return run_pipeline(std::make_unique<AllGather>(reach, in, std::move(outs), std::move(bytes)));
}

}  // namespace aiocomms
