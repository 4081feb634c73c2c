#include "geometry.h"

#include <ATen/ops/as_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../autograd/ownership.h"
#include "untracked.h"

namespace memopt::saved {

namespace {

at::Tensor alias(const at::Tensor& tensor, const Geometry& geometry) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), tensor.key_set(), c10::scalarTypeToTypeMeta(geometry.dtype));
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.offset);
  // Inference tensors have none.
  if (!made.is_inference())
    impl->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
  return made;
}

}  // namespace

Geometry Geometry::of(const at::Tensor& tensor) {
  Geometry geometry;
  geometry.dtype = tensor.scalar_type();
  geometry.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  geometry.strides.assign(tensor.strides().begin(), tensor.strides().end());
  geometry.offset = tensor.storage_offset();
  return geometry;
}

bool Geometry::operator==(const Geometry& other) const {
  return dtype == other.dtype && sizes == other.sizes && strides == other.strides &&
         offset == other.offset;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !autograd::is_traced(tensor) &&
         !tensor.is_nested() && !tensor.is_conj() && !tensor.is_neg() && !tensor.is_quantized() &&
         !tensor._is_zerotensor();
}

bool has_memory(const at::Tensor& tensor) {
  return tensor.numel() == 0 || !tensor.has_storage() || tensor.storage().nbytes() != 0;
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

StorageName name_of_storage(const at::Tensor& tensor) {
  return StorageName(tensor.storage().getWeakStorageImpl());
}

at::Tensor view_of_storage(const at::Tensor& tensor, const Geometry& geometry) {
  if (Geometry::of(tensor) == geometry) return tensor;
  if (is_plain(tensor)) return alias(tensor, geometry);
  const Untracked untracked;  // what other hooks gave back
  return tensor.as_strided(geometry.sizes, geometry.strides, geometry.offset);
}

at::Tensor without_memory(const at::Tensor& tensor) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), /*size_bytes=*/0,
                   at::DataPtr(nullptr, tensor.device()), /*allocator=*/nullptr,
                   /*resizable=*/false),
      tensor.key_set(), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  return made;
}

at::Tensor whole_storage(const at::Tensor& tensor) {
  Geometry bytes;
  bytes.dtype = at::kByte;
  bytes.sizes = {static_cast<int64_t>(tensor.storage().nbytes())};
  bytes.strides = {1};
  return alias(tensor, bytes);
}

}  // namespace memopt::saved
