// What the ops that drop elements share below autograd: checks, and where a call's random numbers
// come from.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "../kernels/dropout.h"

namespace memopt::ops {

// Between 0 and 1.
void check_p(const char* op, double p);

// An int64 tensor [seed, offset] on the device of `like`, which `like_name` names.
void check_state(const char* op, const at::Tensor& state, const char* like_name,
                 const at::Tensor& like);

// Uninitialised, on input's device.
at::Tensor new_state(const at::Tensor& input);

// What one call drops, for a kernel's Params.
struct Drop {
  kernels::DropoutRule rule;
  int64_t* state;     // where the call leaves its state for backward; null: nowhere
  at::Tensor source;  // keeps alive what the rule reads; may be undefined
};

// Forward's: the numbers of `given`, or where there are none new ones out of the generator of
// input's device, which are left in `state` if it is defined.
Drop drawn_drop(const at::Tensor& input, double p, const at::Tensor& given,
                const at::Tensor& state);

// The numbers of a given state.
Drop given_drop(const at::Tensor& state, double p);

// What a CUDA kernel does with Drop::state, for the CPU.
inline void leave_state(const Drop& drop) {
  if (drop.state == nullptr) return;
  drop.state[0] = static_cast<int64_t>(drop.rule.seed);
  drop.state[1] = static_cast<int64_t>(drop.rule.offset);
}

// The state argument of a _forward op, checked, undefined for None; and what the op returns for it:
// a new state where none was given and a backward will want one.
struct StateArgument {
  at::Tensor given;
  at::Tensor drawn;
};
StateArgument state_argument(const char* op, const std::optional<at::Tensor>& rng_state,
                             const at::Tensor& input, bool for_backward);

}  // namespace memopt::ops
