// Which backward kernel runs, on what grid, with how much shared memory.
#include "norm_backward_long.cuh"
#include "norm_backward_rows.cuh"

namespace memopt::kernels::cuda {
namespace {

template <class Norm>
cudaError_t launch_backward(const NormBackwardParams& p, cudaStream_t stream) {
  const bool dx_wanted = wants_input_grad<Norm>(p);
  const bool nothing_wanted = !dx_wanted && p.y == nullptr && p.partials == nullptr;
  if (nothing_wanted || (p.rows == 0 && p.partials == nullptr)) return cudaSuccess;
  DeviceLimits limits;
  cudaError_t error = current_device_limits(&limits);
  int64_t parts = p.parts;
  if (error == cudaSuccess && p.partials == nullptr) {
    error = norm_backward_parts(p.rows, p.cols, p.dtype, &parts);
  }
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(parts));
  error = dispatch(p.dtype, p.param_dtype, [&](auto t, auto g) {
    using T = typename decltype(t)::type;
    using G = typename decltype(g)::type;
    using A = Accumulate<T>;
    const bool aligned = rows_are_aligned<T>(p.x, p.x_row_stride) &&
                         rows_are_aligned<T>(p.dy, p.dy_row_stride) &&
                         rows_are_aligned<T>(p.dx, p.cols) && is_aligned(p.y) &&
                         is_aligned(p.gamma) && is_aligned(p.beta) && is_aligned(p.partials) &&
                         rows_are_aligned<T>(p.dsum, p.dsum_row_stride) && is_aligned(p.dx_dropped);
    const int64_t sum_bytes = ceil_div(Norm::kWeightGrads * p.cols * int64_t{sizeof(A)}, 16) * 16;
    return dispatch_access<T>(p.cols, aligned, [&](auto a) {
      constexpr Access kAccess = decltype(a)::value;
      if (row_fits_registers<kBackwardElements<T, kAccess>>(p.cols)) {
        const dim3 block = row_block<kBackwardElements<T, kAccess>>(p.cols, kBackwardBlockThreads);
        return launch(norm_backward_rows<Norm, T, G, kAccess>, grid, block,
                      kRowSumBytes<A> + (block.y > 1 ? block.y * sum_bytes : 0), stream, p);
      }
      int64_t left = limits.shared_bytes_per_block - kRowSumBytes<A>;
      LongBackwardPlan plan = {};
      plan.sums_shared = p.partials != nullptr && sum_bytes <= left;
      plan.sum_bytes = plan.sums_shared ? sum_bytes : 0;
      left -= plan.sum_bytes;
      const int64_t row_bytes = ceil_div(p.cols * int64_t{sizeof(T)}, 16) * 16;
      plan.staged = dx_wanted && 2 * row_bytes <= left;
      plan.row_bytes = plan.staged ? row_bytes : 0;
      return launch(norm_backward_long<Norm, T, G, kAccess>, grid, dim3(kLongBackwardThreads<T>),
                    kRowSumBytes<A> + plan.sum_bytes + 2 * plan.row_bytes, stream, p, plan);
    });
  });
  if (error != cudaSuccess || p.partials == nullptr) return error;
  return norm_reduce_parts(p, Norm::kWeightGrads, stream);
}

}  // namespace

// Where the gradient of what is dropped is not wanted, backward is that of the norm without
// dropout.
cudaError_t norm_backward(const NormBackwardParams& p, cudaStream_t stream) {
  return dispatch_norm(p, p.dsum != nullptr, p.dx_dropped != nullptr,
                       [&](auto norm) { return launch_backward<decltype(norm)>(p, stream); });
}

}  // namespace memopt::kernels::cuda
