#include "declare.h"

#include <torch/csrc/jit/frontend/function_schema_parser.h>

namespace memopt::autograd {
namespace {

std::string on_one_line(const char* text) {
  std::string line;
  bool space = false;
  for (; *text != '\0'; ++text) {
    if (*text == ' ' || *text == '\n') {
      space = true;
      continue;
    }
    if (space) line += ' ';
    space = false;
    line += *text;
  }
  return line;
}

// A registration lasts as long as its library object: for ever.
torch::Library& library(torch::Library::Kind kind, std::optional<c10::DispatchKey> key) {
  return *new torch::Library(kind, "memopt", key, __FILE__, __LINE__);
}

}  // namespace

const char* declare(const char* schema, const Tags& tags, std::vector<Kernel> kernels) {
  auto parsed = torch::jit::parseSchema(on_one_line(schema));
  const std::string name = parsed.name();
  library(torch::Library::FRAGMENT, std::nullopt).def(std::move(parsed), tags);
  for (Kernel& kernel : kernels) {
    library(torch::Library::IMPL, kernel.key).impl(name.c_str(), std::move(kernel.function));
  }
  return (new std::string("memopt::" + name))->c_str();
}

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
