// The engine's view of a torch.Tensor.
//
// A question to a tensor from Python takes 50 ns, and a small collective takes 3 us in all. Torch answers most
// questions in one call of its DLPack table (DLPack 1.3, "C exchange API"; seen in torch 2.13). Without that table they
// are asked one by one.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "collectives/reduce.hpp"

namespace aiocomms {

struct View {
  void* data;
  std::size_t count;
  DType dtype;
  std::span<const std::int64_t> shape = {};  // Set by plain_view only, and valid until the tensor changes.
  std::size_t bytes() const { return count * size_of(dtype); }
};

// The view of a tensor that has passed its checks. The tensor is not kept alive.
View view_of(nanobind::handle tensor);

// The names of the dtypes, in their order.
nanobind::tuple dtype_names();

// Sets the offsets of a tensor's words that answer questions to torch, and the keys of a plain tensor. See
// aiocomms/ops/tensor_words.py. Before this call torch is asked.
void read_words_at(std::size_t impl, std::size_t keys, std::size_t autograd, std::uint64_t plain);

// A view of a certainly plain CPU tensor. It is dense and contiguous, and has a dtype of DType. It has its own memory,
// and no lazy conjugate or negation. If it is written, autograd does not track it. None: the tensor may not be plain,
// or the object is no tensor.
std::optional<View> plain_view(nanobind::handle tensor, bool written);

// Tells autograd that a tensor is written outside torch. Autograd then refuses gradients that need an earlier value. It
// takes at most some 0.2 µs and runs no Python code, so the engine's lock may be held.
void note_write(nanobind::handle tensor);

}  // namespace aiocomms
