#include "declare.h"

#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <optional>
#include <utility>

namespace memopt::ops {
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

std::vector<std::string>& declared_private_ops() {
  static std::vector<std::string> names;
  return names;
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

const std::vector<std::string>& private_ops() {
  return declared_private_ops();
}

bool declare_private(const char* schema, const Tags& tags, torch::CppFunction function) {
  std::vector<Kernel> kernels;
  kernels.push_back({c10::DispatchKey::CompositeExplicitAutograd, std::move(function)});
  declared_private_ops().emplace_back(declare(schema, tags, std::move(kernels)));
  return true;
}

}  // namespace memopt::ops
