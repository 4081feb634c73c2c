#include "host_copy.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include <atomic>

#include "current.h"

namespace memopt::saved {

namespace {

std::atomic<int64_t> tensors_to_host{0};
std::atomic<int64_t> bytes_to_host{0};
std::atomic<int64_t> tensors_to_device{0};
std::atomic<int64_t> bytes_to_device{0};

// -1: none pretended.
std::atomic<int> pretended{-1};

}  // namespace

HostCopy::HostCopy(const at::Tensor& tensor)
    : device_(tensor.device()),
      strides_(tensor.strides().vec()),
      requires_grad_(tensor.requires_grad()) {
  const at::AutoDispatchBelowAutograd below_autograd;
  const auto stream = current_stream(device_);
  values_ = at::empty_like(
      tensor,
      tensor.options().device(c10::kCPU).pinned_memory(stream.has_value()).requires_grad(false));
  values_.copy_(tensor, /*non_blocking=*/true);
  if (stream.has_value()) {
    copied_.emplace(device_.type());
    copied_->record(*stream);
  }
  ++tensors_to_host;
  bytes_to_host += static_cast<int64_t>(values_.nbytes());
}

at::Tensor HostCopy::restore() {
  if (copied_.has_value()) copied_->block(*current_stream(device_));
  at::Tensor tensor;
  {
    const at::AutoDispatchBelowAutograd below_autograd;
    tensor = at::empty_strided(values_.sizes(), strides_, values_.options().device(device_));
    tensor.copy_(values_, /*non_blocking=*/true);
  }
  ++tensors_to_device;
  bytes_to_device += static_cast<int64_t>(values_.nbytes());
  return tensor.set_requires_grad(requires_grad_);
}

bool is_on_accelerator(const at::Tensor& tensor) {
  const int pretend = pretended.load();
  if (pretend >= 0) return static_cast<int>(tensor.device().type()) == pretend;
  return !tensor.is_cpu() && !tensor.is_meta();
}

c10::intrusive_ptr<Handle> ToHost::take(const at::Tensor& tensor) {
  if (!is_on_accelerator(tensor) || tensor.layout() != at::kStrided || tensor.is_quantized() ||
      tensor.is_nested()) {
    return {};
  }
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) return {};
  }
  return c10::make_intrusive<HostCopy>(tensor);
}

LinkTraffic link_traffic() {
  return {tensors_to_host, bytes_to_host, tensors_to_device, bytes_to_device};
}

void pretend_accelerator(std::optional<c10::DeviceType> type) {
  pretended = type.has_value() ? static_cast<int>(*type) : -1;
}

}  // namespace memopt::saved
