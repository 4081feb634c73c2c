// The CUDA entry points: what ops/ calls. Each queues its kernels on `stream` of the current device
// and returns the launch's error code; none allocates, none synchronises.
#pragma once

#include <cuda_runtime.h>

#include "../activation.h"
#include "../channel_norm.h"
#include "../cross_entropy.h"
#include "../dropout.h"
#include "../gated.h"
#include "../norm.h"
#include "../split_sum.h"

namespace memopt::kernels::cuda {

cudaError_t activation_forward(const ActivationForwardParams& p, cudaStream_t stream);
cudaError_t activation_backward(const ActivationBackwardParams& p, cudaStream_t stream);

cudaError_t gated_forward(const GatedForwardParams& p, cudaStream_t stream);
cudaError_t gated_backward(const GatedBackwardParams& p, cudaStream_t stream);

cudaError_t dropout(const DropoutParams& p, cudaStream_t stream);

// cudaErrorInvalidValue where is_norm() (norm.h) is false.
cudaError_t norm_forward(const NormForwardParams& p, cudaStream_t stream);
cudaError_t norm_backward(const NormBackwardParams& p, cudaStream_t stream);

// How many parts the backward of any norm of this shape uses on the current device: the size of
// NormBackwardParams::partials. Depends on the device, rows and cols alone; at least 1.
cudaError_t norm_backward_parts(int64_t rows, int64_t cols, ScalarType dtype, int64_t* parts);

cudaError_t channel_norm_forward(const ChannelNormForwardParams& p, cudaStream_t stream);
cudaError_t channel_norm_backward(const ChannelNormBackwardParams& p, cudaStream_t stream);

cudaError_t cross_entropy(const CrossEntropyParams& p, cudaStream_t stream);

cudaError_t split_sum(const SplitSumParams& p, cudaStream_t stream);

}  // namespace memopt::kernels::cuda
