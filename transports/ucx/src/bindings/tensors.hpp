// What the engine needs to know of a torch.Tensor.
//
// Asking a tensor from Python costs 50 ns a question, and a small collective takes 3 us in all. Torch answers most of
// the questions in one call of its DLPack table (DLPack 1.3, "C exchange API"; seen in torch 2.13); where there is no
// such table they are put one by one.
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
  std::span<const std::int64_t> shape = {};  // of one from plain_view, for as long as nothing changes the tensor
  std::size_t bytes() const { return count * size_of(dtype); }
};

// A tensor whose checks have passed; it is not kept alive.
View view_of(nanobind::handle tensor);

// The names of the dtypes, in their order.
nanobind::tuple dtype_names();

// Where a tensor has the words that answer questions to torch, and the keys of one about which there is nothing
// special: see tensor_words.py. Until this is called torch is asked.
void read_words_at(std::size_t impl, std::size_t keys, std::size_t autograd, std::uint64_t plain);

// A view of what is certainly a plain tensor on the CPU: dense, contiguous, of a dtype of DType, with memory of its own
// and no lazy conjugate or negation; and, if it is to be written to, one that autograd does not track. None: perhaps
// not; it may be no tensor at all.
std::optional<View> plain_view(nanobind::handle tensor, bool written);

// Tells autograd that a tensor is written past torch: it refuses gradients that need a value from before. It takes
// 70 ns, and runs no code of Python's: the engine's lock may be held.
void note_write(nanobind::handle tensor);

}  // namespace aiocomms
