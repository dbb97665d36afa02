#include "engine/request.hpp"

namespace aiocomms {

void Operation::finished(ucs_status_t result) noexcept {
  if (result == UCS_OK && staging && !group.lost) {
    try {
      reports_.keep_beginning(ticket, {reinterpret_cast<const char*>(staging.get()), beginning.room});
    } catch (const std::bad_alloc&) {
      result = UCS_ERR_NO_MEMORY;
    }
  }
  if (result == UCS_OK) {
    end(status, details[0], details[1]);
  } else if (group.lost) {
    end(Status::kDropped);
  } else {
    end(Status::kBroken, static_cast<std::uint64_t>(-result));
  }
}

void Operation::end(Status how, std::uint64_t a, std::uint64_t b) noexcept {
  if (done_) return;
  done_ = true;
  status = how;
  details[0] = a;
  details[1] = b;
  if (posted_) report();
}

void Operation::expect_outcome() noexcept {
  reports_.expect_outcome();
  expected_ = true;
}

void Operation::forget() noexcept {
  if (expected_) reports_.withdraw();
  delete this;
}

void Operation::withdraw() noexcept {
  withdrawn_ = done_ = true;
  status = Status::kDropped;
  if (posted_) forget();
}

void Operation::leave_post(std::uint64_t began) noexcept {
  if (!expected_) expect_outcome();
  if (withdrawn_) return forget();
  began_ = began;
  posted_ = true;
  if (done_) report();
}

void Operation::report() noexcept {
  reports_.add({ticket, status, {details[0], details[1]}}, began_);
  delete this;
}

}  // namespace aiocomms
