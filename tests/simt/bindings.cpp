// The launchers of csrc/kernels/cuda/launchers.h with flat arguments, for ctypes (kernels.py).
#include <iterator>

#include "cuda/launchers.h"

namespace k = memopt::kernels;

namespace {

// activation: -1 for plain LayerNorm, else a GeluKind.
constexpr int kNoActivation = -1;

template <int kWidth>
struct Chunk {
  float values[kWidth];
};

k::DropoutRule rule_of(double p, const int64_t* saved_state, int64_t seed, int64_t offset) {
  return k::dropout_rule(p, saved_state, static_cast<uint64_t>(seed),
                         static_cast<uint64_t>(offset));
}

}  // namespace

extern "C" {

int simt_activation_forward(const void* x, void* y, int64_t size, int dtype, int activation,
                            cudaStream_t stream) {
  return k::cuda::activation_forward({.x = x,
                                      .y = y,
                                      .size = size,
                                      .dtype = static_cast<k::ScalarType>(dtype),
                                      .activation = static_cast<k::Activation>(activation),
                                      .stream_stores = false},
                                     stream);
}

int simt_activation_backward(const void* dy, const void* x, void* dx, void* y, int64_t size,
                             int dtype, int activation, cudaStream_t stream) {
  return k::cuda::activation_backward({.dy = dy,
                                       .x = x,
                                       .dx = dx,
                                       .y = y,
                                       .size = size,
                                       .dtype = static_cast<k::ScalarType>(dtype),
                                       .activation = static_cast<k::Activation>(activation),
                                       .stream_stores = false},
                                      stream);
}

int simt_gated_forward(const void* gate, const void* up, void* y, int64_t rows, int64_t cols,
                       int64_t gate_row_stride, int64_t up_row_stride, int interleaved, int dtype,
                       int activation, cudaStream_t stream) {
  return k::cuda::gated_forward({.gate = gate,
                                 .up = up,
                                 .y = y,
                                 .rows = rows,
                                 .cols = cols,
                                 .gate_row_stride = gate_row_stride,
                                 .up_row_stride = up_row_stride,
                                 .interleaved = interleaved != 0,
                                 .dtype = static_cast<k::ScalarType>(dtype),
                                 .activation = static_cast<k::Activation>(activation),
                                 .stream_stores = false},
                                stream);
}

int simt_gated_backward(const void* dy, const void* gate, const void* up, void* dgate, void* dup,
                        void* y, int64_t rows, int64_t cols, int64_t dy_row_stride,
                        int64_t gate_row_stride, int64_t up_row_stride, int64_t grad_row_stride,
                        int interleaved, int dtype, int activation, cudaStream_t stream) {
  return k::cuda::gated_backward({.dy = dy,
                                  .gate = gate,
                                  .up = up,
                                  .dgate = dgate,
                                  .dup = dup,
                                  .y = y,
                                  .rows = rows,
                                  .cols = cols,
                                  .dy_row_stride = dy_row_stride,
                                  .gate_row_stride = gate_row_stride,
                                  .up_row_stride = up_row_stride,
                                  .grad_row_stride = grad_row_stride,
                                  .interleaved = interleaved != 0,
                                  .dtype = static_cast<k::ScalarType>(dtype),
                                  .activation = static_cast<k::Activation>(activation),
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

// saved_state, state: see DropoutRule and DropoutParams; either may be null.
int simt_dropout(const void* x, void* y, const int64_t* saved_state, int64_t* state, int64_t seed,
                 int64_t offset, double p, int64_t size, int dtype, cudaStream_t stream) {
  const k::DropoutRule rule =
      k::dropout_rule(p, saved_state, static_cast<uint64_t>(seed), static_cast<uint64_t>(offset));
  return k::cuda::dropout({.x = x,
                           .y = y,
                           .rule = rule,
                           .state = state,
                           .size = size,
                           .dtype = static_cast<k::ScalarType>(dtype),
                           .stream_stores = false},
                          stream);
}

int simt_activation_dropout_forward(const void* x, void* y, const int64_t* saved_state,
                                    int64_t* state, int64_t seed, int64_t offset, double p,
                                    int64_t size, int dtype, int activation, cudaStream_t stream) {
  return k::cuda::activation_dropout_forward(
      {.activation = {.x = x,
                      .y = y,
                      .size = size,
                      .dtype = static_cast<k::ScalarType>(dtype),
                      .activation = static_cast<k::Activation>(activation),
                      .stream_stores = false},
       .rule = rule_of(p, saved_state, seed, offset),
       .state = state},
      stream);
}

int simt_activation_dropout_backward(const void* dy, const void* x, void* dx, void* y,
                                     const int64_t* saved_state, double p, int64_t size, int dtype,
                                     int activation, cudaStream_t stream) {
  return k::cuda::activation_dropout_backward(
      {.activation = {.dy = dy,
                      .x = x,
                      .dx = dx,
                      .y = y,
                      .size = size,
                      .dtype = static_cast<k::ScalarType>(dtype),
                      .activation = static_cast<k::Activation>(activation),
                      .stream_stores = false},
       .rule = rule_of(p, saved_state, 0, 0)},
      stream);
}

// family: 0 dropout_add_layer_norm, 1 dropout_add_rms_norm.
int simt_dropout_add_norm_forward(const void* x, const void* residual, const void* gamma,
                                  const void* beta, void* y, void* sum, void* mean, void* rstd,
                                  const int64_t* saved_state, int64_t* state, int64_t seed,
                                  int64_t offset, double p, int64_t rows, int64_t cols,
                                  int64_t row_stride, double eps, int dtype, int param_dtype,
                                  int zero_centered, int family, cudaStream_t stream) {
  const k::NormForwardParams params = {.x = x,
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
                                       .sum = sum,
                                       .rule = rule_of(p, saved_state, seed, offset),
                                       .state = state};
  return family == 0 ? k::cuda::dropout_add_layer_norm_forward(params, stream)
                     : k::cuda::dropout_add_rms_norm_forward(params, stream);
}

// dx: residual's gradient; dx_dropped: x's.
int simt_dropout_add_norm_backward(const void* dy, const void* dsum, const void* x,
                                   const void* gamma, const void* beta, const void* mean,
                                   const void* rstd, const int64_t* saved_state, double p, void* dx,
                                   void* dx_dropped, void* y, void* dgamma, void* dbeta,
                                   void* partials, int64_t parts, int64_t rows, int64_t cols,
                                   int64_t dy_row_stride, int64_t row_stride, int dtype,
                                   int param_dtype, int zero_centered, int family,
                                   cudaStream_t stream) {
  const k::NormBackwardParams params = {.dy = dy,
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
                                        .dsum_row_stride = row_stride,
                                        .rule = rule_of(p, saved_state, 0, 0),
                                        .dx_dropped = dx_dropped};
  return family == 0 ? k::cuda::dropout_add_layer_norm_backward(params, stream)
                     : k::cuda::dropout_add_rms_norm_backward(params, stream);
}

int simt_philox(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  const k::PhiloxWords words =
      k::philox4x32_10({counter[0], counter[1], counter[2], counter[3]}, {key[0], key[1]});
  out[0] = words.x0;
  out[1] = words.x1;
  out[2] = words.x2;
  out[3] = words.x3;
  return 0;
}

// keep_scale() and keep_scales() of elements 0 .. size-1, width at a time (1: keep_scale).
int simt_keep_scales(int64_t seed, int64_t offset, double p, int64_t first, int64_t size, int width,
                     float* out) {
  const auto keeper = k::make_keeper<float>(
      k::dropout_rule(p, nullptr, static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)));
  const auto fill = [&](auto chunk) {
    for (int64_t i = 0; i < size; i += std::size(chunk.values)) {
      k::keep_scales(keeper, static_cast<uint64_t>(first + i), chunk.values);
      for (float value : chunk.values) *out++ = value;
    }
  };
  switch (width) {
    case 1:
      for (int64_t i = 0; i < size; ++i)
        out[i] = k::keep_scale(keeper, static_cast<uint64_t>(first + i));
      return 0;
    case 2:
      return fill(Chunk<2>{}), 0;
    case 4:
      return fill(Chunk<4>{}), 0;
    case 8:
      return fill(Chunk<8>{}), 0;
    default:
      return fill(Chunk<16>{}), 0;
  }
}

}  // extern "C"
