// The parts of several tensors in one piece of memory, whatever their dtypes.
//
// Each rank has a range of a tensor's bytes, in the order of memory; its ranges of all tensors lie
// one after another in its slab. The slabs of all ranks, gathered one after another, hold the
// tensors:
//
//     gathered:  | slab of rank 0       | slab of rank 1       | ...
//     a slab:    | part of a | part of b |
//
// So the gathered slabs of a single tensor are its very bytes; several tensors are copied out.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "geometry.h"

namespace memopt::saved {

struct SlabLayout {
  // Parts begin at multiples of it, so that ranks and copies meet aligned memory.
  static constexpr int64_t kAlignment = 16;

  struct Part {
    int64_t tensor_bytes;
    int64_t bytes;   // of one rank's part: ceil(tensor_bytes / ranks), rounded up to kAlignment
    int64_t offset;  // in the slab
  };

  int64_t ranks = 1;
  int64_t bytes = 0;  // of one rank's slab
  std::vector<Part> parts;

  explicit SlabLayout(int64_t of_ranks) : ranks(of_ranks) {}
  void add(int64_t tensor_bytes);

  // How many of a part's bytes are this rank's of the tensor. What is left, at the end of the last
  // ranks' parts, is padding.
  int64_t used(const Part& part, int64_t rank) const;
};

// Whether a tensor's bytes are one range of its storage, without holes or overlaps.
bool is_one_range(const at::Tensor& tensor);
// These bytes, in the order of memory.
at::Tensor bytes_of_range(const at::Tensor& tensor);

// This rank's slab of the tensors, which lie in one range each, on one device.
at::Tensor make_slab(const SlabLayout& layout, int64_t rank,
                     const std::vector<at::Tensor>& tensors);

// The tensors again, of the geometries that they had (offsets aside), from all ranks' slabs.
std::vector<at::Tensor> from_slabs(const SlabLayout& layout, const at::Tensor& gathered,
                                   const std::vector<Geometry>& geometries);

}  // namespace memopt::saved
