// The CUDA entry points: what ops/ calls. Each queues its kernels on `stream` of the current device
// and returns the launch's error code; none allocates, none synchronises.
#pragma once

#include <cuda_runtime.h>

#include "../activation.h"
#include "../activation_dropout.h"
#include "../add_norm.h"
#include "../dropout.h"
#include "../dropout_add_norm.h"
#include "../gated.h"
#include "../layer_norm.h"
#include "../layer_norm_gelu.h"
#include "../rms_norm.h"

namespace memopt::kernels::cuda {

cudaError_t activation_forward(const ActivationForwardParams& p, cudaStream_t stream);
cudaError_t activation_backward(const ActivationBackwardParams& p, cudaStream_t stream);

cudaError_t gated_forward(const GatedForwardParams& p, cudaStream_t stream);
cudaError_t gated_backward(const GatedBackwardParams& p, cudaStream_t stream);

cudaError_t layer_norm_forward(const LayerNormForwardParams& p, cudaStream_t stream);
cudaError_t layer_norm_backward(const LayerNormBackwardParams& p, cudaStream_t stream);

cudaError_t layer_norm_gelu_forward(const LayerNormGeluForwardParams& p, cudaStream_t stream);
cudaError_t layer_norm_gelu_backward(const LayerNormGeluBackwardParams& p, cudaStream_t stream);

cudaError_t rms_norm_forward(const NormForwardParams& p, cudaStream_t stream);
cudaError_t rms_norm_backward(const NormBackwardParams& p, cudaStream_t stream);

cudaError_t add_layer_norm_forward(const NormForwardParams& p, cudaStream_t stream);
cudaError_t add_layer_norm_backward(const NormBackwardParams& p, cudaStream_t stream);
cudaError_t add_rms_norm_forward(const NormForwardParams& p, cudaStream_t stream);
cudaError_t add_rms_norm_backward(const NormBackwardParams& p, cudaStream_t stream);

// How many parts the backward of any norm of this shape uses on the current device: the size of
// NormBackwardParams::partials. Depends on the device, rows and cols alone; at least 1.
cudaError_t norm_backward_parts(int64_t rows, int64_t cols, ScalarType dtype, int64_t* parts);
cudaError_t dropout(const DropoutParams& p, cudaStream_t stream);
cudaError_t activation_dropout_forward(const ActivationDropoutForwardParams& p,
                                       cudaStream_t stream);
cudaError_t activation_dropout_backward(const ActivationDropoutBackwardParams& p,
                                        cudaStream_t stream);
cudaError_t dropout_add_layer_norm_forward(const NormForwardParams& p, cudaStream_t stream);
cudaError_t dropout_add_layer_norm_backward(const NormBackwardParams& p, cudaStream_t stream);
cudaError_t dropout_add_rms_norm_forward(const NormForwardParams& p, cudaStream_t stream);
cudaError_t dropout_add_rms_norm_backward(const NormBackwardParams& p, cudaStream_t stream);

}  // namespace memopt::kernels::cuda
