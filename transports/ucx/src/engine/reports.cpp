#include "engine/reports.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "engine/groups.hpp"
#include "net/clock.hpp"

namespace aiocomms {

Reports::Reports(Pacer& pacer) : pacer_(pacer), fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Reports::~Reports() { close(); }

void Reports::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void Reports::add(Outcome outcome, std::uint64_t began) noexcept {
  --pending_;
  pacer_.note_outcome(began, now_ns());
  outcomes_.push_back(outcome);  // make_room() has reserved the room.
  ready_.store(true, std::memory_order_relaxed);
}

void Reports::notify(Notice notice) {
  notices_.push_back(std::move(notice));
  rouse();
}

void Reports::rouse() noexcept {
  ready_.store(true, std::memory_order_relaxed);
  wake_loop();
}

void Reports::fail(Group& group) noexcept {
  group.failure.note();
  untold_ = true;
  rouse();
}

void Reports::fail() noexcept {
  failure_.note();
  untold_ = true;
  rouse();
}

void Reports::fail(const char* why) noexcept {
  failure_.note(why);
  untold_ = true;
  rouse();
}

void Reports::tell_untold(Groups& groups) {
  groups.each([this](Group& group) {
    if (failure_) group.failure.note(failure_.why());
    if (!group.failure || group.failure_told) return;
    notify({Notice::kFailed, -1, group.id, 0, group.failure.why()});
    group.failure_told = true;
  });
  untold_ = false;
}

std::string Reports::take_beginning(Ticket ticket) {
  auto found = beginnings_.extract(ticket);
  return found ? std::move(found.mapped()) : std::string();
}

void Reports::wake_loop() noexcept {
  if (loop_is_woken_ || fd_ < 0) return;
  loop_is_woken_ = true;
  std::uint64_t one = 1;
  [[maybe_unused]] ssize_t written = write(fd_, &one, sizeof one);
}

void Reports::collect(std::vector<Outcome>& outcomes, std::vector<Notice>& notices) {
  outcomes.reserve(outcomes_.size());
  notices.swap(notices_);
  outcomes.assign(outcomes_.begin(), outcomes_.end());
  outcomes_.clear();  // Its room stays reserved for the pending ops.
  ready_.store(false, std::memory_order_relaxed);
  if (!loop_is_woken_) return;
  loop_is_woken_ = false;
  std::uint64_t woken;
  [[maybe_unused]] ssize_t got = read(fd_, &woken, sizeof woken);
}

}  // namespace aiocomms
