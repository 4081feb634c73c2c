// PyTorch's functions, computed by memopt's ops inside a converted model: gelu, silu, relu,
// sigmoid, dropout, layer_norm and rms_norm, whichever way they are called (torch.nn.functional,
// torch, a tensor's method, another library's C++).
//
// Sums are PyTorch's own, but the registry of recipes is told of those of a float32 residual and a
// branch in 16 bits (saved/recipe_registry.h).
//
// They are found below Python, by a dispatch key that no tensor has and that is on only in a
// thread's scope. Nothing of PyTorch's is replaced: its names stay the objects they are, other
// threads and code outside the scope do not come here, and where a call is not taken PyTorch's own
// kernels run with the same arguments. Other ops fall through the key, which costs them nothing. A
// TorchFunctionMode would cost some 3 us for every call of any function and every attribute of a
// tensor.
#pragma once

#include <c10/core/DispatchKey.h>
#include <pybind11/pybind11.h>

namespace memopt::python {

// Above autograd and autocast, below the transforms of torch.func. It was made for torchdistx, a
// library that PyTorch 2.1 was the last to run with.
constexpr auto kInterceptKey = c10::DispatchKey::DeferredInit;

// While it lives this thread's calls of the functions come here. Whether they are then memopt's is
// for functions_are_ours() (scope.h) to say.
class InterceptFunctions {
 public:
  InterceptFunctions();
  ~InterceptFunctions();
  InterceptFunctions(const InterceptFunctions&) = delete;
  InterceptFunctions& operator=(const InterceptFunctions&) = delete;
};

void register_functions(pybind11::module_& module);

}  // namespace memopt::python
