// Random numbers for kernels that compute their own from a state (kernels/dropout.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace memopt::ops {

struct RandomState {
  uint64_t seed;
  uint64_t offset;
};

// A state of its own for one call on `tensor`'s device, out of that device's default generator: so
// torch.manual_seed, get/set_rng_state, fork_rng and what replays random numbers (checkpoints) rule
// it. On CUDA the generator's seed and offset, and the offset moves on by one Philox step, as it
// does for PyTorch's own kernels. On the CPU, whose generator is no Philox, 128 of its bits.
RandomState draw_random_state(const at::Tensor& tensor);

// The same as a tensor [seed, offset] on `tensor`'s device: for a graph, whose every replay has to
// draw another one.
at::Tensor draw_random_state_on_device(const at::Tensor& tensor);

}  // namespace memopt::ops
