// Factories, views and copies: the operators that the fallback is built on.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {

namespace {

using at::Tensor;
using c10::IntArrayRef;
using std::optional;

c10::Device with_index(optional<c10::Device> device) {
  return {kType, device.has_value() && device->has_index() ? device->index() : current_device()};
}

constexpr c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

Tensor empty(IntArrayRef sizes, optional<at::ScalarType> dtype, optional<at::Layout> layout,
             optional<c10::Device> device, optional<bool> pinned,
             optional<at::MemoryFormat> format) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "sim: only strided tensors");
  TORCH_CHECK(!pinned.value_or(false), "sim: only CPU tensors can be pinned");
  const c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_generic(sizes, c10::GetAllocator(kType), kKey,
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, optional<at::ScalarType> dtype,
                     optional<at::Layout> layout, optional<c10::Device> device,
                     optional<bool> pinned) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "sim: only strided tensors");
  TORCH_CHECK(!pinned.value_or(false), "sim: only CPU tensors can be pinned");
  const c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kType), kKey,
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, IntArrayRef sizes, IntArrayRef strides,
                  optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

Tensor& set_storage_and_geometry(Tensor& self, at::Storage source, int64_t offset,
                                 IntArrayRef sizes, IntArrayRef strides) {
  return at::cpu::set_(self, std::move(source), offset, sizes, strides);
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::cpu::set_(self, std::move(source), 0, {count}, {});
}

Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(kType), true);
  return at::cpu::set_(self, std::move(none), 0, {0}, {});
}

// The copy's memory as the streams' threads see it.
Tensor seen_by_streams(const Tensor& tensor) {
  return is_sim(tensor) ? hidden_view(tensor) : unowned(tensor);
}

// From one device to another the copy runs on the source's stream, and both streams wait for each
// other's work, as on CUDA.
void copy_between_devices(const Tensor& from, const Tensor& to) {
  const auto here = current_stream(from.device().index());
  const auto there = current_stream(to.device().index());
  wait(here, record(there));
  enqueue(here, {Kind::kDeviceToDevice, "copy", [from = hidden_view(from), to = hidden_view(to)] {
                   const at::AutoDispatchBelowADInplaceOrView below;
                   to.copy_(from);
                 }});
  wait(there, record(here));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  TORCH_CHECK(from.is_cpu() || is_sim(from), "sim: cannot copy from ", from.device());
  TORCH_CHECK(to.is_cpu() || is_sim(to), "sim: cannot copy to ", to.device());
  if (is_sim(from) && is_sim(to) && from.device() != to.device()) {
    copy_between_devices(from, to);
    return to;
  }
  const Tensor source = from.expand_as(to);
  const auto stream = current_stream((is_sim(to) ? to : from).device().index());
  const Kind kind = from.is_cpu() ? Kind::kHostToDevice
                    : to.is_cpu() ? Kind::kDeviceToHost
                                  : Kind::kDeviceToDevice;
  const Tensor host = from.is_cpu() ? from : to.is_cpu() ? to : Tensor();
  const bool pinned = host.defined() && is_pinned(host.const_data_ptr());
  // Where the host waits, it may give up: then the copy must not write to memory that is gone.
  const Tensor held = pinned ? Tensor() : host;
  enqueue(stream, {kind, "copy", [from = seen_by_streams(source), to = seen_by_streams(to), held] {
                     const at::AutoDispatchBelowADInplaceOrView below;
                     to.copy_(from);
                   }});
  if (!host.defined()) return to;
  if (pinned) record_pinned_use(host.const_data_ptr(), stream);
  if (!pinned || !non_blocking) wait_on_host(record(stream));
  return to;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  const auto stream = current_stream(self.device().index());
  wait_on_host(record(stream));
  return at::_local_scalar_dense(hidden_view(self));
}

void record_stream(Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr().get(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_and_geometry);
  m.impl("set_", &set_nothing);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
}

Tensor on_memory(void* data, const Tensor& like) {
  at::Tensor tensor;
  if (like.numel() == 0) {
    tensor = at::detail::empty_strided_cpu(like.sizes(), like.strides(), like.scalar_type());
  } else {
    const auto options = at::TensorOptions().dtype(like.scalar_type()).device(at::kCPU);
    tensor = at::from_blob(data, like.sizes(), like.strides(), options);
  }
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

}  // namespace

Tensor empty_like_geometry(const Tensor& like, c10::Device device) {
  return empty_strided(like.sizes(), like.strides(), like.scalar_type(), at::kStrided, device,
                       std::nullopt);
}

Tensor hidden_view(const Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg(),
              "sim: only plain strided tensors");
  void* data = nullptr;
  if (tensor.numel() > 0) {
    data = hidden(tensor.storage().data_ptr().get()) + tensor.storage_offset() * tensor.itemsize();
  }
  return on_memory(data, tensor);
}

Tensor unowned(const Tensor& tensor) {
  return on_memory(const_cast<void*>(tensor.const_data_ptr()), tensor);
}

}  // namespace sim
