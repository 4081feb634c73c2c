// A call of a user's function that can be made again: the function, its arguments taken apart into
// tensors and the rest, and where Python would allocate.
//
// Containers are taken apart by torch.utils._pytree, and of other objects the attributes that are
// tensors are taken out (objects.h). Each distinct tensor among the leaves is given to the region
// once, under a number. Any other leaf is kept by reference.
//
// An object with tensors is kept by reference, too, and the recompute gets the very object if its
// tensors are still those of the call. Otherwise, and if they leave the device, it gets a shallow
// copy with the tensors put in. The user's object is never written.
#pragma once

#include <pybind11/pybind11.h>

#include <unordered_map>
#include <vector>

#include "../saved/region.h"
#include "objects.h"
#include "scope.h"
#include "settings.h"

namespace memopt::python {

// The function called as `fn(*args, **kwargs)`, out of sight of torch.compile. Null with Python's
// error set if it raised.
pybind11::object call_function(const Settings& settings, pybind11::handle fn, pybind11::handle args,
                               pybind11::handle kwargs);

[[noreturn]] void throw_python_error();

class Call : public saved::Function {
 public:
  // `settings` is a Settings; `owner` is the module whose forward `fn` is, or None.
  Call(pybind11::object fn, const pybind11::tuple& args, const pybind11::dict& kwargs,
       pybind11::object settings, pybind11::object owner);
  ~Call() override;

  // The distinct tensors, by number.
  const std::vector<saved::ArgumentTensor>& tensors() const { return tensors_; }
  // What of a converted model's scope the region was called in, and so runs in.
  ModelScope scope() const { return scope_; }
  // For a function that opens that scope itself, when it is run again.
  void leave_scope_to_function() { scope_ = ModelScope::none; }
  // Which arguments they are: equal for calls whose tensors have the same numbers in the same
  // places.
  std::string structure() const;
  // To be called when the region keeps them.
  void release_tensors() { tensors_.clear(); }

  void run(const std::vector<at::Tensor>& tensors,
           c10::intrusive_ptr<saved::Packer> packer) override;
  bool hooks_copy_on_write() const override;
  std::string name() const override;
  std::string argument_name(size_t tensor) const override;
  std::string diagnosis() const override;

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);
  struct Leaf {
    pybind11::object object;  // null for a tensor and for an object with tensors
    size_t tensor = kNone;
    size_t holder = kNone;
  };
  struct Argument {
    pybind11::object name;  // null for a positional one
    std::vector<Leaf> leaves;
    pybind11::object
        spec;  // how the leaves were put together; null for an argument that is one leaf
  };
  struct Attribute {
    pybind11::object name;
    size_t tensor;
    pybind11::object then;  // what it was in forward; null where the holder has a copy
  };
  // An object with tensors among its attributes.
  struct Holder {
    pybind11::object object;  // or a copy without the tensors, so that they may leave the device
    std::vector<Attribute> attributes;
  };
  // Whatever Python owns, in one place, since it must be released with the GIL held.
  struct Objects {
    pybind11::object fn;
    pybind11::object owner;
    pybind11::object default_device;
    pybind11::object settings;
    std::vector<Argument> arguments;
    std::vector<Holder> holders;
    size_t positional;
  };
  // Which number a tensor, or an object with tensors, has already.
  struct Seen {
    std::unordered_map<c10::TensorImpl*, size_t> tensors;
    std::unordered_map<PyObject*, size_t> holders;
  };

  const Settings& settings() const;
  size_t tensor_number(pybind11::handle tensor, Seen& seen);
  Leaf leaf(pybind11::handle value, Seen& seen);
  Argument take_apart(pybind11::object name, pybind11::handle value, Seen& seen);
  // What the recompute gets in an object's place.
  static pybind11::object with_tensors(const Holder& holder,
                                       const std::vector<pybind11::object>& tensors);

  std::unique_ptr<Objects> objects_;
  std::vector<saved::ArgumentTensor> tensors_;
  ModelScope scope_;
};

}  // namespace memopt::python
