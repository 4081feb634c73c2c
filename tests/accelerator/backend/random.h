// The CPU's kernel of an operator, ready to run on a stream's thread.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <vector>

namespace sim {

using Kernel = std::function<torch::jit::Stack()>;

// on_stream: `arguments` on the hidden mapping. An operator that draws random numbers draws them as
// a function of the seed and the offset of the device's generator, which moves on now, on the host.
Kernel kernel_for(const c10::OperatorHandle& op, const c10::FunctionSchema& schema,
                  const std::vector<c10::IValue>& arguments, std::vector<c10::IValue> on_stream,
                  c10::Device device);

}  // namespace sim
