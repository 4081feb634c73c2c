#include "ownership.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/jit/frontend/tracer.h>

namespace memopt::autograd {
namespace {

// Whether something sees every op that runs in this thread.
bool is_observed() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         c10::impl::tls_is_dispatch_key_included(
             c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         torch::jit::tracer::isTracing();
}

}  // namespace

bool is_traced(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_python_dispatch() ||
         tensor.key_set().has(c10::DispatchKey::Functionalize);
}

bool is_ours_alone(const at::Tensor& tensor, size_t references) {
  return tensor.use_count() == references && tensor.has_storage() &&
         tensor.storage().use_count() == 1 && !is_traced(tensor) &&
         !tensor.key_set().has(c10::DispatchKey::FuncTorchBatched) && !is_observed();
}

bool saves_with_hooks() {
  return at::SavedTensorDefaultHooks::get_hooks().has_value();
}

bool is_saved_by_us_alone(const at::Tensor& tensor) {
  return !torch::autograd::get_current_graph_task_keep_graph() && is_ours_alone(tensor, 2);
}

at::Tensor add_to(at::Tensor ours, const at::Tensor& other) {
  if (at::GradMode::is_enabled() || !is_ours_alone(ours)) return ours + other;
  return ours.add_(other);
}

}  // namespace memopt::autograd
