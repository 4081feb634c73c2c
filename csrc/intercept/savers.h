// PyTorch's ops that save tensors for backward, without saved-tensor hooks where these would do
// nothing but ask a scope's registry of recipes: the op runs as if there were none, and the
// registry then looks at what its node has saved (saved/recipe_registry.h). A hook costs some 2 us
// of host time for each tensor, in forward alone, and few tensors have a recipe.
//
// The ops of the table in savers.cpp are known, and only on plain tensors, outside of autocast,
// modes, transforms and tracers: everything else meets the hooks, which stay on for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <string_view>

namespace memopt::intercept {

// PyTorch's own, for activations.cpp and elementwise.cpp.
at::Tensor mul_of_torch(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other);
at::Tensor div_of_torch(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other);
at::Tensor pow_of_torch(c10::DispatchKeySet keys, const at::Tensor& self,
                        const at::Scalar& exponent);
at::Tensor relu_of_torch(c10::DispatchKeySet keys, const at::Tensor& self);
at::Tensor sigmoid_of_torch(c10::DispatchKeySet keys, const at::Tensor& self);
at::Tensor silu_of_torch(c10::DispatchKeySet keys, const at::Tensor& self);
at::Tensor gelu_of_torch(c10::DispatchKeySet keys, const at::Tensor& self,
                         std::string_view approximate);

}  // namespace memopt::intercept
