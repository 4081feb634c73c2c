// Gated units: what separate and packed gates and ups share. They are taken by rows, where their
// strides allow it without a copy: the halves of one tensor do.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "../kernels/gated.h"

namespace memopt::ops {

// Rows and columns of a tensor whose last dimension the kernels take as columns.
struct GatedShape {
  int64_t rows;
  int64_t cols;

  explicit GatedShape(const at::Tensor& y)
      : rows(y.dim() == 0 ? 1 : c10::multiply_integers(y.sizes().slice(0, y.dim() - 1))),
        cols(y.dim() == 0 ? 1 : y.size(-1)) {}
};

// One long row where nothing lies between the rows: work is then cut anywhere.
template <class Params>
void join_rows(Params& p, bool dense) {
  if (!dense) return;
  p.cols *= p.rows;
  p.rows = 1;
}

// Where there is anything to compute.
void run(const char* op, const at::Tensor& device, const kernels::GatedForwardParams& p);
void run(const char* op, const at::Tensor& device, const kernels::GatedBackwardParams& p);

// The name in errors: the unit's where it has one of its own.
const char* gated_op_name(std::string_view activation, bool packed, bool backward);

}  // namespace memopt::ops
