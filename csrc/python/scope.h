// The scopes that a thread has entered: the with-statement's object of memopt.saved_tensors(), and
// the calls of a converted model's modules (call_scopes.h, memopt/_convert/recipes.py).
//
// What is on is asked by the hooks that autograd would call now, and by nothing that a thread
// remembers: a checkpointed region, memopt's or PyTorch's, puts hooks of its own inside, in forward
// and in the recompute alike, wherever that runs. So both runs of a region find the same.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace memopt::python {

void register_scope(pybind11::module_& module);

// Opens what a converted model's calls run in: recipes, and with `functions` PyTorch's functions
// memopt's. It ends with the last reference. Null where there is nothing to open.
std::shared_ptr<void> model_scope(bool functions);
// Whether there is nothing to open.
bool is_in_model_scope(bool functions);

// What of it is on here. A region that was called in such a scope runs in one, in forward and in
// the recompute, since its own hooks are inside the one around.
enum class ModelScope { none, recipes, functions };
ModelScope model_scope_here();
std::shared_ptr<void> same_scope(ModelScope scope);

}  // namespace memopt::python
