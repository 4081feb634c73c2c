// memopt._C.Partition: a group of ranks, as memopt's Python describes it. The collective is a
// Python callable, so that this library links no c10d and tests can bring a link of their own.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "../saved/arguments.h"
#include "../saved/ranks.h"

namespace memopt::python {

class Call;

struct Partition {
  std::shared_ptr<saved::Ranks> ranks;
  pybind11::object agreement_of;  // (module or function) -> Agreement
  pybind11::object differs;  // (module or function, [(argument, share of the bytes)]): tells a user
};

// `of_parts`, which may be empty: what becomes of this rank's parts. `subject` is the module or
// function that is called. `call` outlives the result's use.
c10::intrusive_ptr<saved::FateOfArguments> partition_of_call(
    const Partition& partition, c10::intrusive_ptr<saved::Fate> of_parts, bool compares_every_call,
    const Call& call, const pybind11::object& subject);

void register_partition(pybind11::module_& module);

}  // namespace memopt::python
