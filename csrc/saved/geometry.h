// The elements of its storage that a tensor is, and their dtype.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

namespace memopt::saved {

struct Geometry {
  at::ScalarType dtype = at::kFloat;
  c10::SmallVector<int64_t, 4> sizes;
  c10::SmallVector<int64_t, 4> strides;
  int64_t offset = 0;

  static Geometry of(const at::Tensor& tensor);
  bool operator==(const Geometry& other) const;
};

// Whether its storage and geometry determine a tensor's values.
bool is_plain(const at::Tensor& tensor);

// Whether a tensor's storage was not freed under it.
bool has_memory(const at::Tensor& tensor);

// Names a storage, weakly: while it is held, no other storage can have the address.
using StorageName = c10::weak_intrusive_ptr<c10::StorageImpl>;
StorageName name_of_storage(const at::Tensor& tensor);
inline c10::StorageImpl* address_of(const StorageName& name) {
  return name._unsafe_get_target();
}
c10::StorageImpl* storage_of(const at::Tensor& tensor);

// `geometry` of the storage of `tensor`: a tensor without history, with its version counter.
at::Tensor view_of_storage(const at::Tensor& tensor, const Geometry& geometry);

// A tensor of the same geometry on a storage of its own that has no bytes.
at::Tensor without_memory(const at::Tensor& tensor);

// All bytes of a plain tensor's storage, with the version counter of the tensor.
at::Tensor whole_storage(const at::Tensor& tensor);

}  // namespace memopt::saved
