#include "slab.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace memopt::saved {

void SlabLayout::add(int64_t tensor_bytes) {
  const int64_t step = ranks * kAlignment;
  const int64_t part = (tensor_bytes + step - 1) / step * kAlignment;
  parts.push_back({tensor_bytes, part, bytes});
  bytes += part;
}

int64_t SlabLayout::used(const Part& part, int64_t rank) const {
  return std::clamp<int64_t>(part.tensor_bytes - rank * part.bytes, 0, part.bytes);
}

bool is_one_range(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense();
}

at::Tensor bytes_of_range(const at::Tensor& tensor) {
  Geometry bytes;
  bytes.dtype = at::kByte;
  bytes.sizes = {static_cast<int64_t>(tensor.nbytes())};
  bytes.strides = {1};
  bytes.offset = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  return view_of_storage(whole_storage(tensor), bytes);
}

at::Tensor make_slab(const SlabLayout& layout, int64_t rank,
                     const std::vector<at::Tensor>& tensors) {
  auto slab = at::empty({layout.bytes}, tensors[0].options().dtype(at::kByte));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& part = layout.parts[i];
    const int64_t used = layout.used(part, rank);
    if (used == 0) continue;
    slab.narrow(0, part.offset, used)
        .copy_(bytes_of_range(tensors[i]).narrow(0, rank * part.bytes, used));
  }
  return slab;
}

std::vector<at::Tensor> from_slabs(const SlabLayout& layout, const at::Tensor& gathered,
                                   const std::vector<Geometry>& geometries) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(geometries.size());
  for (size_t i = 0; i < geometries.size(); ++i) {
    const auto& part = layout.parts[i];
    auto bytes = gathered;
    if (layout.parts.size() > 1) {
      bytes = at::empty({layout.ranks, part.bytes}, gathered.options());
      bytes.copy_(gathered.view({layout.ranks, layout.bytes}).narrow(1, part.offset, part.bytes));
    }
    auto geometry = geometries[i];
    geometry.offset = 0;
    tensors.push_back(view_of_storage(bytes, geometry));
  }
  return tensors;
}

}  // namespace memopt::saved
