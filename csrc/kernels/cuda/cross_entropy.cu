// Cross entropy over rows of logits, and its gradient. Formulas: kernels/cross_entropy.h.
//
// Memory: a row is one block's, which goes over it for its maximum, for its sums and for its
// gradient: the logits are read once from memory and twice from the caches (a row of 128,256 words
// is 257 KB in 2-byte types), and the gradient is written over them or beside them. What a launch
// is asked for is known to all its threads, so it is asked at run time: a logit takes an
// exponential or two, beside which a branch that all take is nothing.
#include "../cross_entropy.h"

#include "launch.cuh"
#include "launchers.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace memopt::kernels::cuda {
namespace {

constexpr int kThreads = 512;

template <class T>
constexpr int kElements = 2 * kVectorWidth<T>;  // of a tile, a thread

template <class T>
constexpr int64_t kTile = int64_t{kThreads} * kElements<T>;

__device__ __forceinline__ float logarithm(float x) {
  return ::logf(x);
}
__device__ __forceinline__ double logarithm(double x) {
  return ::log(x);
}

template <class A>
__device__ __forceinline__ ValueGrad<A> logit(const CrossEntropyParams& p, A l) {
  const A scale = static_cast<A>(p.logit_scale);
  if (p.softcap == 0) return ScaledLogit<A>{scale}.value_and_grad(l);
  return CappedLogit<A>{scale, {p.softcap}}.value_and_grad(l);
}

template <class A>
__device__ __forceinline__ A number(const void* array, int64_t i, A otherwise) {
  return array == nullptr ? otherwise : static_cast<const A*>(array)[i];
}
template <class A>
__device__ __forceinline__ void put(void* array, int64_t i, A value) {
  if (array != nullptr) static_cast<A*>(array)[i] = value;
}

// q of a column, where it is dense; without the part of the row's class.
template <class A>
__device__ __forceinline__ A dense_target(const CrossEntropyParams& p, int64_t row, int64_t col) {
  const A smoothing = static_cast<A>(p.label_smoothing);
  A q = smoothing / static_cast<A>(p.cols);
  if (p.target == nullptr) {
    const A* of_row = static_cast<const A*>(p.probabilities) + row * p.probabilities_row_stride;
    q = Math<A>::fma(A(1) - smoothing, of_row[col], q);
  }
  return number<A>(p.class_weight, col, A(1)) * q;
}

// f(column, logit) for each element of the row that the thread owns; where `dx` is given, f's
// result is the gradient there.
template <class T, Access kAccess, class F>
__device__ __forceinline__ void for_row(const T* x, T* dx, int64_t cols, F&& f) {
  using A = Accumulate<T>;
  constexpr int kWidth = kGroup<T, kAccess>;
  for (int64_t tile = 0; tile < cols; tile += kTile<T>) {
    const Share<kElements<T>, kWidth, kAccess> share(threadIdx.x, kThreads, cols - tile);
#pragma unroll
    for (int k = 0; k < kElements<T> / kWidth; ++k) {
      A values[kWidth];
      load<Load::kPlain>(x + tile, share, k, values);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (share.owns(k, j)) values[j] = f(tile + share.position(k, j), values[j]);
      }
      if (dx != nullptr) store(values, dx + tile, share, k);
    }
  }
}

template <class T, Access kAccess>
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(CrossEntropyParams p) {
  using A = Accumulate<T>;
  const bool dense = is_dense(p), has_class = p.target != nullptr;
  const A z_loss = static_cast<A>(p.z_loss), smoothing = static_cast<A>(p.label_smoothing);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_row_stride;
    T* dx = p.dx == nullptr ? nullptr : static_cast<T*>(p.dx) + row * p.dx_row_stride;
    const int64_t hot = has_class ? p.target[row] : -1;
    const bool first = threadIdx.x == 0;
    const bool ignored = has_class && hot == p.ignore_index;
    if (ignored || (has_class && (hot < 0 || hot >= p.cols))) {
      const A value = ignored ? A(0) : static_cast<A>(NAN);
      if (first && !p.again) {
        put(p.loss, row, value);
        put(p.log_sum, row, value);
        put(p.entropy, row, value);
      }
      if (dx != nullptr) for_row<T, kAccess>(x, dx, p.cols, [&](int64_t, A) { return value; });
      continue;
    }
    const A hot_q = has_class ? (A(1) - smoothing) * number<A>(p.class_weight, hot, A(1)) : A(0);

    // Read before the first barrier, behind which the gradient may be written over it.
    A hot_z = 0;
    if (has_class && first) {
      A value[2];
      Vector<T, 2> raw = {};
      memcpy(raw.words, x + hot, sizeof(T));
      widen(raw, value);
      hot_z = logit(p, value[0]).value;
    }
    A maximum = static_cast<A>(-INFINITY);
    for_row<T, kAccess>(x, static_cast<T*>(nullptr), p.cols, [&](int64_t, A l) {
      maximum = larger(maximum, logit(p, l).value);
      return l;
    });
    maximum = row_maximum(maximum, 0);

    A log_sum = 0, entropy = 0, q_sum = is_logsumexp(p) ? A(1) : hot_q, q_distance = 0;
    if (p.again && !dense) {
      log_sum = static_cast<const A*>(p.log_sum)[row];
      entropy = number<A>(p.entropy, row, A(0));
      __syncthreads();  // before the next row writes the slots of the maximum
    } else {
      TileSum<Pair<A>> softmax;
      TileSum<A> distances;
      for_row<T, kAccess>(x, static_cast<T*>(nullptr), p.cols, [&](int64_t col, A l) {
        const A t = logit(p, l).value - maximum;
        const A d = limited(t), e = exp_of_limited(d);
        if (dense) {
          const A q = dense_target<A>(p, row, col);
          softmax.add({e, q});
          distances.add(q * t);
        } else {
          softmax.add({e, p.entropy == nullptr ? A(0) : e * d});
        }
        return l;
      });
      const Pair<A> sums = row_sum(softmax.total(), 1);
      const A distance = row_sum(distances.total(), 0);
      log_sum = logarithm(sums.first);
      if (dense) {
        q_sum += sums.second;
        q_distance = distance;
      } else {
        entropy = log_sum - sums.second / sums.first;
      }
      __syncthreads();  // before the next row writes the slots of the last sum
    }
    const A lse = maximum + log_sum;
    if (first && !p.again) {
      const A t = hot_z - maximum;
      A loss = q_sum * log_sum - q_distance;
      if (has_class) {
        loss = dense ? loss - hot_q * t : hot_q * (log_sum - t);
      } else if (is_logsumexp(p)) {
        loss = lse;
      }
      if (z_loss != 0) loss += z_loss * lse * lse;
      put(p.loss, row, loss);
      put(p.log_sum, row, log_sum);
      put(p.entropy, row, entropy);
    }
    if (dx == nullptr) continue;
    const A dloss = number<A>(p.dloss, row * p.dloss_stride, A(1));
    const RowGrad<A> grad{dloss, q_sum, A(2) * z_loss * lse, number<A>(p.dentropy, row, A(0)),
                          entropy};
    for_row<T, kAccess>(x, dx, p.cols, [&](int64_t col, A l) {
      const ValueGrad<A> z = logit(p, l);
      A q = dense ? dense_target<A>(p, row, col) : A(0);
      if (col == hot) q += hot_q;
      return logit_gradient(grad, (z.value - maximum) - log_sum, q) * z.grad;
    });
  }
}

}  // namespace

cudaError_t cross_entropy(const CrossEntropyParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t error = current_device_limits(&limits);
  if (error != cudaSuccess) return error;
  return dispatch(p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const bool aligned =
        rows_are_aligned<T>(p.x, p.x_row_stride) && rows_are_aligned<T>(p.dx, p.dx_row_stride);
    return dispatch_access<T>(p.cols, aligned, [&](auto a) {
      return launch(cross_entropy_kernel<T, decltype(a)::value>, dim3(strided_grid(p.rows, limits)),
                    dim3(kThreads), kRowSumBytes<Accumulate<T>>, stream, p);
    });
  });
}

}  // namespace memopt::kernels::cuda
