// The launchers of csrc/kernels/cuda/launchers.h with flat arguments, for ctypes (kernels.py).
#include "cuda/launchers.h"

namespace k = memopt::kernels;

namespace {

// activation: -1 for plain LayerNorm, else a GeluKind.
constexpr int kNoActivation = -1;

}  // namespace

extern "C" {

int simt_gelu_forward(const void* x, void* y, int64_t size, int dtype, int kind,
                      cudaStream_t stream) {
  return k::cuda::gelu_forward({.x = x,
                                .y = y,
                                .size = size,
                                .dtype = static_cast<k::ScalarType>(dtype),
                                .kind = static_cast<k::GeluKind>(kind),
                                .stream_stores = false},
                               stream);
}

int simt_gelu_backward(const void* dy, const void* x, void* dx, void* y, int64_t size, int dtype,
                       int kind, cudaStream_t stream) {
  return k::cuda::gelu_backward({.dy = dy,
                                 .x = x,
                                 .dx = dx,
                                 .y = y,
                                 .size = size,
                                 .dtype = static_cast<k::ScalarType>(dtype),
                                 .kind = static_cast<k::GeluKind>(kind),
                                 .stream_stores = false},
                                stream);
}

int simt_layer_norm_forward(const void* x, const void* gamma, const void* beta, void* y, void* mean,
                            void* rstd, int64_t rows, int64_t cols, int64_t x_row_stride,
                            double eps, int dtype, int param_dtype, int activation,
                            cudaStream_t stream) {
  const k::LayerNormForwardParams p = {.x = x,
                                       .gamma = gamma,
                                       .beta = beta,
                                       .y = y,
                                       .mean = mean,
                                       .rstd = rstd,
                                       .rows = rows,
                                       .cols = cols,
                                       .x_row_stride = x_row_stride,
                                       .eps = eps,
                                       .dtype = static_cast<k::ScalarType>(dtype),
                                       .param_dtype = static_cast<k::ScalarType>(param_dtype),
                                       .stream_stores = false};
  if (activation == kNoActivation) return k::cuda::layer_norm_forward(p, stream);
  return k::cuda::layer_norm_gelu_forward({p, static_cast<k::GeluKind>(activation)}, stream);
}

int simt_layer_norm_backward(const void* dy, const void* x, const void* gamma, const void* beta,
                             const void* mean, const void* rstd, void* dx, void* y, void* dgamma,
                             void* dbeta, void* partials, int64_t parts, int64_t rows, int64_t cols,
                             int64_t dy_row_stride, int64_t x_row_stride, int dtype,
                             int param_dtype, int activation, cudaStream_t stream) {
  const k::LayerNormBackwardParams p = {.dy = dy,
                                        .x = x,
                                        .gamma = gamma,
                                        .beta = beta,
                                        .mean = mean,
                                        .rstd = rstd,
                                        .dx = dx,
                                        .y = y,
                                        .dgamma = dgamma,
                                        .dbeta = dbeta,
                                        .partials = partials,
                                        .parts = parts,
                                        .rows = rows,
                                        .cols = cols,
                                        .dy_row_stride = dy_row_stride,
                                        .x_row_stride = x_row_stride,
                                        .dtype = static_cast<k::ScalarType>(dtype),
                                        .param_dtype = static_cast<k::ScalarType>(param_dtype),
                                        .stream_stores = false};
  if (activation == kNoActivation) return k::cuda::layer_norm_backward(p, stream);
  return k::cuda::layer_norm_gelu_backward({p, static_cast<k::GeluKind>(activation)}, stream);
}

int simt_layer_norm_backward_parts(int64_t rows, int64_t cols, int dtype, int64_t* parts) {
  return k::cuda::norm_backward_parts(rows, cols, static_cast<k::ScalarType>(dtype), parts);
}

// family: 0 rms_norm, 1 add_layer_norm, 2 add_rms_norm. What a family has not is null.
int simt_norm_forward(const void* x, const void* residual, const void* gamma, const void* beta,
                      void* y, void* sum, void* mean, void* rstd, int64_t rows, int64_t cols,
                      int64_t row_stride, double eps, int dtype, int param_dtype, int zero_centered,
                      int family, cudaStream_t stream) {
  const k::NormForwardParams p = {.x = x,
                                  .gamma = gamma,
                                  .beta = beta,
                                  .y = y,
                                  .mean = mean,
                                  .rstd = rstd,
                                  .rows = rows,
                                  .cols = cols,
                                  .x_row_stride = row_stride,
                                  .eps = eps,
                                  .dtype = static_cast<k::ScalarType>(dtype),
                                  .param_dtype = static_cast<k::ScalarType>(param_dtype),
                                  .stream_stores = false,
                                  .zero_centered = zero_centered != 0,
                                  .residual = residual,
                                  .residual_row_stride = row_stride,
                                  .sum = sum};
  if (family == 0) return k::cuda::rms_norm_forward(p, stream);
  return family == 1 ? k::cuda::add_layer_norm_forward(p, stream)
                     : k::cuda::add_rms_norm_forward(p, stream);
}

// Without dsum the add_ families' backward is the norm's own, as in ops/add_norm.cpp.
int simt_norm_backward(const void* dy, const void* dsum, const void* x, const void* gamma,
                       const void* beta, const void* mean, const void* rstd, void* dx, void* y,
                       void* dgamma, void* dbeta, void* partials, int64_t parts, int64_t rows,
                       int64_t cols, int64_t dy_row_stride, int64_t row_stride, int dtype,
                       int param_dtype, int zero_centered, int family, cudaStream_t stream) {
  const k::NormBackwardParams p = {.dy = dy,
                                   .x = x,
                                   .gamma = gamma,
                                   .beta = beta,
                                   .mean = mean,
                                   .rstd = rstd,
                                   .dx = dx,
                                   .y = y,
                                   .dgamma = dgamma,
                                   .dbeta = dbeta,
                                   .partials = partials,
                                   .parts = parts,
                                   .rows = rows,
                                   .cols = cols,
                                   .dy_row_stride = dy_row_stride,
                                   .x_row_stride = row_stride,
                                   .dtype = static_cast<k::ScalarType>(dtype),
                                   .param_dtype = static_cast<k::ScalarType>(param_dtype),
                                   .stream_stores = false,
                                   .zero_centered = zero_centered != 0,
                                   .dsum = dsum,
                                   .dsum_row_stride = row_stride};
  if (family == 1) {
    return dsum == nullptr ? k::cuda::layer_norm_backward(p, stream)
                           : k::cuda::add_layer_norm_backward(p, stream);
  }
  return dsum == nullptr ? k::cuda::rms_norm_backward(p, stream)
                         : k::cuda::add_rms_norm_backward(p, stream);
}

}  // extern "C"
