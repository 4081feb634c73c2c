#include "default_device.h"

#include <ATen/PythonTorchFunctionTLS.h>

namespace memopt::python {

namespace py = pybind11;

py::object default_device() {
  // Both ways to set one are modes on this stack, which nearly always is empty.
  if (at::impl::PythonTorchFunctionTLS::stack_len() == 0) return py::none();
  return py::module_::import("torch").attr("get_default_device")();
}

DefaultDeviceGuard::DefaultDeviceGuard(const py::object& then) {
  const auto now = default_device();
  if (then.equal(now)) return;
  entered_ = then.is_none() ? py::module_::import("torch").attr("device")("cpu") : then;
  entered_.attr("__enter__")();
}

DefaultDeviceGuard::~DefaultDeviceGuard() {
  if (!entered_) return;
  const py::error_scope pending;  // an exception of the scope stays what it is
  try {
    entered_.attr("__exit__")(py::none(), py::none(), py::none());
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("memopt: leaving torch.device");
  }
}

}  // namespace memopt::python
