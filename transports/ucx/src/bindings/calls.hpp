// Calls collectives on the engine after the tensors are checked. The methods of the engine (bindings.cpp) and the
// shortcuts (ledger.hpp) use it. Ranks may use either, so both must make the same fingerprints.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "bindings/tensors.hpp"
#include "collectives/collectives.hpp"
#include "engine/request.hpp"

namespace aiocomms {

// The data that each rank sends or receives: a tensor per rank, or one tensor cut into equal blocks in rank order.
struct Blocks {
  std::vector<void*> data;
  Bytes counts, bytes;
  int dtype = 0;

  Inputs inputs() const { return Inputs(data.begin(), data.end()); }
  void add(void* block, std::size_t count, DType type) {
    data.push_back(block);
    counts.push_back(count);
    bytes.push_back(count * size_of(type));
    dtype = static_cast<int>(type);
  }
};

inline Blocks cut(const View& whole, std::size_t size) {
  Blocks blocks;
  const std::size_t count = whole.count / size;
  for (std::size_t i = 0; i < size; ++i) {
    blocks.add(static_cast<std::byte*>(whole.data) + i * count * size_of(whole.dtype), count, whole.dtype);
  }
  return blocks;
}

// The fingerprint of a collective. All ranks must make the same one. (Mixed as in Vigna's splitmix64.)
template <typename... Parts>
std::uint64_t fingerprint_of(Parts... parts) {
  std::uint64_t fingerprint = 0x9E3779B97F4A7C15u;
  auto mix = [&](std::uint64_t part) {
    fingerprint = (fingerprint ^ part) * 0xBF58476D1CE4E5B9u;
    fingerprint ^= fingerprint >> 29;
  };
  (mix(static_cast<std::uint64_t>(parts)), ...);
  return fingerprint;
}

inline std::uint64_t fingerprint_of_list(std::uint64_t fingerprint, const Bytes& sizes) {
  for (std::size_t size : sizes) fingerprint = fingerprint_of(fingerprint, size);
  return fingerprint;
}

struct Reducing {
  Reduction reduction;
  Reducing(DType dtype, int op, double factor) : reduction{static_cast<Operator>(op), dtype, factor} {}
  std::uint64_t fingerprint() const {
    return fingerprint_of(static_cast<int>(reduction.dtype), static_cast<int>(reduction.op),
                          std::bit_cast<std::uint64_t>(reduction.factor));
  }
};

// place: an Engine, or a communicator's lanes. number: the communicator's or the lane's. form: the number of the
// operation.
template <typename Place, typename Number>
double call_barrier(Place& place, Ticket ticket, Number number, int form, std::uint64_t detail) {
  return place.collective(ticket, number, fingerprint_of(form, detail),
                          [](auto& it, Unequal&) { return run_barrier(it); });
}

template <typename Place, typename Number>
double call_broadcast(Place& place, Ticket ticket, Number number, int form, const View& data, int root) {
  return place.collective(ticket, number, fingerprint_of(form, root, static_cast<int>(data.dtype), data.bytes()),
                          [&](auto& it, Unequal&) { return run_broadcast(it, root, data.data, data.bytes()); });
}

template <typename Place, typename Number>
double call_all_reduce(Place& place, Ticket ticket, Number number, int form, const View& data, const Reducing& how) {
  return place.collective(ticket, number, fingerprint_of(form, how.fingerprint(), data.count),
                          [&](auto& it, Unequal&) { return run_all_reduce(it, how.reduction, data.data, data.count); });
}

template <typename Place, typename Number>
double call_reduce_scatter(Place& place, Ticket ticket, Number number, int form, const Blocks& ins, const View& out,
                           const Reducing& how) {
  const std::uint64_t fingerprint = fingerprint_of_list(fingerprint_of(form, how.fingerprint()), ins.counts);
  return place.collective(ticket, number, fingerprint, [&](auto& it, Unequal&) {
    return run_reduce_scatter(it, how.reduction, ins.inputs(), ins.counts, out.data);
  });
}

template <typename Place, typename Number>
double call_all_gather(Place& place, Ticket ticket, Number number, int form, const View& in, const Blocks& outs) {
  return place.collective(ticket, number, fingerprint_of_list(fingerprint_of(form, outs.dtype), outs.bytes),
                          [&](auto& it, Unequal&) { return run_all_gather(it, in.data, outs.data, outs.bytes); });
}

// equal: all blocks of all ranks have one size, as the blocks of one tensor have.
template <typename Place, typename Number>
double call_all_to_all(Place& place, Ticket ticket, Number number, int form, const Blocks& ins, const Blocks& outs,
                       bool equal) {
  const std::uint64_t fingerprint = fingerprint_of(form, ins.dtype, equal ? ins.bytes[0] : 0);
  return place.collective(ticket, number, fingerprint, [&](auto& it, Unequal& unequal) {
    return run_all_to_all(it, ins.inputs(), ins.bytes, outs.data, outs.bytes, equal, unequal);
  });
}

}  // namespace aiocomms
