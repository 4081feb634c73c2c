// Which norm: the kernels' enum is everyone's, and here is its name, as private ops take it and
// public ones begin or end with it.
#pragma once

#include <optional>
#include <string_view>

#include "../kernels/norm.h"

namespace memopt::ops {

using kernels::NormKind;

constexpr const char* name_of(NormKind kind) {
  return kind == NormKind::kRmsNorm ? "rms_norm" : "layer_norm";
}

// Empty for any other name.
constexpr std::optional<NormKind> norm_kind(std::string_view name) {
  for (const NormKind kind : {NormKind::kLayerNorm, NormKind::kRmsNorm}) {
    if (name == name_of(kind)) return kind;
  }
  return std::nullopt;
}

}  // namespace memopt::ops
