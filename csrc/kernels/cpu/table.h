// The kernels of the instruction set being compiled, before they are gathered into a table.
#pragma once

#include "kernels.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

extern const Kernels kernels;

void gelu_forward(const GeluForwardParams& p, int64_t begin, int64_t end);
void gelu_backward(const GeluBackwardParams& p, int64_t begin, int64_t end);
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

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
