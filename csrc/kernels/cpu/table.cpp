// One instruction set's table of kernels: constants alone, so that loading the library runs none of
// its instructions.
#include "table.h"

#define MEMOPT_STRING_(x) #x
#define MEMOPT_STRING(x) MEMOPT_STRING_(x)

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {

constexpr Kernels kernels{
    MEMOPT_STRING(MEMOPT_CPU_NAMESPACE),
    activation_forward,
    activation_backward,
    gated_forward,
    gated_backward,
    layer_norm_forward,
    layer_norm_gelu_forward,
    layer_norm_backward,
    layer_norm_gelu_backward,
    layer_norm_reduce_parts,
    rms_norm_forward,
    add_layer_norm_forward,
    add_rms_norm_forward,
    rms_norm_backward,
    add_layer_norm_backward,
    add_rms_norm_backward,
    rms_norm_reduce_parts,
    dropout,
    activation_dropout_forward,
    activation_dropout_backward,
    dropout_add_layer_norm_forward,
    dropout_add_layer_norm_backward,
    dropout_add_rms_norm_forward,
    dropout_add_rms_norm_backward,
};

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
