// Declares a public op: its schema, and the one function that serves every device, with and without
// gradients and under autocast.
//
//   MEMOPT_DECLARE(layer_norm, kNormAutocast, {}, "layer_norm(Tensor input, ...) -> Tensor");
//
// The function is a composition of dispatcher ops (run.h) and has no kernel of its own.
//
// Under autocast an op computes in the autocast dtype and returns it, with float32 statistics
// inside. Every tensor argument is cast, as autocast casts a linear's; only the parameters of norms
// stay float32, which the kernels take beside a 16-bit input. float64 is left alone, as autocast
// leaves it.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "support.h"

namespace memopt::autograd {

struct Autocast {
  std::vector<std::string> float32_parameters;  // the arguments that stay float32
  bool casts = true;                            // else the op keeps its input's dtype
};
using Tags = std::vector<at::Tag>;

// No compiler may merge, repeat or drop the calls.
inline const Tags kDrawsRandomNumbers{at::Tag::nondeterministic_seeded};

// What the dispatcher registers for one op. The schema may be broken into lines.
struct Kernel {
  c10::DispatchKey key;
  torch::CppFunction function;
};
// Returns the op's name, "memopt::layer_norm"; it lasts for ever.
const char* declare(const char* schema, const Tags& tags, std::vector<Kernel> kernels);

// The positions of the declared op's arguments with these names, as bits.
uint64_t positions(const char* op, const std::vector<std::string>& names);

namespace autocast {

Tensor cast(const Tensor& tensor, c10::DeviceType device, bool is_parameter);
OptionalTensor cast(const OptionalTensor& tensor, c10::DeviceType device, bool is_parameter);
std::vector<Tensor> cast(at::TensorList tensors, c10::DeviceType device, bool is_parameter);
c10::List<OptionalTensor> cast(const c10::List<OptionalTensor>& tensors, c10::DeviceType device,
                               bool is_parameter);
template <class T>
const T& cast(const T& argument, c10::DeviceType, bool) {
  return argument;
}

}  // namespace autocast

template <auto kFunction>
struct Declaration;

template <class Result, class... Arguments, Result (*kFunction)(Arguments...)>
struct Declaration<kFunction> {
  Declaration(const Autocast& autocast, const Tags& tags, const char* schema) {
    std::vector<Kernel> kernels;
    const auto add = [&](c10::DispatchKey key, auto* function) {
      kernels.push_back({key, torch::CppFunction(function)});
    };
    add(c10::DispatchKey::Autograd, kFunction);
    add(c10::DispatchKey::CompositeExplicitAutograd, kFunction);
    if (autocast.casts) {
      add(c10::DispatchKey::AutocastCPU, &under_autocast<c10::DeviceType::CPU>);
      add(c10::DispatchKey::AutocastCUDA, &under_autocast<c10::DeviceType::CUDA>);
    }
    name = declare(schema, tags, std::move(kernels));
    parameter_positions = positions(name, autocast.float32_parameters);
  }

  // Plain types: a static member of a template may be initialised after its use here.
  static inline uint64_t parameter_positions = 0;
  static inline const char* name = nullptr;

 private:
  template <c10::DeviceType kDevice>
  static Result under_autocast(Arguments... arguments) {
    return call<kDevice>(std::index_sequence_for<Arguments...>(), arguments...);
  }

  template <c10::DeviceType kDevice, size_t... kPlace>
  static Result call(std::index_sequence<kPlace...>, const Arguments&... arguments) {
    static const auto op = find_op<Result(Arguments...)>(name);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
    return op.call(autocast::cast(arguments, kDevice, (parameter_positions >> kPlace & 1) != 0)...);
  }
};

#define MEMOPT_DECLARE(function, autocast, tags, schema) \
  const Declaration<&function> function##_declaration(autocast, tags, schema)

}  // namespace memopt::autograd
