// The current state of this thread: the stream of a device, and the backward that runs.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>
#include <optional>

namespace memopt::saved {

// What torch::autograd::get_current_graph_task_id() returns outside backward.
inline constexpr int64_t kNoBackward = -1;

// Empty for the CPU, which has no streams.
inline std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace memopt::saved
