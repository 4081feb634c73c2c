// Declares a public op: its schema, and the one function that serves every device, with and without
// gradients and under autocast.
//
//   MEMOPT_DECLARE(layer_norm, kNormAutocast, {}, "layer_norm(Tensor input, ...) -> Tensor");
//
// The function is a composition of dispatcher ops (run.h) and has no kernel of its own.
//
// Under autocast results have the dtype that PyTorch's CPU gives them. Activations and norms keep
// their input's, so that a float32 residual stream stays float32; tensors of several dtypes get the
// widest, as PyTorch's own arithmetic promotes them. An op with linears behind computes in the
// autocast dtype inside: every tensor argument is cast, as autocast casts a linear's. The
// parameters of norms may stay float32 either way, which the kernels take beside a 16-bit input.
// float64 is left alone, as autocast leaves it.
//
// A recipe (recipe.h) goes through the cast that the next matrix product makes of such a result.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../ops/declare.h"
#include "support.h"

namespace memopt::autograd {

enum class AutocastTo {
  kInput,   // no cast: of one tensor, in its dtype
  kWidest,  // of the tensors' dtypes
  kLow,     // the autocast dtype
};

struct Autocast {
  AutocastTo to = AutocastTo::kInput;
  std::vector<std::string> float32_parameters = {};  // the arguments that may stay float32
};
using ops::kDrawsRandomNumbers;
using ops::Tags;

// The positions of the declared op's arguments with these names, as bits.
uint64_t positions(const char* op, const std::vector<std::string>& names);

namespace autocast {

struct Target {
  c10::DeviceType device;
  AutocastTo to;
  at::ScalarType dtype;  // of the tensors that are no parameters
};

Tensor cast(const Tensor& tensor, const Target& target, bool is_parameter);
OptionalTensor cast(const OptionalTensor& tensor, const Target& target, bool is_parameter);
std::vector<Tensor> cast(at::TensorList tensors, const Target& target, bool is_parameter);
c10::List<OptionalTensor> cast(const c10::List<OptionalTensor>& tensors, const Target& target,
                               bool is_parameter);
template <class T>
const T& cast(const T& argument, const Target&, bool) {
  return argument;
}

// The promotion of dtype with an argument's, if that is a tensor and no parameter.
void promote(const Tensor& tensor, bool is_parameter, std::optional<at::ScalarType>* dtype);
template <class T>
void promote(const T&, bool, std::optional<at::ScalarType>*) {}

}  // namespace autocast

template <auto kFunction>
struct Declaration;

template <class Result, class... Arguments, Result (*kFunction)(Arguments...)>
struct Declaration<kFunction> {
  Declaration(const Autocast& autocast, const Tags& tags, const char* schema) {
    std::vector<ops::Kernel> kernels;
    const auto add = [&](c10::DispatchKey key, auto* function) {
      kernels.push_back({key, torch::CppFunction(function)});
    };
    add(c10::DispatchKey::Autograd, kFunction);
    add(c10::DispatchKey::CompositeExplicitAutograd, kFunction);
    if (autocast.to != AutocastTo::kInput) {
      add(c10::DispatchKey::AutocastCPU, &under_autocast<c10::DeviceType::CPU>);
      add(c10::DispatchKey::AutocastCUDA, &under_autocast<c10::DeviceType::CUDA>);
    }
    name = ops::declare(schema, tags, std::move(kernels));
    parameter_positions = positions(name, autocast.float32_parameters);
    autocast_to = autocast.to;
  }

  // Plain types: a static member of a template may be initialised after its use here.
  static inline uint64_t parameter_positions = 0;
  static inline const char* name = nullptr;
  static inline AutocastTo autocast_to = AutocastTo::kInput;

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
    const auto is_parameter = [](size_t place) { return (parameter_positions >> place & 1) != 0; };
    std::optional<at::ScalarType> widest;
    (autocast::promote(arguments, is_parameter(kPlace), &widest), ...);
    const autocast::Target target{kDevice, autocast_to,
                                  autocast_to == AutocastTo::kLow
                                      ? at::autocast::get_autocast_dtype(kDevice)
                                      : widest.value_or(at::kFloat)};
    return op.call(autocast::cast(arguments, target, is_parameter(kPlace))...);
  }
};

#define MEMOPT_DECLARE(function, autocast, tags, schema) \
  const Declaration<&function> function##_declaration(autocast, tags, schema)

}  // namespace memopt::autograd
