// What a rank says when it closes a communicator, and what that ends.

#include <algorithm>
#include <cstring>

#include "engine/engine.hpp"

namespace aiocomms {

std::string Farewell::pack() const {
  std::string frame(1, kind);
  frame.append(reinterpret_cast<const char*>(&order), sizeof order);
  frame.append(reinterpret_cast<const char*>(&group), sizeof group);
  frame.append(reinterpret_cast<const char*>(&rank), sizeof rank);
  return frame.append(reinterpret_cast<const char*>(&collectives), sizeof collectives);
}

bool Farewell::unpack(const std::string& frame, Farewell& farewell) {
  if (frame.size() != 1 + 3 * sizeof order + sizeof collectives) return false;
  const char* at = frame.data();
  farewell.kind = *at++;
  auto read = [&](auto& field) {
    std::memcpy(&field, at, sizeof field);
    at += sizeof field;
  };
  read(farewell.order);
  read(farewell.group);
  read(farewell.rank);
  read(farewell.collectives);
  return true;
}

void Engine::heard(int peer, std::string frame) {
  std::lock_guard lock(lock_);
  const char kind = frame.empty() ? '\0' : frame[0];
  Farewell farewell;
  if (kind == 'A') {
    awaited_[peer] = false;
  } else if ((kind == 'B' || kind == 'E') && Farewell::unpack(frame, farewell)) {
    farewells_[peer].push_back(farewell);
    while (advance()) {
    }
    obey(peer);
  } else {
    reports_.notify({Notice::kFrame, peer, 0, 0, std::move(frame)});
  }
}

void Engine::obey(int peer) {
  std::vector<Farewell> waiting;
  waiting.swap(farewells_[peer]);
  for (const Farewell& farewell : waiting) {
    if (static_cast<std::int32_t>(received_[peer] - farewell.order) < 0) {
      farewells_[peer].push_back(farewell);
    } else if (farewell.kind == 'E') {
      control_->send(peer, "A");
    } else {
      auto found = groups_.find(farewell.group);
      if (found != groups_.end() && farewell.rank < found->second->peers.size()) {
        left(*found->second, static_cast<int>(farewell.rank), farewell.collectives);
      }
    }
  }
}

void Engine::left(Group& from, int rank, std::uint64_t collectives) {
  from.left[rank] = 1 + collectives;
  from.mail.drain_receives(
      [&](const Key& key) { return key.source() == rank && key.channel() < kUserChannels; },
      [&](Request* request) { complete(request, Status::kClosed, static_cast<std::uint64_t>(rank)); });
  // What it has offered and nobody has taken is not there any more.
  from.mail.drain_messages([&](const Key& key) { return key.source() == rank; },
                           [&](Message* message) {
                             if (message->header.dtype & kOffered) {
                               delete message;
                             } else {
                               from.mail.keep(message);
                             }
                           });
  // Nor does it vouch for anything any more.
  std::erase_if(from.vouches, [&](const auto& entry) {
    const auto& [message, vouch] = entry;
    const bool vain = message.first == rank && vouch.waits && !vouch.waits->event;
    if (vain) complete(vouch.waits, Status::kClosed, static_cast<std::uint64_t>(rank));
    return vain;
  });
  for (auto& [number, window] : from.windows) {
    Queue<Request>& waits = window.parts[rank].waits;
    while (!waits.empty()) complete(waits.pop(), Status::kClosed, static_cast<std::uint64_t>(rank));
  }
  reports_.notify({Notice::kLeft, rank, from.id, collectives, {}});
}

}  // namespace aiocomms
