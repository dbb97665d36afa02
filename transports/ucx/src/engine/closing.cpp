#include "engine/closing.hpp"

#include <cstring>

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
  const char kind = *at++;
  if (kind != kCommunicator && kind != kEngine && kind != kEcho) return false;
  farewell.kind = static_cast<Kind>(kind);
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

std::vector<Farewell> Farewells::take_due(int peer, std::uint32_t received) {
  std::vector<Farewell> due, later;
  for (const Farewell& farewell : waiting_[peer]) {
    const bool all_came = static_cast<std::int32_t>(received - farewell.order) >= 0;
    (all_came ? due : later).push_back(farewell);
  }
  waiting_[peer] = std::move(later);
  return due;
}

}  // namespace aiocomms
