// Activations: y = f(x) element by element, with f'(x) from the same function.
//
//   silu          f = x s(x)                 f' = s + x s (1 - s)
//   relu          f = max(x, 0)              f' = 1 for x > 0, else 0 (also at 0, as in PyTorch)
//   quick_gelu    f = x s(1.702 x)           f' = s + 1.702 x s (1 - s), s at 1.702 x
//   relu_squared  f = max(x, 0)^2            f' = 2 max(x, 0)
//   sigmoid       f = s(x)                   f' = s (1 - s)
//   softcap       f = c tanh(x / c)          f' = 1 - tanh(x / c)^2, c > 0 its scalar
//   relu6         f = min(max(x, 0), 6)      f' = 1 for 0 < x < 6, else 0
//   leaky_relu    f = x for x > 0, else a x  f' = 1 for x > 0, else a, a > 0 its scalar
//   elu           f = x for x > 0, else      f' = 1 for x > 0, else a exp(x), a > 0 its scalar
//                 a (exp(x) - 1)
//   hardsigmoid   f = h(x)                   f' = 1/6 for |x| < 3, else 0
//   hardswish     f = x h(x)                 f' = 0 for x <= -3, 1 for x >= 3, else x / 3 + 1/2
//   mish          f = x t                    f' = t + x t', t = tanh(log(1 + exp(x)))
//   gelu          kernels/gelu.h
//
// s(x) = 1 / (1 + exp(-x)) is the logistic function, h(x) = min(max(x + 3, 0), 6) / 6 one in three
// pieces. Sources: SiLU, Elfwing et al., arXiv:1702.03118; quick_gelu, Hendrycks & Gimpel,
// arXiv:1606.08415, section 2; relu_squared, So et al., arXiv:2109.08668; softcap, Gemma 2 (Riviere
// et al., arXiv:2408.00118, section 2), which caps attention and output logits by it; relu6,
// MobileNetV2, arXiv:1801.04381; leaky_relu, Maas et al., ICML 2013; elu, Clevert et al.,
// arXiv:1511.07289; hardsigmoid and hardswish, MobileNetV3, arXiv:1905.02244; mish, Misra,
// arXiv:1908.08681.
//
// Saved for backward: x, 2 bytes an element in bfloat16. Recomputed: f(x), which the backward
// kernel writes out again beside the gradient if asked, so that nobody needs to store it.
//
// With dropout behind it, in the same kernels:
//
//   y = f(x) m              dx = dy m f'(x)              m: dropout.h
//
// f(x) is not rounded before it is multiplied by m, and neither is dy m before f': one rounding to
// the tensors' type where the two ops have two. i, of which m_i is a function, is the element's
// index in the contiguous tensor. What is dropped is multiplied by 0: infinities and NaN become
// NaN. Saved: seed and offset besides, 16 bytes a call. The two ops of PyTorch save x, f(x) behind
// it and a mask. Recomputed: m.
#pragma once

#include <cstdlib>
#include <string_view>
#include <type_traits>

#include "activation_functions.h"
#include "dropout.h"

namespace memopt::kernels {

// Whether a zero derivative stops every gradient, infinite ones and NaN too, as PyTorch's threshold
// does.
template <class Function>
constexpr bool kStopsGradient = false;
template <>
inline constexpr bool kStopsGradient<Relu> = true;
template <>
inline constexpr bool kStopsGradient<ReluSquared> = true;
template <>
inline constexpr bool kStopsGradient<Relu6> = true;
template <>
inline constexpr bool kStopsGradient<Hardsigmoid> = true;
template <>
inline constexpr bool kStopsGradient<Hardswish> = true;

// The gradient of x from the gradient dy of f(x).
template <class Function, class V>
MEMOPT_HD V chain(V dy, V grad) {
  if constexpr (kStopsGradient<Function>) {
    return Math<V>::if_positive(Math<V>::abs(grad), dy * grad, V(0.0f));
  } else {
    return dy * grad;
  }
}

// All activations that have a name: the name, the kind, the function. A new one is a struct above
// and a line here. Its value() and value_and_grad() are static, or const members of a struct that
// holds one double, its scalar, and nothing else (V(scalar) rounds it to the type of sums).
#define MEMOPT_ACTIVATIONS(ACTIVATION)                  \
  ACTIVATION("gelu", kGelu, GeluErf)                    \
  ACTIVATION("gelu_tanh", kGeluTanh, GeluTanh)          \
  ACTIVATION("silu", kSilu, Silu)                       \
  ACTIVATION("relu", kRelu, Relu)                       \
  ACTIVATION("quick_gelu", kQuickGelu, QuickGelu)       \
  ACTIVATION("relu_squared", kReluSquared, ReluSquared) \
  ACTIVATION("sigmoid", kSigmoid, Sigmoid)              \
  ACTIVATION("softcap", kSoftcap, Softcap)              \
  ACTIVATION("relu6", kRelu6, Relu6)                    \
  ACTIVATION("leaky_relu", kLeakyRelu, LeakyRelu)       \
  ACTIVATION("elu", kElu, Elu)                          \
  ACTIVATION("hardsigmoid", kHardsigmoid, Hardsigmoid)  \
  ACTIVATION("hardswish", kHardswish, Hardswish)        \
  ACTIVATION("mish", kMish, Mish)

#define MEMOPT_ACTIVATION_KIND(name, kind, Function) kind,
enum class Activation : int32_t { kIdentity, MEMOPT_ACTIVATIONS(MEMOPT_ACTIVATION_KIND) };
#undef MEMOPT_ACTIVATION_KIND

// An activation as it travels in Params.
struct ActivationSpec {
  Activation kind;
  double scalar;  // of an activation that takes one
};

struct NamedActivation {
  std::string_view name;
  Activation kind;
  bool takes_scalar;
};

#define MEMOPT_ACTIVATION_ENTRY(name, kind, Function) \
  {name, Activation::kind, !std::is_empty_v<Function>},
inline constexpr NamedActivation kActivations[] = {MEMOPT_ACTIVATIONS(MEMOPT_ACTIVATION_ENTRY)};
#undef MEMOPT_ACTIVATION_ENTRY

// Null if no activation has this name.
constexpr const NamedActivation* find_activation(std::string_view name) {
  for (const NamedActivation& activation : kActivations) {
    if (activation.name == name) return &activation;
  }
  return nullptr;
}

// The name of a kind that has one; empty for kIdentity.
constexpr std::string_view activation_name(Activation kind) {
  for (const NamedActivation& activation : kActivations) {
    if (activation.kind == kind) return activation.name;
  }
  return {};
}

// The function object of a type, with its scalar where it takes one.
template <class Function>
MEMOPT_HD Function make_activation([[maybe_unused]] const ActivationSpec& spec) {
  if constexpr (std::is_empty_v<Function>) {
    return {};
  } else {
    return {spec.scalar};
  }
}

// f(Silu{}) and so on, for the activation that is named at run time; kIdentity is none of them.
// Host only.
#define MEMOPT_ACTIVATION_CASE(name, kind, Function) \
  case Activation::kind:                             \
    return f(make_activation<Function>(spec));
template <class F>
auto with_activation(const ActivationSpec& spec, F&& f) {
  switch (spec.kind) {
    MEMOPT_ACTIVATIONS(MEMOPT_ACTIVATION_CASE)
    case Activation::kIdentity:
      break;
  }
  std::abort();
}
#undef MEMOPT_ACTIVATION_CASE

// Elements 0 .. size-1 of dense arrays. `stream_stores` asks the CPU kernels for non-temporal
// stores: the output is larger than the last-level cache, so reading it in before overwriting it
// would be a third of the traffic.
struct ActivationForwardParams {
  const void* x;
  void* y;
  int64_t size;
  ScalarType dtype;
  ActivationSpec activation;
  bool stream_stores;
  bool drops;  // y is multiplied by dropout's keep scales; the arrays are then contiguous
  DropoutRule rule;
  int64_t* state;  // drops: as DropoutParams has it
};

struct ActivationBackwardParams {
  const void* dy;
  const void* x;
  void* dx;  // may be dy itself: in place
  void* y;   // null, or forward's output is re-emitted here, in the same bits
  int64_t size;
  ScalarType dtype;
  ActivationSpec activation;
  bool stream_stores;
  bool drops;  // as forward's
  DropoutRule rule;
};

}  // namespace memopt::kernels
