// The kernels of the instruction set being compiled, before they are gathered into a table.
#pragma once

#include "kernels.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

extern const Kernels kernels;

void activation_forward(const ActivationForwardParams& p, int64_t begin, int64_t end);
void activation_backward(const ActivationBackwardParams& p, int64_t begin, int64_t end);
void gated_forward(const GatedForwardParams& p, int64_t begin, int64_t end);
void gated_backward(const GatedBackwardParams& p, int64_t begin, int64_t end);
void layer_norm_forward(const LayerNormForwardParams& p, int64_t begin, int64_t end);
void layer_norm_backward(const LayerNormBackwardParams& p, int64_t begin, int64_t end);
void layer_norm_reduce_parts(const LayerNormBackwardParams& p, int64_t begin, int64_t end);
void layer_norm_gelu_forward(const LayerNormGeluForwardParams& p, int64_t begin, int64_t end);
void layer_norm_gelu_backward(const LayerNormGeluBackwardParams& p, int64_t begin, int64_t end);
void rms_norm_forward(const NormForwardParams& p, int64_t begin, int64_t end);
void rms_norm_backward(const NormBackwardParams& p, int64_t begin, int64_t end);
void rms_norm_reduce_parts(const NormBackwardParams& p, int64_t begin, int64_t end);
void add_layer_norm_forward(const NormForwardParams& p, int64_t begin, int64_t end);
void add_layer_norm_backward(const NormBackwardParams& p, int64_t begin, int64_t end);
void add_rms_norm_forward(const NormForwardParams& p, int64_t begin, int64_t end);
void add_rms_norm_backward(const NormBackwardParams& p, int64_t begin, int64_t end);
void dropout(const DropoutParams& p, int64_t begin, int64_t end);
void activation_dropout_forward(const ActivationDropoutForwardParams& p, int64_t begin,
                                int64_t end);
void activation_dropout_backward(const ActivationDropoutBackwardParams& p, int64_t begin,
                                 int64_t end);
void dropout_add_layer_norm_forward(const NormForwardParams& p, int64_t begin, int64_t end);
void dropout_add_layer_norm_backward(const NormBackwardParams& p, int64_t begin, int64_t end);
void dropout_add_rms_norm_forward(const NormForwardParams& p, int64_t begin, int64_t end);
void dropout_add_rms_norm_backward(const NormBackwardParams& p, int64_t begin, int64_t end);

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
