// Collectives as schedules of messages, for any number of ranks and any transport that carries messages.
//
// Every rank of the group starts the same collective, with the same root, counts and common sizes. Only these choose
// the algorithm, so all ranks choose the same one. For a fixed size and number of ranks the order of every reduction is
// fixed. All ranks of an all_reduce end with the same bits.
//
// The caller keeps the Messages, the tensors' memory, and the arrays of pointers and sizes alive until the task is
// done. Memory that is read and memory that is written do not overlap, unless a comment allows it. A task may only be
// destroyed early after the transport has released the memory of all its messages. A pointer to zero bytes may have any
// value. No message is sent for it, and such a collective need not synchronise.
#pragma once

#include <cstddef>

#include "collectives/reduce.hpp"
#include "collectives/schedule.hpp"

namespace aiocomms {

// The barrier ends on no rank before every rank has started it.
Task barrier(Messages& messages);

// The root's `bytes` at `data` go to `data` on every rank.
Task broadcast(Messages& messages, int root, void* data, std::size_t bytes);

// `data`, with `count` elements, becomes the reduction of all ranks' `data`.
Task all_reduce(Messages& messages, const Reduction& reduction, void* data, std::size_t count);

// The root's `out` becomes the reduction of all ranks' `in`. Other ranks ignore `out`. On the root `in` may be `out`.
Task reduce(Messages& messages, const Reduction& reduction, int root, const void* in, void* out, std::size_t count);

// `output` becomes the reduction of all ranks' inputs[rank], with counts[rank] elements. It may be this rank's
// inputs[rank]. `inputs` and `counts` have an entry for each rank. All ranks have the same counts.
Task reduce_scatter(Messages& messages, const Reduction& reduction, const void* const* inputs,
                    const std::size_t* counts, void* output);

// outs[r] becomes rank r's `in`, with bytes[r] bytes, on every rank. `in` may be outs[rank]. All ranks have the same
// `bytes`.
Task all_gather(Messages& messages, const void* in, void* const* outs, const std::size_t* bytes);

// The root's outs[r] becomes rank r's `in`. Other ranks ignore `outs`. On the root `in` may be outs[root].
Task gather(Messages& messages, int root, const void* in, void* const* outs, std::size_t bytes);

// `out` becomes the root's ins[rank]. Other ranks ignore `ins`. On the root `out` may be ins[root].
Task scatter(Messages& messages, int root, const void* const* ins, void* out, std::size_t bytes);

// outs[r] becomes rank r's ins[rank]. in_bytes[b] of rank a equals out_bytes[a] of rank b. `equal`: every block of
// every rank has the same size. Only the caller can know this, and all ranks must pass the same value.
Task all_to_all(Messages& messages, const void* const* ins, const std::size_t* in_bytes, void* const* outs,
                const std::size_t* out_bytes, bool equal);

}  // namespace aiocomms
