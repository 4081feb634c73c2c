// What this folder looks up in PyTorch by name, the private names among it: all in this one place,
// which a new version of PyTorch may have to change. (Python's side: memopt/_compat.py.)
//
// Each is looked up once and kept for good. memopt's own Python is never looked up: what the engine
// needs of it comes in the settings of a call.
#pragma once

#include <pybind11/pybind11.h>

namespace memopt::python::compat {

// torch.utils._pytree: tree_flatten(tree, is_leaf), tree_unflatten(leaves, spec).
pybind11::handle tree_flatten();
pybind11::handle tree_unflatten();

// torch.nn.Module, and what all layers with running statistics are derived from.
PyTypeObject* module_type();
PyTypeObject* norm_base_type();

// What a tensor that waits for a functional collective (torch.distributed's AsyncCollectiveTensor)
// stands for, when it is there; null for any other tensor.
pybind11::object result_of_collective(pybind11::handle tensor);

// Whether torch.autograd.graph.allow_mutation_on_saved_tensors is entered.
bool hooks_copy_on_write();

// Whether this is PyTorch's error for a transform of torch.func inside saved-tensor hooks. It does
// not know whose hooks they are; memopt's own error says it, and names memopt.
bool refuses_hooks(pybind11::handle error);

// Whether torch.compile would see the frames of a call made now.
bool is_being_compiled();

}  // namespace memopt::python::compat
