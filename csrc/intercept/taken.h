// Which calls of PyTorch's functions memopt's ops take.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>

namespace memopt::intercept {

// Whether this thread's calls are to be memopt's: in a converted model, or since begin_functions(),
// where nothing need make recipes.
bool are_ours();
bool are_wanted_anywhere();

// Strided memory that is the tensor's own values, of no transform.
bool is_dense(const at::Tensor& tensor);

// Whether there are kernels for such a tensor, and nothing but its values is asked for.
bool supports(const at::Tensor& input);

// Parameters of this shape, those that there are: of one dtype that the kernels take beside the
// input.
bool supports_parameters(const at::Tensor& input, c10::SymIntArrayRef shape,
                         std::initializer_list<const std::optional<at::Tensor>*> parameters);

// Whether autocast has PyTorch's norms return float32 for any input: layer_norm, rms_norm and
// group_norm on a GPU.
bool widens_norms(const at::Tensor& input);

}  // namespace memopt::intercept
