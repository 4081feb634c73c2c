// Autocast by the lists that PyTorch gives out for its accelerators.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "tensors.h"

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

enum class To { kLow, kFloat, kFloatResult, kWidest };

// What the operators that promote cast to: the widest of their arguments' types.
at::ScalarType widest(const Stack& stack, size_t count) {
  auto type = at::autocast::get_autocast_dtype(kType);
  for (const IValue& argument : torch::jit::last(stack, count)) {
    with_tensors(argument, [&](const Tensor& tensor) {
      type = at::autocast::prioritize(type, tensor, kType);
      return tensor;
    });
  }
  return type;
}

template <To kTo>
void cast(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  if (kTo == To::kFloatResult) {
    const auto place = op.schema().argumentIndexWithName("dtype");
    IValue& dtype = (*stack)[first + static_cast<size_t>(place.value())];
    const auto eligible = at::autocast::is_eligible((*stack)[first].toTensor(), kType);
    if (dtype.isNone() && eligible) dtype = at::kFloat;
  } else {
    const auto type = kTo == To::kLow      ? at::autocast::get_autocast_dtype(kType)
                      : kTo == To::kWidest ? widest(*stack, arguments.size())
                                           : at::kFloat;
    for (size_t i = first; i < stack->size(); ++i) {
      (*stack)[i] = with_tensors((*stack)[i], [&](const Tensor& tensor) {
        return at::autocast::cached_cast(type, tensor, kType);
      });
    }
  }
  op.callBoxed(stack);
}

template <To kTo>
void add(torch::Library& library, const char* name, const char* overload = "") {
  const std::string full = *overload == '\0' ? name : std::string(name) + "." + overload;
  library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&cast<kTo>>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define SIM_NAMES(name, ...) #name __VA_OPT__(, #__VA_ARGS__)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIM_ADD(...) add<To::kLow>(m, SIM_NAMES(__VA_ARGS__));
  AT_FORALL_LOWER_PRECISION_FP(SIM_ADD)
#undef SIM_ADD
#define SIM_ADD(...) add<To::kFloat>(m, SIM_NAMES(__VA_ARGS__));
  AT_FORALL_FP32(SIM_ADD)
#undef SIM_ADD
#define SIM_ADD(...) add<To::kFloatResult>(m, SIM_NAMES(__VA_ARGS__));
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_ADD)
#undef SIM_ADD
#define SIM_ADD(...) add<To::kWidest>(m, SIM_NAMES(__VA_ARGS__));
  AT_FORALL_PROMOTE(SIM_ADD)
#undef SIM_ADD
}

}  // namespace
}  // namespace sim
