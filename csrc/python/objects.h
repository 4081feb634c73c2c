// Tensors among the attributes of an object that PyTorch cannot take apart, such as a dataclass.
//
// The look is shallow: instance attributes (__dict__ and __slots__) that are tensors themselves.
// Modules, classes, functions and methods are not looked into: what they hold is theirs.
#pragma once

#include <c10/core/SafePyObject.h>
#include <pybind11/pybind11.h>

#include <vector>

namespace memopt::python {

// What is held, borrowed.
pybind11::handle object_of(const c10::SafePyObject& held);

// Whether it is a torch.Tensor and of no class derived from that, as a parameter is.
bool is_of_base_class(pybind11::handle tensor);

struct TensorAttribute {
  pybind11::object name;
  pybind11::object tensor;
};

// Never runs the object's own code: properties and __getattr__ are not asked.
std::vector<TensorAttribute> tensor_attributes(pybind11::handle object);

// The attribute as it is now; null if there is none.
pybind11::object attribute(pybind11::handle object, pybind11::handle name);

// Sets it past the object's own __setattr__, which a frozen dataclass forbids.
void set_attribute(pybind11::handle object, pybind11::handle name, pybind11::handle value);

// copy.copy(object), which may raise; null if that is no object of the same class with attributes
// of its own.
pybind11::object shallow_copy(pybind11::handle object);

}  // namespace memopt::python
