// The one op of PyTorch that saves a tensor for backward before it has written it: the noise of
// rrelu in training (derivatives.yaml has no other whose derivative reads an argument that the op
// writes). A hook that looks at the values at once, as an offload does, or that ends a recompute
// with the last tensor saved, as a region does, would find what the memory held before.
//
// Wherever memopt's hooks are active the noise is drawn first, and the output is what it then is,
// input * noise, in the same bits, forward and backward.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rrelu_with_noise.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/library.h>

#include <optional>

#include "key.h"

namespace memopt::intercept {

namespace {

using at::Scalar;
using at::Tensor;
using Generator = std::optional<at::Generator>;

// Otherwise backward does not read the noise, or nothing is saved.
bool reads_noise(const Tensor& self, bool training) {
  constexpr auto kTransform = c10::DispatchKey::FuncTorchDynamicLayerFrontMode;
  return training && self.requires_grad() && at::GradMode::is_enabled() &&
         !torch::jit::tracer::isTracing() && !c10::impl::tls_is_dispatch_key_included(kTransform);
}

void draw(const Tensor& self, Tensor& noise, const Scalar& lower, const Scalar& upper,
          Generator generator) {
  const at::NoGradGuard no_grad;
  at::rrelu_with_noise(self, noise, lower, upper, /*training=*/true, std::move(generator));
}

Tensor rrelu(const Tensor& self, Tensor& noise, const Scalar& lower, const Scalar& upper,
             bool training, Generator generator) {
  const PassOn pass_on;
  if (!reads_noise(self, training))
    return at::rrelu_with_noise(self, noise, lower, upper, training, std::move(generator));
  draw(self, noise, lower, upper, std::move(generator));
  return at::mul(self, noise);
}

Tensor& rrelu_(Tensor& self, Tensor& noise, const Scalar& lower, const Scalar& upper, bool training,
               Generator generator) {
  const PassOn pass_on;
  if (!reads_noise(self, training))
    return at::rrelu_with_noise_(self, noise, lower, upper, training, std::move(generator));
  draw(self, noise, lower, upper, std::move(generator));
  return self.mul_(noise);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("rrelu_with_noise", rrelu);
  m.impl("rrelu_with_noise_", rrelu_);
}

}  // namespace memopt::intercept
