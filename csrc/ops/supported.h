// Which dtypes and devices the ops take. The one table of it: for the rules of arguments
// (checks.h), for PyTorch's functions in a converted model (intercept/functions.cpp) and for
// memopt/_convert/supported.py.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <array>

namespace memopt::ops {

constexpr std::array kDtypes{c10::ScalarType::Float, c10::ScalarType::BFloat16,
                             c10::ScalarType::Half, c10::ScalarType::Double};

// Those that this build has kernels for.
#if defined(MEMOPT_WITH_CUDA)
constexpr std::array kDevices{c10::DeviceType::CPU, c10::DeviceType::Meta, c10::DeviceType::CUDA};
#else
constexpr std::array kDevices{c10::DeviceType::CPU, c10::DeviceType::Meta};
#endif

constexpr bool takes_dtype(c10::ScalarType dtype) {
  for (const auto taken : kDtypes) {
    if (taken == dtype) return true;
  }
  return false;
}

// A parameter beside an input: of the input's dtype, or float32, which loses nothing of 16 bits.
constexpr bool takes_parameter(c10::ScalarType parameter, c10::ScalarType input) {
  return parameter == input ||
         (parameter == c10::ScalarType::Float && input != c10::ScalarType::Double);
}

constexpr bool has_kernels_for(c10::DeviceType device) {
  for (const auto known : kDevices) {
    if (known == device) return true;
  }
  return false;
}

}  // namespace memopt::ops
