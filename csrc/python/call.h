// A call of a user's function that can be made again: the function, its arguments taken apart into
// tensors and the rest, and where Python would allocate.
//
// Containers are taken apart by torch.utils._pytree. Each distinct tensor among the leaves is given
// to the region once, under a number. Any other leaf is kept by reference, and so are tensors
// inside objects that pytree cannot take apart.
#pragma once

#include <pybind11/pybind11.h>

#include <unordered_map>
#include <vector>

#include "../saved/region.h"
#include "settings.h"

namespace memopt::python {

// The function called as `fn(*args, **kwargs)`, out of sight of torch.compile. Null with Python's
// error set if it raised.
pybind11::object call_function(pybind11::handle fn, pybind11::handle args, pybind11::handle kwargs);

[[noreturn]] void throw_python_error();

class Call : public saved::Function {
 public:
  // `owner` is the module whose forward `fn` is, or None.
  Call(pybind11::object fn, const pybind11::tuple& args, const pybind11::dict& kwargs,
       const Settings& settings, pybind11::object owner);
  ~Call() override;

  // The distinct tensors, by number.
  const std::vector<saved::ArgumentTensor>& tensors() const { return tensors_; }
  // To be called when the region keeps them.
  void release_tensors() { tensors_.clear(); }

  void run(const std::vector<at::Tensor>& tensors,
           c10::intrusive_ptr<saved::Packer> packer) override;
  std::string name() const override;
  std::string argument_name(size_t tensor) const override;
  std::string diagnosis() const override;

 private:
  struct Leaf {
    pybind11::object object;  // null for a tensor
    size_t tensor;
  };
  struct Argument {
    pybind11::object name;  // null for a positional one
    std::vector<Leaf> leaves;
    pybind11::object
        spec;  // how the leaves were put together; null for an argument that is one leaf
  };
  // Whatever Python owns, in one place, since it must be released with the GIL held.
  struct Objects {
    pybind11::object fn;
    pybind11::object owner;
    pybind11::object default_device;
    Settings settings;
    std::vector<Argument> arguments;
    size_t positional;
  };

  Leaf leaf(pybind11::handle value, std::unordered_map<c10::TensorImpl*, size_t>& numbers);
  Argument take_apart(pybind11::object name, pybind11::handle value,
                      std::unordered_map<c10::TensorImpl*, size_t>& numbers);

  std::unique_ptr<Objects> objects_;
  std::vector<saved::ArgumentTensor> tensors_;
};

}  // namespace memopt::python
