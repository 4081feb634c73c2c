// Activations: y = f(x) element by element, with f'(x) from the same function.
//
//   silu          f = x s(x)                 f' = s + x s (1 - s)
//   relu          f = max(x, 0)              f' = 1 for x > 0, else 0 (also at 0, as in PyTorch)
//   quick_gelu    f = x s(1.702 x)           f' = s + 1.702 x s (1 - s), s at 1.702 x
//   relu_squared  f = max(x, 0)^2            f' = 2 max(x, 0)
//   sigmoid       f = s(x)                   f' = s (1 - s)
//   softcap       f = c tanh(x / c)          f' = 1 - tanh(x / c)^2, c > 0 its scalar
//   gelu          kernels/gelu.h
//
// s(x) = 1 / (1 + exp(-x)) is the logistic function. Sources: SiLU, Elfwing et al.,
// arXiv:1702.03118; quick_gelu, Hendrycks & Gimpel, arXiv:1606.08415, section 2; relu_squared, So
// et al., arXiv:2109.08668; softcap, Gemma 2 (Riviere et al., arXiv:2408.00118, section 2), which
// caps attention and output logits by it.
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

#include "dropout.h"
#include "gelu.h"

namespace memopt::kernels {

// s(x) as a quotient: what is multiplied by s is multiplied by `scale` and divided once.
template <class V>
struct Logistic {
  V scale;    // s(x) = scale / divisor
  V tail;     // s(-|x|) = tail / divisor
  V divisor;  // 0.7 to 2.5
};

// With 1 + exp(-x) in hand, and a power of two taken out of both sides for x < 0, so that nothing
// overflows: exp(-x) = 2^n (1 + u), where n is an integer and exp(r) - 1 = u for a remainder |r| <=
// ln(2) / 2, and so
//
//   n <= 0   s = 1 / (1 + (2^n u + 2^n))         n >= 0   s = 2^-n / (1 + (u + 2^-n))
//
// The upper part of ln 2 has so few bits that its product with n is exact, so that r is right
// without a fused multiply-add as well. u by a polynomial (minimax in relative error of 1 + u,
// 4e-9, fitted for this file). Beyond |x| = 104 exp(-|x|) is 0 in float, so |x| stops there and
// stays finite.
template <class V>
MEMOPT_HD Logistic<V> logistic(V x) {
  using M = Math<V>;
  const V zero(0.0f), one(1.0f);
  const V t = M::clamp_max(M::abs(x), V(104.0f));
  const V magic(12582912.0f);  // 1.5 * 2^23: the sum has no fraction
  const V n = M::fma(t, V(1.4426950409f), magic) - magic;
  const V rest = M::fma(n, V(-2.12194440e-4f), M::fma(n, V(0.693359375f), zero - t));
  const V r = M::if_negative(x, zero - rest, rest);
  V u = M::fma(V(1.3814539e-3f), r, V(8.368745e-3f));
  u = M::fma(u, r, V(4.166839e-2f));
  u = M::fma(u, r, V(1.6666521e-1f));
  u = M::fma(u, r, V(4.9999994e-1f));
  u = M::fma(u, r * r, r);
  const V power = M::power_of_two(zero - n);
  const V rest_of_divisor = M::fma(M::if_negative(x, one, power), u, power);
  return {M::if_negative(x, power, one), M::if_negative(x, power, rest_of_divisor),
          one + rest_of_divisor};
}

#if defined(__CUDA_ARCH__)
// On a GPU e = exp(-|x|) from the hardware's exp2, which takes 12 instructions fewer. It is right
// to an ulp where the argument is small: so exp(-|x|) = 2^n exp(r) as above. 2^(n + 24), which is
// no subnormal number, is n moved to where a float has its exponent.
MEMOPT_HD Logistic<float> logistic(float x) {
  const float t = fminf(fabsf(x), 104.0f);
  const float magic = 12582912.0f + 24.0f + 127.0f;
  const float sum = fmaf(t, -1.4426950409f, magic);
  const float n = sum - magic;
  const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, -t));
  const float power = __int_as_float(__float_as_int(sum) << 23);
  const float exp_r = Math<float>::exp2(r * 1.4426950409f);
  // NaN: the minimum above is 104.
  const float e = x == x ? exp_r * power * 5.9604645e-8f : x;
  return {x < 0 ? e : 1.0f, e, 1.0f + e};
}
#endif

// float64 exists for gradcheck and as an oracle: the library's function, to full precision.
MEMOPT_HD Logistic<double> logistic(double x) {
  const double e = ::exp(-::fabs(x));
  return {x < 0 ? e : 1.0, e, 1.0 + e};
}

// y s(x): one rounding beside those of the quotient.
template <class V>
MEMOPT_HD V times_logistic(V y, const Logistic<V>& f) {
  return Math<V>::divide(y * f.scale, f.divisor);
}

template <class V>
struct LogisticGrad {
  V s;   // s(x)
  V ds;  // s'(x) = s (1 - s)
};

// With q = s(-|x|): s(|x|) = 1 - q, and s' = q - q^2, which keeps its digits in the tails and, near
// 0, does not feel q's error.
template <class V>
MEMOPT_HD LogisticGrad<V> logistic_grad(V x, const Logistic<V>& f) {
  using M = Math<V>;
  const V q = M::divide(f.tail, f.divisor);
  return {M::if_negative(x, q, V(1.0f) - q), M::fma(q, V(0.0f) - q, q)};
}

// max(x, 0), +0 at both zeros, and NaN stays NaN.
template <class V>
MEMOPT_HD V rectify(V x) {
  const V zero(0.0f);
  return zero - Math<V>::clamp_max(zero - x, zero);
}

struct Silu {
  template <class V>
  static MEMOPT_HD V value(V x) {
    return times_logistic(x, logistic(x));
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    const Logistic<V> f = logistic(x);
    const LogisticGrad<V> g = logistic_grad(x, f);
    return {times_logistic(x, f), Math<V>::fma(x, g.ds, g.s)};
  }
};

struct Relu {
  template <class V>
  static MEMOPT_HD V value(V x) {
    return rectify(x);
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    return {rectify(x), Math<V>::if_positive(x, V(1.0f), V(0.0f))};
  }
};

struct QuickGelu {
  template <class V>
  static MEMOPT_HD V value(V x) {
    return times_logistic(x, logistic(V(1.702) * x));
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    const Logistic<V> f = logistic(V(1.702) * x);
    const LogisticGrad<V> g = logistic_grad(x, f);
    // Not (1.702 x) ds: 1.702 x may overflow where ds is 0.
    return {times_logistic(x, f), Math<V>::fma(x, V(1.702) * g.ds, g.s)};
  }
};

struct ReluSquared {
  template <class V>
  static MEMOPT_HD V value(V x) {
    const V r = rectify(x);
    return r * r;
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    const V r = rectify(x);
    return {r * r, r + r};
  }
};

struct Sigmoid {
  template <class V>
  static MEMOPT_HD V value(V x) {
    const Logistic<V> f = logistic(x);
    return Math<V>::divide(f.scale, f.divisor);
  }

  template <class V>
  static MEMOPT_HD ValueGrad<V> value_and_grad(V x) {
    const Logistic<V> f = logistic(x);
    return {Math<V>::divide(f.scale, f.divisor), logistic_grad(x, f).ds};
  }
};

// tanh(a) for a = |x| / c: below 1/2 an odd polynomial (Cephes' tanhf, Moshier), which keeps the
// digits of small values; above, 1 - 2 s(-2 a), which is 1 in float long before a = 52.
struct Softcap {
  double cap;

  template <class V>
  MEMOPT_HD V value(V x) const {
    return value_and_grad(x).value;
  }

  template <class V>
  MEMOPT_HD ValueGrad<V> value_and_grad(V x) const {
    using M = Math<V>;
    const V one(1.0f), c(static_cast<float>(cap)), per_cap(static_cast<float>(1.0 / cap));
    const V a = M::clamp_max(M::abs(x) * per_cap, V(52.0f));
    const V z = a * a;
    V p = M::fma(z, V(-5.70498872745e-3f), V(2.06390887954e-2f));
    p = M::fma(z, p, V(-5.37397155531e-2f));
    p = M::fma(z, p, V(1.33314422036e-1f));
    p = M::fma(z, p, V(-3.33332819422e-1f));
    const V small = M::fma(a * z, p, a);
    const V down = a * V(-2.0f);
    const LogisticGrad<V> f = logistic_grad(down, logistic(down));
    const V above = a - V(0.5f);
    const V t = M::if_negative(above, small, M::fma(V(-2.0f), f.s, one));
    const V dt = M::if_negative(above, M::fma(V(0.0f) - small, small, one), V(4.0f) * f.ds);
    return {c * (M::if_negative(x, V(-1.0f), one) * t), dt};
  }

  // float64 exists for gradcheck and as an oracle: the library's function.
  MEMOPT_HD double value(double x) const { return cap * ::tanh(x / cap); }
  MEMOPT_HD ValueGrad<double> value_and_grad(double x) const {
    const double t = ::tanh(x / cap);
    return {cap * t, 1.0 - t * t};
  }
};

// Whether a zero derivative stops every gradient, infinite ones and NaN too, as PyTorch's threshold
// does.
template <class Function>
constexpr bool kStopsGradient = false;
template <>
inline constexpr bool kStopsGradient<Relu> = true;
template <>
inline constexpr bool kStopsGradient<ReluSquared> = true;

// The gradient of x from the gradient dy of f(x).
template <class Function, class V>
MEMOPT_HD V chain(V dy, V grad) {
  if constexpr (kStopsGradient<Function>) {
    return Math<V>::if_positive(grad, dy * grad, V(0.0f));
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
  ACTIVATION("softcap", kSoftcap, Softcap)

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
