// PyTorch's poolings and interpolations inside a converted model. They are PyTorch's own; where
// their input has a recipe the registry is told how their output is made from it, so that a
// convolution behind one does not keep the output, and a max pooling keeps its indices alone.
#include <ATen/Operators.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/gather.h>
#include <torch/library.h>

#include "made_of.h"

namespace memopt::intercept {

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::DispatchKeySet;
using OutputAndIndices = std::tuple<Tensor, Tensor>;

// The values at `indices` into the last `dims` dimensions: one read for each, where a pooling reads
// its window. In the strides of the indices, which are those of the output.
Tensor values_at(const Tensor& self, const Tensor& indices, int64_t dims) {
  const Tensor values = at::gather(self.flatten(-dims), -1, indices.flatten(-dims));
  Tensor output = values.view(indices.sizes());
  if (output.strides() == indices.strides()) return output;
  return at::empty_strided(indices.sizes(), indices.strides(), self.options()).copy_(output);
}

// The kernel of a max pooling over `dims` dimensions.
template <class Op, int64_t dims>
struct MaxPooling {
  template <class Schema>
  struct Kernel;
  template <class... Numbers>
  struct Kernel<OutputAndIndices(const Tensor&, Numbers...)> {
    static OutputAndIndices call(DispatchKeySet keys, const Tensor& self, Numbers... numbers) {
      OutputAndIndices result = Op::redispatch(below_intercept(keys), self, numbers...);
      const Tensor &output = std::get<0>(result), &indices = std::get<1>(result);
      note_made_of(output, self, [&]() -> autograd::Recipe {
        return {{self, indices},
                [](const auto& read) { return values_at(read[0], read[1], dims); }};
      });
      return result;
    }
  };
  using Call = Kernel<typename Op::schema>;
};

// The kernel of an average over windows. Where they overlap an input is read more than once, which
// takes ATen ten times as long as an activation: such an average is kept.
template <class Op>
Tensor average(DispatchKeySet keys, const Tensor& self, IntArrayRef kernel_size, IntArrayRef stride,
               IntArrayRef padding, bool ceil_mode, bool count_include_pad,
               std::optional<int64_t> divisor_override) {
  const auto is_apart = [&](size_t i) {
    return stride.empty() || stride[i % stride.size()] >= kernel_size[i];
  };
  for (size_t i = 0; i < kernel_size.size(); ++i) {
    if (!is_apart(i)) {
      return Op::redispatch(below_intercept(keys), self, kernel_size, stride, padding, ceil_mode,
                            count_include_pad, divisor_override);
    }
  }
  return MadeOf<Op>::Call::call(keys, self, kernel_size, stride, padding, ceil_mode,
                                count_include_pad, divisor_override);
}

}  // namespace

#define MEMOPT_MAX_POOLING(op, dims) \
  m.impl(#op, TORCH_FN((MaxPooling<at::_ops::op, dims>::Call::call)));

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  MEMOPT_MAX_POOLING(max_pool2d_with_indices, 2)
  MEMOPT_MAX_POOLING(max_pool3d_with_indices, 3)
  MEMOPT_MAX_POOLING(adaptive_max_pool2d, 2)
  MEMOPT_MAX_POOLING(adaptive_max_pool3d, 3)
  m.impl("avg_pool2d", average<at::_ops::avg_pool2d>);
  m.impl("avg_pool3d", average<at::_ops::avg_pool3d>);
  MEMOPT_MADE_OF(_adaptive_avg_pool2d)
  MEMOPT_MADE_OF(_adaptive_avg_pool3d)
  MEMOPT_MADE_OF(upsample_nearest1d)
  MEMOPT_MADE_OF(upsample_nearest2d)
  MEMOPT_MADE_OF(upsample_nearest3d)
  MEMOPT_MADE_OF(_upsample_nearest_exact1d)
  MEMOPT_MADE_OF(_upsample_nearest_exact2d)
  MEMOPT_MADE_OF(_upsample_nearest_exact3d)
  MEMOPT_MADE_OF(upsample_linear1d)
  MEMOPT_MADE_OF(upsample_bilinear2d)
  MEMOPT_MADE_OF(upsample_bicubic2d)
  MEMOPT_MADE_OF(upsample_trilinear3d)
}

}  // namespace memopt::intercept
