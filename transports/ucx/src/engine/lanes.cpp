#include "engine/lanes.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace aiocomms {
namespace {

constexpr std::size_t kSpare = 64;

}  // namespace

void Contributions::clear() {
  for (int rank = 0; rank < static_cast<int>(of.size()); ++rank) clear(rank);
}

void Contributions::clear(int rank) {
  Contribution& one = of[static_cast<std::size_t>(rank)];
  come -= one.come;
  one.come = false;
  one.more.reset();
}

// --------------------------------------------------------------------------------------------------- for the schedules

LaneCalls::Wait LaneCalls::meet(const void* data, std::size_t bytes) {
  mine_ = data;
  lanes_of(group).tell({Board::kGives, this, data, bytes});
  return {*this, Waits::kMeeting};
}

LaneCalls::Wait LaneCalls::turn() {
  lanes_of(group).tell({Board::kGives, this, nullptr, 0});
  return {*this, Waits::kTurn};
}

const void* LaneCalls::given(int rank) const {
  return rank == group.rank ? mine_ : now.of[static_cast<std::size_t>(rank)].data();
}

Shared& LaneCalls::slots() { return *lanes_of(group).slots_; }

// ----------------------------------------------------------------------------------------------------------- the lanes

Lanes::Lanes(Group& group, const SharedMemory& memory, Sender& sender, Inbox& inbox, Schedules& schedules,
             Reports& reports)
    : group_(group), sender_(sender), inbox_(inbox), schedules_(schedules), reports_(reports) {
  spare_.reserve(kSpare);  // The end of a lane must not need memory.
  if (memory.fd < 0) return;
  slots_ = std::make_unique<Shared>(memory, Segment::bytes(memory.ranks));
  board_ = std::make_unique<Board>(memory.fd, 2 * Segment::bytes(memory.ranks), memory.rank, memory.ranks);
  slots_->slice_ends = &schedules.slice_ends();
}

LaneCalls& Lanes::at(std::uint64_t number) {
  const auto found = lanes_.find(number);
  if (found != lanes_.end()) return *found->second;
  if (!spare_.empty()) {
    Map::node_type node = std::move(spare_.back());
    spare_.pop_back();
    node.key() = number;
    node.mapped()->number = number;
    return *lanes_.insert(std::move(node)).position->second;
  }
  auto made = std::make_unique<LaneCalls>(group_);
  made->number = number;
  if (board_) {
    made->now.of.resize(group_.peers.size());
    made->next.of.resize(group_.peers.size());
  } else {
    std::vector<int> all(group_.peers.size());
    for (std::size_t rank = 0; rank < all.size(); ++rank) all[rank] = static_cast<int>(rank);
    made->wire = std::make_unique<Wire>(sender_, inbox_, schedules_, group_, std::move(all), made.get());
  }
  return *lanes_.emplace(number, std::move(made)).first->second;
}

// Releases an idle lane.
void Lanes::forget(LaneCalls& lane) noexcept {
  if (!lane.calls.empty() || lane.now.come > 0 || lane.next.come > 0) return;
  lane.given_up = false;
  Map::node_type node = lanes_.extract(lane.number);
  if (spare_.size() < spare_.capacity()) spare_.push_back(std::move(node));
}

void Lanes::begin(LaneCalls& lane, Schedule schedule) {
  enqueue(lane, std::move(schedule));
  if (!lane.running && !group_.lost) schedules_.attempt(group_, [&] { go_on(lane); });
  schedules_.settle(group_);
}

void Lanes::enqueue(LaneCalls& lane, Schedule schedule) {
  schedules_.activate(group_);
  lane.calls.push_back(std::move(schedule));
  ++group_.lane_calls;
}

void Lanes::start_next(std::uint64_t number) noexcept {
  const auto found = lanes_.find(number);  // The lane may have ended with its collectives.
  if (found != lanes_.end() && !group_.lost) schedules_.attempt(group_, [&] { go_on(*found->second); });
}

void Lanes::start(LaneCalls& lane) {
  const std::uint64_t fingerprint = lane.calls.front().fingerprint;
  lane.running = true;
  for (std::size_t rank = 0; rank < lane.now.of.size(); ++rank) {
    const Contribution& one = lane.now.of[rank];
    if (one.come && one.fingerprint != fingerprint) report_mismatch(lane, static_cast<int>(rank));
  }
  lane.calls.front().task.start();
  if (!left_ || !board_) return;
  for (int rank = 0; rank < lane.ranks(); ++rank) {
    if (!group_.left[rank]) continue;
    take_from(rank);
    if (!lane.now.of[rank].come) report_left(lane, rank);
  }
}

// Moves a lane on as far as possible.
void Lanes::go_on(LaneCalls& lane) {
  if (is_free(lane)) drop_first(lane);
  while (!lane.calls.empty() && !lane.stuck && !(lane.given_up && lane.wire)) {
    if (!lane.running) {
      start(lane);
    } else if (lane.calls.front().task.done()) {
      end(lane);
    } else if (!resume(lane)) {
      break;
    }
  }
  schedules_.wake_peers(group_);
  if (lane.calls.empty()) forget(lane);
}

// Resumes the collective if the awaited entries have arrived.
bool Lanes::resume(LaneCalls& lane) {
  if (lane.waits_ == LaneCalls::Waits::kNothing || !met(lane)) return false;
  if (lane.waits_ == LaneCalls::Waits::kTurn) {
    if (group_.rank == 0 && !lane.ordering) append(lane);
    if (order_.empty() || order_.front() != &lane) return false;
    slots_->fingerprint = lane.calls.front().fingerprint;
  }
  lane.waits_ = LaneCalls::Waits::kNothing;
  std::exchange(lane.handle_, nullptr).resume();
  return true;
}

void Lanes::end(LaneCalls& lane) {
  lane.calls.front().task.check();  // A failed collective stops itself and all collectives behind it.
  Schedule schedule = std::move(lane.calls.front());
  lane.calls.pop_front();
  --group_.lane_calls;
  lane.running = false;
  if (std::exchange(lane.ordered, false)) order_.pop_front();
  lane.ordering = false;
  lane.now.clear();
  std::swap(lane.now, lane.next);
  const Unequal& unequal = schedule.op->unequal;
  if (unequal.rank >= 0) {
    schedule.op->end(Status::kUnequal, static_cast<std::uint64_t>(unequal.rank), unequal.given);
  } else {
    schedule.op->end(Status::kDone);
  }
}

// Every rank has called the collective. It is in the order once the entry is written.
void Lanes::append(LaneCalls& lane) {
  lane.ordering = true;
  tell({Board::kOrders, &lane, nullptr, 0});
}

// --------------------------------------------------------------------------------------------------- messages of lanes

void Lanes::report_mismatch(LaneCalls& lane, int rank) {
  if (!std::exchange(lane.stuck, true)) reports_.notify({Notice::kLaneDisagrees, rank, group_.id, lane.number, {}});
}

void Lanes::report_left(LaneCalls& lane, int rank) {
  if (!std::exchange(lane.stuck, true)) reports_.notify({Notice::kLaneLeft, rank, group_.id, lane.number, {}});
}

// ------------------------------------------------------------------------------------------------------- shared memory

void Lanes::tell(const Entry& entry) {
  if (!unwritten_.empty() || !write(entry)) unwritten_.push_back(entry);
}

// This rank's own contribution also counts only once it is written. Until then its memory must not change.
bool Lanes::write(const Entry& entry) {
  LaneCalls& lane = *entry.lane;
  const std::uint64_t fingerprint = lane.calls.front().fingerprint;
  if (!board_->write(entry.kind, lane.number, fingerprint, entry.data, entry.bytes)) return false;
  group_.shared->published_any = true;
  if (entry.kind == Board::kGives) {
    Contribution& mine = lane.now.of[static_cast<std::size_t>(group_.rank)];
    mine.come = true;
    mine.fingerprint = fingerprint;
    ++lane.now.come;
  } else {
    order_.push_back(&lane);
    lane.ordered = true;
  }
  return true;
}

bool Lanes::write_rest() {
  bool moved = false;
  while (!unwritten_.empty() && write(unwritten_.front())) {
    LaneCalls& lane = *unwritten_.front().lane;
    unwritten_.pop_front();
    if (met(lane)) go_on(lane);
    moved = true;
  }
  return moved;
}

bool Lanes::take_from(int rank) {
  bool moved = false;
  for (std::uint64_t count = 0; count < Board::kCells; ++count) {
    const Board::Entry entry = board_->next(rank);
    if (entry.cell == nullptr) break;
    accept(rank, entry);
    moved = true;
  }
  if (moved) group_.shared->published_any = true;  // There is new room on the board.
  return moved;
}

// The entry is taken before its lane moves on, because the lane may read the board itself.
void Lanes::accept(int rank, const Board::Entry& entry) {
  LaneCalls& lane = at(entry.cell->lane);
  if (entry.cell->kind == Board::kGives) {
    accept_contribution(lane, rank, entry);
  } else if (rank != 0 || lane.ordered || lane.waits_ != LaneCalls::Waits::kTurn) {
    throw std::runtime_error("a rank orders what nobody has called");
  } else {
    order_.push_back(&lane);
    lane.ordered = true;
  }
  board_->take(rank);
  if (lane.running && met(lane)) go_on(lane);
}

void Lanes::accept_contribution(LaneCalls& lane, int rank, const Board::Entry& entry) {
  const Board::Cell& cell = *entry.cell;
  const std::size_t place = static_cast<std::size_t>(rank);
  Contributions& all = lane.now.of[place].come ? lane.next : lane.now;
  Contribution& one = all.of[place];
  if (one.come || cell.bytes > Board::kLargest) throw std::runtime_error("a rank calls what makes no sense in a lane");
  if (cell.bytes > Board::kInline) one.more = std::make_unique_for_overwrite<std::byte[]>(cell.bytes);
  std::memcpy(one.more ? one.more.get() : one.little.data(), entry.data, cell.bytes);
  one.bytes = cell.bytes;
  one.fingerprint = cell.fingerprint;
  one.come = true;
  ++all.come;
  const bool running = lane.running && &all == &lane.now;
  if (running && cell.fingerprint != lane.calls.front().fingerprint) report_mismatch(lane, rank);
}

bool Lanes::poll() {
  bool moved = false;
  if (!board_) return false;
  for (int rank = 0; rank < slots_->ranks(); ++rank) {
    if (rank != group_.rank) moved |= take_from(rank);
  }
  if (!unwritten_.empty()) moved |= write_rest();
  if (!order_.empty()) {
    if (slots_->poll()) moved = true;
    if (slots_->disagrees >= 0) report_mismatch(*order_.front(), std::exchange(slots_->disagrees, -1));
    follow_order();
  }
  if (slots_->published_any) {
    slots_->published_any = false;
    group_.shared->published_any = true;
  }
  schedules_.wake_peers(group_);
  return moved;
}

// The head of the order may have ended. Then the next collective has its turn.
void Lanes::follow_order() {
  while (!order_.empty()) {
    LaneCalls& lane = *order_.front();
    const bool ended = lane.calls.front().task.done();
    if (!ended && !(lane.waits_ == LaneCalls::Waits::kTurn && met(lane))) break;
    go_on(lane);
    if (!ended && !order_.empty() && order_.front() == &lane) break;
  }
}

void Lanes::end_with(int rank) {
  left_ = true;
  if (!board_) return;
  take_from(rank);
  forget_left(rank);
  for (auto& [number, lane] : lanes_) {
    if (lane->running && !lane->given_up && !lane->now.of[static_cast<std::size_t>(rank)].come)
      report_left(*lane, rank);
  }
}

Ticket Lanes::under_way(std::uint64_t number) const {
  const auto found = lanes_.find(number);
  return found == lanes_.end() || found->second->calls.empty() ? 0 : found->second->calls.front().op->ticket;
}

std::vector<int> Lanes::missing(std::uint64_t number) const {
  std::vector<int> ranks;
  const auto found = lanes_.find(number);
  if (found == lanes_.end()) return ranks;
  const LaneCalls& lane = *found->second;
  if (!board_) return lane.awaited;
  if (lane.given_up && !lane.ordered) return {0};
  for (int rank = 0; rank < lane.ranks(); ++rank) {
    if (lane.running && !lane.now.of[static_cast<std::size_t>(rank)].come) ranks.push_back(rank);
  }
  if (ranks.empty() && !order_.empty() && order_.front() == &lane) return slots_->missing();
  return ranks;
}

void Lanes::drop_schedules() noexcept {
  if (slots_) slots_->forget();
  for (auto& [number, lane] : lanes_) {
    while (!lane->calls.empty()) {
      lane->calls.front().op->drop();
      lane->calls.pop_front();
      --group_.lane_calls;
    }
  }
  order_.clear();
  unwritten_.clear();
}

}  // namespace aiocomms
