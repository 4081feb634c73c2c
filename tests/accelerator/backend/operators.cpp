// Which operators the fallback is the kernel of.
#include <torch/library.h>

#include "control.h"
#include "fallback.h"

namespace sim {

namespace {

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Operators that are made of others where a device has no kernel of its own run the CPU's kernel if
// there is one: then bits agree. memopt's private operators are one kernel for all devices, which
// would follow the pointers.
bool needs_kernel(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  return name.rfind("memopt::_", 0) == 0 ||
         (name.rfind("aten::", 0) == 0 && op.hasKernelForDispatchKey(c10::DispatchKey::CPU));
}

}  // namespace

void cover_operators() {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op.has_value() || !op->hasSchema() || !needs_kernel(*op)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const size_t colons = name.name.find("::");
    std::string local = name.name.substr(colons + 2);
    if (!name.overload_name.empty()) local += "." + name.overload_name;
    static std::map<std::string, torch::Library*> libraries;
    auto& library = libraries[name.name.substr(0, colons)];
    if (library == nullptr) {
      library = new torch::Library(torch::Library::IMPL, name.name.substr(0, colons),
                                   c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    }
    library->impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace sim
