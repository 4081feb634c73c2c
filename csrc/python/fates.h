// Policies and fates, as users write them, made Fates of csrc/saved.
//
// A policy is the name of a built-in fate; or a user's own fate, an object whose pack(tensor)
// returns an object with restore(); or a callable that is asked for each tensor and answers with
// one of these. Built-in fates run no Python.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>

#include "../saved/fate.h"
#include "../saved/recipe_registry.h"

namespace memopt::python {

// Raises TypeError or ValueError unless it is a policy.
void check_policy(pybind11::handle policy);

// A policy made ready for one scope.
struct Policy {
  c10::intrusive_ptr<saved::Fate> fate;
  c10::intrusive_ptr<saved::RecipeRegistry> registry;  // empty where no recipes are made
};
// `in_region`: the hooks around it are a checkpointed region's. That drops what it gets, so that
// offloading would free nothing; and a storage that is offloaded in forward may be one that stays
// in the recompute, where the region must get the same tensors. So nothing is offloaded then.
Policy policy_of(pybind11::handle policy, bool in_region);

// The fate of the tensors among a region's arguments; empty for "keep".
c10::intrusive_ptr<saved::Fate> fate_of_arguments(pybind11::handle fate);

}  // namespace memopt::python
