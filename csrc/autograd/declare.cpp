#include "declare.h"

namespace memopt::autograd {

uint64_t positions(const char* op, const std::vector<std::string>& names) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op, "");
  uint64_t found = 0;
  for (const std::string& name : names) {
    const auto position = handle.schema().argumentIndexWithName(name);
    TORCH_INTERNAL_ASSERT(position.has_value(), op, " has no argument ", name);
    found |= uint64_t{1} << *position;
  }
  return found;
}

namespace autocast {

void promote(const Tensor& tensor, bool is_parameter, std::optional<at::ScalarType>* dtype) {
  if (is_parameter || !tensor.defined() || !tensor.is_floating_point()) return;
  const at::ScalarType own = tensor.scalar_type();
  *dtype = dtype->has_value() ? c10::promoteTypes(**dtype, own) : own;
}

Tensor cast(const Tensor& tensor, const Target& target, bool is_parameter) {
  if (!tensor.defined()) return tensor;
  at::ScalarType dtype = target.dtype;
  if (is_parameter) {
    if (tensor.scalar_type() == at::kFloat) return tensor;
    // Of another 16-bit type than the input: float32 holds both exactly.
    if (target.to == AutocastTo::kWidest && tensor.scalar_type() != dtype) dtype = at::kFloat;
  }
  return at::autocast::cached_cast(dtype, tensor, target.device);
}

OptionalTensor cast(const OptionalTensor& tensor, const Target& target, bool is_parameter) {
  return tensor.has_value() ? OptionalTensor(cast(*tensor, target, is_parameter)) : tensor;
}

std::vector<Tensor> cast(at::TensorList tensors, const Target& target, bool is_parameter) {
  std::vector<Tensor> all;
  for (const Tensor& tensor : tensors) all.push_back(cast(tensor, target, is_parameter));
  return all;
}

c10::List<OptionalTensor> cast(const c10::List<OptionalTensor>& tensors, const Target& target,
                               bool is_parameter) {
  c10::List<OptionalTensor> all;
  for (const auto& entry : tensors) {
    all.push_back(cast(static_cast<OptionalTensor>(entry), target, is_parameter));
  }
  return all;
}

}  // namespace autocast
}  // namespace memopt::autograd
