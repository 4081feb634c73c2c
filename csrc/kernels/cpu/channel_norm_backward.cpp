// Backward of the norms over channels: sums of parts, means of sets, gradients of weight and bias,
// and of x. Formulas and parts: kernels/channel_norm.h.
#include "channel_norm.h"
#include "kernels.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

template <class T>
const T* elements(const void* tensor, int64_t begin) {
  return static_cast<const T*>(tensor) + begin;
}

// Of dy and of dy xhat.
template <class T>
void sums_of_planes(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  using V = typename Elements<T>::V;
  using M = Math<V>;
  for (int64_t i = begin; i < end; ++i) {
    const ChannelPart part = plane_part(p.shape, i);
    const int64_t set = set_of(p.shape, part.sample, part.channel);
    const V mean(static_cast<const A*>(p.mean)[set]), rstd(static_cast<const A*>(p.rstd)[set]);
    const T* const x = elements<T>(p.x, part.begin);
    const T* const dy = elements<T>(p.dy, part.begin);
    Cascade<A> sum, product;
    for_blocks<T>(part.size, [&](int64_t from, int64_t to) {
      Step<V> s{V(0), V(0)}, q{V(0), V(0)};
      for_steps<T>(from, to, [&](int64_t j, auto extent) __attribute__((always_inline)) {
        const Step<V> v = load(x + j, extent), g = load(dy + j, extent);
        const Step<V> xhat = keep_valid(
            Step<V>{Centred::normalize(v.lo, mean, rstd), Centred::normalize(v.hi, mean, rstd)},
            extent);
        s = {s.lo + g.lo, s.hi + g.hi};
        q = {M::fma(g.lo, xhat.lo, q.lo), M::fma(g.hi, xhat.hi, q.hi)};
      });
      sum.add(sum_lanes(s.lo + s.hi));
      product.add(sum_lanes(q.lo + q.hi));
    });
    static_cast<A*>(p.parts)[2 * i] = sum.total();
    static_cast<A*>(p.parts)[2 * i + 1] = product.total();
  }
}

// Numbers of each set for each channel of the sample that is under way.
template <class A>
class OfSample {
 public:
  OfSample(const ChannelShape& shape, int64_t count)
      : shape_(shape), arrays_(count, shape.channels) {}

  // fill(sample) where the numbers are those of another sample.
  template <class Fill>
  void start(int64_t sample, Fill fill) {
    if (sample != sample_ && (sample_ < 0 || !shape_.over_batch)) fill(arrays_);
    sample_ = sample;
  }
  A* operator[](int64_t i) const { return arrays_[i]; }

 private:
  const ChannelShape& shape_;
  ChannelArrays<A> arrays_;
  int64_t sample_ = -1;
};

template <class T>
void sums_of_pixels(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  using V = typename Elements<T>::V;
  using M = Math<V>;
  const ChannelShape& s = p.shape;
  const int64_t channels = s.channels;
  OfSample<A> statistics(s, 2);
  for (int64_t i = begin; i < end; ++i) {
    const ChannelPart part = pixels_part(s, i);
    statistics.start(part.sample, [&](const ChannelArrays<A>& to) {
      spread(s, part.sample, static_cast<const A*>(p.mean), 1, to[0]);
      spread(s, part.sample, static_cast<const A*>(p.rstd), 1, to[1]);
    });
    const A *const means = statistics[0], *const rstds = statistics[1];
    A* const sums = static_cast<A*>(p.parts) + i * 2 * channels;
    A* const products = sums + channels;
    for_row_groups(part.size, [&](int64_t row, auto rows) {
      const T* const x = elements<T>(p.x, part.begin + row * channels);
      const T* const dy = elements<T>(p.dy, part.begin + row * channels);
      for_steps<T>(0, channels, [&](int64_t j, auto extent) __attribute__((always_inline)) {
        const Step<V> mean = load(means + j, extent), rstd = load(rstds + j, extent);
        Step<V> sum{V(0), V(0)}, product{V(0), V(0)};
        if (row > 0) {
          sum = load(sums + j, extent);
          product = load(products + j, extent);
        }
#pragma GCC unroll 4
        for (int r = 0; r < decltype(rows)::kCount; ++r) {
          const Step<V> v = load(x + r * channels + j, extent);
          const Step<V> g = load(dy + r * channels + j, extent);
          sum = {sum.lo + g.lo, sum.hi + g.hi};
          product = {M::fma(g.lo, Centred::normalize(v.lo, mean.lo, rstd.lo), product.lo),
                     M::fma(g.hi, Centred::normalize(v.hi, mean.hi, rstd.hi), product.hi)};
        }
        store(sums + j, sum, extent);
        store(products + j, product, extent);
      });
    });
  }
}

// The sums of dy and of dy xhat of the channels [begin, end), over the parts [first, last) of
// pixels.
template <class A>
void sums_of_channels(const A* parts, int64_t channels, int64_t first, int64_t last, int64_t begin,
                      int64_t end, A* sums, A* products) {
  sum_parts<2>(
      parts, channels, first, last, begin, end,
      [](const auto& of_part, int64_t, auto, int64_t)
          __attribute__((always_inline)) { return of_part; },
      [&](int64_t i, auto extent, auto sum, auto product) __attribute__((always_inline)) {
        if (sums != nullptr) store(sums + i - begin, sum, extent);
        if (products != nullptr) store(products + i - begin, product, extent);
      });
}

// each(f) calls f(channel, sum of dy, sum of dy xhat) for parts of the set.
template <class A, class Each>
void write_means(const ChannelNormBackwardParams& p, int64_t set, Each each) {
  const auto* const weights = static_cast<const A*>(p.weight);
  Cascade<A> g, gx;
  each([&](int64_t channel, A sum, A product) {
    const A w = weights == nullptr ? A(1) : weights[channel];
    g.add(sum * w);
    gx.add(product * w);
  });
  const auto n = static_cast<A>(set_elements(p.shape));
  A* const means = static_cast<A*>(p.means) + 2 * set;
  means[0] = g.total() / n;
  means[1] = gx.total() / n;
}

template <class A>
void means_of_planes(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  const ChannelShape& s = p.shape;
  const int64_t planes = planes_of_set(s), parts = parts_of_plane(s);
  for (int64_t set = begin; set < end; ++set) {
    const A* const of_set = static_cast<const A*>(p.parts) + 2 * set * planes * parts;
    write_means<A>(p, set, [&](auto f) {
      for (int64_t i = 0; i < planes * parts; ++i) {
        const int64_t channel = plane_of_set(s, set, i / parts) % s.channels;
        f(channel, of_set[2 * i], of_set[2 * i + 1]);
      }
    });
  }
}

template <class A>
void means_of_pixels(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  const ChannelShape& s = p.shape;
  const int64_t each = group_channels(s), of_sample = parts_of_sample(s);
  for (int64_t set = begin; set < end;) {
    const int64_t sample = s.over_batch ? 0 : set / s.groups;
    const int64_t first_group = set - sample * s.groups;
    const int64_t groups = std::min(end - set, s.groups - first_group);
    const ChannelArrays<A> arrays(2, groups * each);
    sums_of_channels<A>(static_cast<const A*>(p.parts), s.channels,
                        s.over_batch ? 0 : sample * of_sample,
                        s.over_batch ? s.batch * of_sample : (sample + 1) * of_sample,
                        first_group * each, (first_group + groups) * each, arrays[0], arrays[1]);
    for (int64_t i = 0; i < groups; ++i, ++set) {
      write_means<A>(p, set, [&](auto f) {
        for (int64_t c = i * each; c < (i + 1) * each; ++c) {
          f(first_group * each + c, arrays[0][c], arrays[1][c]);
        }
      });
    }
  }
}

template <class A>
void parameters_of_planes(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  const ChannelShape& s = p.shape;
  const int64_t parts = parts_of_plane(s);
  for (int64_t channel = begin; channel < end; ++channel) {
    Cascade<A> sum, product;
    for (int64_t sample = 0; sample < s.batch; ++sample) {
      const int64_t plane =
          s.over_batch ? channel * s.batch + sample : sample * s.channels + channel;
      const A* const of_plane = static_cast<const A*>(p.parts) + 2 * plane * parts;
      for (int64_t i = 0; i < parts; ++i) {
        sum.add(of_plane[2 * i]);
        product.add(of_plane[2 * i + 1]);
      }
    }
    if (p.dbias != nullptr) static_cast<A*>(p.dbias)[channel] = sum.total();
    if (p.dweight != nullptr) static_cast<A*>(p.dweight)[channel] = product.total();
  }
}

// With statistics that are given there are no means: dx = dy weight rstd.
template <class V>
MEMOPT_INLINE V given_input_grad(V g, V rstd) {
  return g * rstd;
}

template <class T>
void input_gradient_of_planes(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  using V = typename Elements<T>::V;
  for (int64_t i = begin; i < end; ++i) {
    const ChannelPart part = plane_part(p.shape, i);
    const int64_t set = set_of(p.shape, part.sample, part.channel);
    const V w(p.weight == nullptr ? A(1) : static_cast<const A*>(p.weight)[part.channel]);
    const V rstd(static_cast<const A*>(p.rstd)[set]);
    const T* const dy = elements<T>(p.dy, part.begin);
    T* const dx = static_cast<T*>(p.dx) + part.begin;
    const bool streamed = p.stream_stores && is_aligned(dx);
    if (p.means == nullptr) {
      for_steps<T>(0, part.size, [=](int64_t j, auto extent) __attribute__((always_inline)) {
        const Step<V> g = load(dy + j, extent);
        store(dx + j, Step<V>{given_input_grad(g.lo * w, rstd), given_input_grad(g.hi * w, rstd)},
              extent, streamed);
      });
      continue;
    }
    const A* const means = static_cast<const A*>(p.means) + 2 * set;
    const V mean(static_cast<const A*>(p.mean)[set]), mean_g(means[0]), mean_gx(means[1]);
    const T* const x = elements<T>(p.x, part.begin);
    for_steps<T>(0, part.size, [=](int64_t j, auto extent) __attribute__((always_inline)) {
      const Step<V> v = load(x + j, extent), g = load(dy + j, extent);
      const auto of = [&](V one, V grad) __attribute__((always_inline)) {
        return Centred::input_grad(grad * w, Centred::normalize(one, mean, rstd), mean_g, mean_gx,
                                   rstd);
      };
      store(dx + j, Step<V>{of(v.lo, g.lo), of(v.hi, g.hi)}, extent, streamed);
    });
  }
  if (p.stream_stores) stream_fence();
}

template <class T>
void input_gradient_of_pixels(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  using V = typename Elements<T>::V;
  const ChannelShape& s = p.shape;
  const int64_t channels = s.channels;
  const auto* const weights = static_cast<const A*>(p.weight);
  const bool streamed =
      p.stream_stores && is_aligned(p.dx) && channels * static_cast<int64_t>(sizeof(T)) % 64 == 0;
  const bool given = p.means == nullptr;
  OfSample<A> of_sets(s, 4);
  for (int64_t i = begin; i < end; ++i) {
    const ChannelPart part = pixels_part(s, i);
    of_sets.start(part.sample, [&](const ChannelArrays<A>& to) {
      spread(s, part.sample, static_cast<const A*>(p.rstd), 1, to[0]);
      if (given) return;
      spread(s, part.sample, static_cast<const A*>(p.mean), 1, to[1]);
      spread(s, part.sample, static_cast<const A*>(p.means), 2, to[2]);
      spread(s, part.sample, static_cast<const A*>(p.means) + 1, 2, to[3]);
    });
    const A *const rstds = of_sets[0], *const means = of_sets[1];
    const A *const gs = of_sets[2], *const gxs = of_sets[3];
    for_row_groups(part.size, [&](int64_t row, auto rows) {
      const T* const x = elements<T>(p.x, part.begin + row * channels);
      const T* const dy = elements<T>(p.dy, part.begin + row * channels);
      T* const dx = static_cast<T*>(p.dx) + part.begin + row * channels;
      for_steps<T>(0, channels, [=](int64_t j, auto extent) __attribute__((always_inline)) {
        const Step<V> rstd = load(rstds + j, extent);
        const Step<V> w = load_parameter<V>(weights, j, extent, 1.0f);
        Step<V> mean{V(0), V(0)}, mean_g = mean, mean_gx = mean;
        if (!given) {
          mean = load(means + j, extent);
          mean_g = load(gs + j, extent);
          mean_gx = load(gxs + j, extent);
        }
#pragma GCC unroll 4
        for (int r = 0; r < decltype(rows)::kCount; ++r) {
          const int64_t at = r * channels + j;
          Step<V> g = load(dy + at, extent);
          g = {g.lo * w.lo, g.hi * w.hi};
          if (given) {
            g = {given_input_grad(g.lo, rstd.lo), given_input_grad(g.hi, rstd.hi)};
          } else {
            const Step<V> v = load(x + at, extent);
            g = {Centred::input_grad(g.lo, Centred::normalize(v.lo, mean.lo, rstd.lo), mean_g.lo,
                                     mean_gx.lo, rstd.lo),
                 Centred::input_grad(g.hi, Centred::normalize(v.hi, mean.hi, rstd.hi), mean_g.hi,
                                     mean_gx.hi, rstd.hi)};
          }
          store(dx + at, g, extent, streamed);
        }
      });
    });
  }
  if (streamed) stream_fence();
}

}  // namespace

void channel_sums(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    if (p.shape.pixels) {
      sums_of_pixels<decltype(t)>(p, begin, end);
    } else {
      sums_of_planes<decltype(t)>(p, begin, end);
    }
  });
}

void channel_means(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    using A = Accumulate<decltype(t)>;
    if (p.shape.pixels) {
      means_of_pixels<A>(p, begin, end);
    } else {
      means_of_planes<A>(p, begin, end);
    }
  });
}

void channel_parameters(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    using A = Accumulate<decltype(t)>;
    if (!p.shape.pixels) return parameters_of_planes<A>(p, begin, end);
    auto* const dbias = static_cast<A*>(p.dbias);
    auto* const dweight = static_cast<A*>(p.dweight);
    sums_of_channels<A>(static_cast<const A*>(p.parts), p.shape.channels, 0, element_parts(p.shape),
                        begin, end, dbias == nullptr ? nullptr : dbias + begin,
                        dweight == nullptr ? nullptr : dweight + begin);
  });
}

void channel_input_gradient(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    if (p.shape.pixels) {
      input_gradient_of_pixels<decltype(t)>(p, begin, end);
    } else {
      input_gradient_of_planes<decltype(t)>(p, begin, end);
    }
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
