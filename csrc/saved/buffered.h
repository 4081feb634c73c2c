// A fate of regions' arguments: a copy in a slab that is allocated once and used again in every
// step. The device's allocator then sees none of the memory that lives from forward to backward,
// and nothing lies between what comes and goes.
//
// The first step keeps the tensors, and learns in which order they come and go
// (offload/demand.h). Then the slab is made, with the least bytes that hold them. A tensor that
// finds no space, in a step that differs, is kept as usual; the next step has a slab for it. A
// step ends when no graph holds anything of it any more. (Or, where some graph is always alive,
// when all has come and gone some times.)
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "once_per_storage.h"

namespace memopt::saved {

struct BufferStats {
  size_t slab_bytes = 0;
  size_t in_use = 0;
  size_t high_water = 0;  // the most in use at one time, of this slab
  size_t kept_bytes = 0;  // now, of tensors that found no room, or came before there was a slab
  size_t steps = 0;
  size_t copies = 0;
  size_t copied_bytes = 0;
  size_t fallbacks = 0;              // tensors that found no room in a slab
  size_t fallback_bytes = 0;         // of them
  size_t relearned = 0;              // slabs after the first
  size_t found_elsewhere_bytes = 0;  // copied in vain: something else held them as well
};

class DeviceBuffers;

// The slabs of one model's regions, one for each device that their arguments are on, of all dtypes.
// Thread-safe.
class Buffers : public std::enable_shared_from_this<Buffers> {
 public:
  c10::intrusive_ptr<Fate> fate(OncePerStorage::IsHeld is_held);

  std::vector<std::pair<c10::Device, BufferStats>> stats() const;

  // Makes slabs for the step that has been run, without waiting for the next one. What is among
  // `constant` is held anyway, and needs no room.
  void settle(const std::vector<at::Tensor>& constant);

  // Gives the memory back, as soon as no graph needs it; from now on nothing is taken.
  void remove();

 private:
  friend class CopyToSlab;
  // Null after remove().
  std::shared_ptr<DeviceBuffers> of(c10::Device device);
  std::vector<std::pair<c10::Device, std::shared_ptr<DeviceBuffers>>> all() const;

  const std::shared_ptr<TakenStorages> taken_ = std::make_shared<TakenStorages>();
  mutable std::mutex mutex_;
  bool is_removed_ = false;
  std::unordered_map<c10::Device, std::shared_ptr<DeviceBuffers>> devices_;
};

}  // namespace memopt::saved
