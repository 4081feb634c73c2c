// The fourth fate: the storage leaves the device, and comes back before backward asks for it.
//
// When, and what waits for what, is the engine's business (offload/engine.h). Here is which
// storages go: those whose memory the device would get back.
#pragma once

#include <c10/core/DeviceType.h>

#include <atomic>
#include <optional>

#include "offload_target.h"

namespace memopt::saved {

struct OffloadOptions {
  std::string directory;    // empty: to host memory
  size_t min_bytes = 1024;  // a copy of less costs more time than its memory is worth
  // Of the bytes that are offered, what share goes: evenly, so that the link has an even load.
  double fraction = 1;
  size_t max_bytes = SIZE_MAX;  // away at one time, of this scope
  size_t keep_last = 0;         // how many of the storages that come last stay
};

// For the tensors of one scope.
c10::intrusive_ptr<Fate> offload_in_scope(const OffloadOptions& options,
                                          OncePerStorage::IsHeld is_held);

// For the arguments of regions, of all their calls.
c10::intrusive_ptr<Fate> offload_of_region(const std::string& directory,
                                           OncePerStorage::IsHeld is_held);

// Whether it is on a device whose memory a copy on the host would free.
bool is_on_accelerator(const at::Tensor& tensor);

// For tests on machines without an accelerator: take this device type for one. None: ask PyTorch.
void pretend_accelerator(std::optional<c10::DeviceType> type);

}  // namespace memopt::saved
