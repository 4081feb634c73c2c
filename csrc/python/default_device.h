// Where factory functions allocate (torch.device as a context, torch.set_default_device). Python's
// own mode stack holds it, one per thread, so the thread of backward may have another than
// forward's.
#pragma once

#include <pybind11/pybind11.h>

namespace memopt::python {

// The calling thread's default device; None if nothing set one.
pybind11::object default_device();

// Runs a scope with the default device `then`.
class DefaultDeviceGuard {
 public:
  explicit DefaultDeviceGuard(const pybind11::object& then);
  ~DefaultDeviceGuard();
  DefaultDeviceGuard(const DefaultDeviceGuard&) = delete;
  DefaultDeviceGuard& operator=(const DefaultDeviceGuard&) = delete;

 private:
  pybind11::object entered_;
};

}  // namespace memopt::python
