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
namespace {

Tensor cast(const Tensor& tensor, c10::DeviceType device) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}

}  // namespace

Tensor cast(const Tensor& tensor, c10::DeviceType device, bool is_parameter) {
  const bool stays = !tensor.defined() || (is_parameter && tensor.scalar_type() == at::kFloat);
  return stays ? tensor : cast(tensor, device);
}

OptionalTensor cast(const OptionalTensor& tensor, c10::DeviceType device, bool is_parameter) {
  return tensor.has_value() ? OptionalTensor(cast(*tensor, device, is_parameter)) : tensor;
}

std::vector<Tensor> cast(at::TensorList tensors, c10::DeviceType device, bool is_parameter) {
  std::vector<Tensor> all;
  for (const Tensor& tensor : tensors) all.push_back(cast(tensor, device, is_parameter));
  return all;
}

c10::List<OptionalTensor> cast(const c10::List<OptionalTensor>& tensors, c10::DeviceType device,
                               bool is_parameter) {
  c10::List<OptionalTensor> all;
  for (const auto& entry : tensors) {
    all.push_back(cast(static_cast<OptionalTensor>(entry), device, is_parameter));
  }
  return all;
}

}  // namespace autocast
}  // namespace memopt::autograd
