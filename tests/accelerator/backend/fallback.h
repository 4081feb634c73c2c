// The boxed kernel of every operator that has none of its own on the device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <map>
#include <string>

namespace sim {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Of each operator, how often the host waited for it.
std::map<std::string, int64_t> synchronised_calls();

}  // namespace sim
