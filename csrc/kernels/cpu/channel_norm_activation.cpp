// The activation behind a norm over channels: its output or, on the way back, the gradient of what
// it reads, from the norm's input. The norm's output is in registers alone: it takes no memory, and
// input and results come and go while exponentials are computed. Formulas and parts:
// kernels/channel_norm.h.
#include "channel_norm.h"
#include "kernels.h"
#include "prefetch.h"
#include "rounded_to.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

template <class T>
constexpr int64_t kStep = Elements<T>::kStep;
constexpr int64_t kThroughCache = 2048;

// y = (x - mean) scale + bias: a number for each element, in the order that UnorderedElements<T>
// has the lanes of a step in. `each`: 1, or 0 where all steps have those of the first.
template <class T>
struct Affine {
  const Accumulate<T>* mean;
  const Accumulate<T>* scale;
  const Accumulate<T>* bias;
  int64_t each;
};

template <class T>
struct Neighbours {
  const T* x;
  const T* dz;  // null for the activation's output
  T* to;
  int64_t count;
  bool streamed;
};

template <class T, class Extent>
MEMOPT_INLINE auto norm_output(const Affine<T>& a, const T* x, int64_t i, Extent extent) {
  using V = typename Elements<T>::V;
  const Step<V> v = load<UnorderedElements<T>, T>(x + i, extent);
  const Step<V> mean = load(a.mean + i * a.each, Whole{}),
                scale = load(a.scale + i * a.each, Whole{});
  const Step<V> bias = load(a.bias + i * a.each, Whole{});
  return UnorderedElements<T>::rounded(Step<V>{channel_affine(v.lo, mean.lo, scale.lo, bias.lo),
                                               channel_affine(v.hi, mean.hi, scale.hi, bias.hi)});
}

template <class T, class Function>
void output_of(const ActivationSpec& spec, const Affine<T>& a, const Neighbours<T>& n) {
  using E = UnorderedElements<T>;
  using V = typename E::V;
  const auto f = rounded_to<T>(make_activation<Function>(spec));
  for_steps<T>(0, n.count, [=](int64_t i, auto extent) __attribute__((always_inline)) {
    if (!n.streamed) prefetch_stores<E>(n.to + i);
    const Step<V> y = norm_output(a, n.x, i, extent);
    store<E, T, V>(n.to + i, Step<V>{f.value(y.lo), f.value(y.hi)}, extent, n.streamed);
  });
}

template <class T, class Function>
void gradient_of(const ActivationSpec& spec, const Affine<T>& a, const Neighbours<T>& n) {
  using E = UnorderedElements<T>;
  using V = typename E::V;
  const auto f = rounded_to<T>(make_activation<Function>(spec));
  using F = std::remove_const_t<decltype(f)>;
  for_steps<T>(0, n.count, [=](int64_t i, auto extent) __attribute__((always_inline)) {
    prefetch_stores<E>(n.to + i);
    const Step<V> dz = load<E, T>(n.dz + i, extent);
    const Step<V> y = norm_output(a, n.x, i, extent);
    const Step<V> dy{chain<F>(dz.lo, f.value_and_grad(y.lo).grad),
                     chain<F>(dz.hi, f.value_and_grad(y.hi).grad)};
    store<E, T, V>(n.to + i, dy, extent);
  });
}

// One function for both orders in memory: it is compiled for each activation.
template <class T>
using Run = void (*)(const ActivationSpec&, const Affine<T>&, const Neighbours<T>&);
template <class T>
Run<T> run_of(const ChannelNormForwardParams& p) {
  return with_activation(p.activation, [&](auto f) -> Run<T> {
    using Function = decltype(f);
    return p.dz == nullptr ? output_of<T, Function> : gradient_of<T, Function>;
  });
}

template <class T>
Neighbours<T> neighbours(const ChannelNormForwardParams& p, int64_t begin, int64_t count,
                         bool streamed) {
  T* const to = static_cast<T*>(p.y) + begin;
  return {static_cast<const T*>(p.x) + begin,
          p.dz == nullptr ? nullptr : static_cast<const T*>(p.dz) + begin, to, count,
          streamed && is_aligned(to)};
}

// c for `count` elements, and up to a step's end.
template <class T>
void fill(Accumulate<T>* numbers, int64_t count, Accumulate<T> c) {
  using V = typename Elements<T>::V;
  const V v(plane_constant<T>(c));
  for (int64_t i = 0; i < count; i += kStep<T>) store(numbers + i, Step<V>{v, v}, Whole{});
}

// The steps of `count` elements into the lanes' order.
template <class T>
void arrange(Accumulate<T>* numbers, int64_t count) {
  if constexpr (sizeof(T) == 2) {
    for (int64_t i = 0; i < count; i += kStep<T>)
      store(numbers + i, UnorderedElements<T>::arrange(load(numbers + i, Whole{})), Whole{});
  }
}

// Whether planes go through the cache instead, few at a time, with the norm's output written to
// where the result goes: of those that lie side by side, numbers of 16 bits, which gain nothing
// from registers where they are rounded in between, and small planes that are no whole number of
// steps: one of 7 x 7 for itself takes a third more exponentials than it has elements.
template <class T>
bool go_through_cache(const ChannelShape& s) {
  const int64_t computed = ceil_div(s.size, kStep<T>) * kStep<T>;
  return !s.over_batch && (sizeof(T) == 2 || computed > s.size + s.size / 5);
}

template <class T>
void run_through_cache(const ChannelNormForwardParams& p, int64_t begin, int64_t end) {
  const ChannelShape& s = p.shape;
  ChannelNormForwardParams output = p;
  output.stream_stores = false;
  const int64_t few = std::max<int64_t>(1, kThroughCache / std::min(s.size, kPartElements));
  for (int64_t i = begin; i < end; i += few) {
    const int64_t last = std::min(end, i + few);
    channel_output(output, i, last);
    const ChannelPart front = plane_part(s, i), back = plane_part(s, last - 1);
    const int64_t count = back.begin + back.size - front.begin;
    const auto n = neighbours<T>(p, front.begin, count, p.stream_stores);
    if (n.dz == nullptr) {
      activation_forward({n.to, n.to, count, p.dtype, p.activation, n.streamed}, 0, count);
    } else {
      activation_backward({n.dz, n.to, n.to, nullptr, count, p.dtype, p.activation}, 0, count);
    }
  }
}

template <class T>
void run_planes(const ChannelNormForwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  if (go_through_cache<T>(p.shape)) return run_through_cache<T>(p, begin, end);
  const Run<T> run = run_of<T>(p);
  alignas(64) A mean[kStep<T>], scale[kStep<T>], bias[kStep<T>];
  const auto of_channel = [](const void* parameter, int64_t channel, A otherwise) {
    return parameter == nullptr ? otherwise : static_cast<const A*>(parameter)[channel];
  };
  for_plane_parts(p.shape, begin, end, [&](const PlanePart& part) {
    const A rstd = static_cast<const A*>(p.rstd)[part.set];
    fill<T>(mean, kStep<T>, static_cast<const A*>(p.mean)[part.set]);
    fill<T>(scale, kStep<T>, rstd * of_channel(p.weight, part.channel, 1));
    fill<T>(bias, kStep<T>, of_channel(p.bias, part.channel, 0));
    const Affine<T> a{mean, scale, bias, 0};
    run(p.activation, a, neighbours<T>(p, part.begin, part.size, p.stream_stores));
  });
}

template <class T>
void run_pixels(const ChannelNormForwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  const Run<T> run = run_of<T>(p);
  const ChannelShape& s = p.shape;
  const int64_t channels = s.channels;
  const ChannelArrays<A> arrays(3, ceil_div(channels, kStep<T>) * kStep<T>);
  const bool streamed = p.stream_stores && channels * static_cast<int64_t>(sizeof(T)) % 64 == 0;
  const auto* const weights = static_cast<const A*>(p.weight);
  int64_t sample = -1;
  for (int64_t i = begin; i < end; ++i) {
    const ChannelPart part = pixels_part(s, i);
    if (part.sample != sample && (sample < 0 || !s.over_batch)) {
      for (int k = 0; k < 3; ++k) fill<T>(arrays[k], channels, 0);
      spread(s, part.sample, static_cast<const A*>(p.mean), 1, arrays[0]);
      spread(s, part.sample, static_cast<const A*>(p.rstd), 1, arrays[1]);
      for (int64_t c = 0; weights != nullptr && c < channels; ++c) arrays[1][c] *= weights[c];
      if (p.bias != nullptr) std::copy_n(static_cast<const A*>(p.bias), channels, arrays[2]);
      for (int k = 0; k < 3; ++k) {
        for (int64_t c = 0; c < channels; ++c) arrays[k][c] = plane_constant<T>(arrays[k][c]);
        arrange<T>(arrays[k], channels);
      }
    }
    sample = part.sample;
    for (int64_t pixel = 0; pixel < part.size; ++pixel) {
      run(p.activation, {arrays[0], arrays[1], arrays[2], 1},
          neighbours<T>(p, part.begin + pixel * channels, channels, streamed));
    }
  }
}

}  // namespace

void channel_activation(const ChannelNormForwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    if (p.shape.pixels) {
      run_pixels<decltype(t)>(p, begin, end);
    } else {
      run_planes<decltype(t)>(p, begin, end);
    }
  });
  if (p.stream_stores) stream_fence();
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
