// The buffers of a model on one device: the slab, and the requests of a step.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <vector>

#include "../offload/demand.h"
#include "arena.h"
#include "buffered.h"

namespace memopt::saved {

class DeviceBuffers {
 public:
  DeviceBuffers(c10::Device device, std::shared_ptr<TakenStorages> taken)
      : device_(device), taken_(std::move(taken)) {}

  // What one handle holds, and gives back with end().
  struct Claim {
    uint64_t step = 0;
    offload::Demand::Id id = 0;
    size_t bytes = 0;
    std::shared_ptr<Lease> lease;  // null: it found no room
  };
  Claim begin(const at::Tensor& bytes);
  // The lease, if there was one, is given up before.
  void end(const Claim& claim, bool had_lease);

  // Something else held the storage when it was restored.
  void found_elsewhere(const StorageName& storage, size_t bytes);

  // Makes the slab for the step before, if that one wants another than there is; to be called
  // before begin(). `constant`: what needs no room; without it, whatever is still alive.
  void settle(const std::unordered_set<c10::StorageImpl*>* constant);
  void remove();

  BufferStats stats() const;
  const std::shared_ptr<TakenStorages>& taken() const { return taken_; }

 private:
  struct Step {
    uint64_t number = 0;
    offload::Demand demand{kArenaAlignment};
    std::vector<StorageName> storages;  // by id
    bool has_no_room = false;           // for something that was taken in it
  };

  void end_step();  // under the lock
  // The bytes of the slab that the step wants. Names in taken_ what it needs no room for.
  size_t wanted(const Step& step, const std::unordered_set<c10::StorageImpl*>* constant);

  const c10::Device device_;
  const std::shared_ptr<TakenStorages> taken_;
  mutable std::mutex mutex_;  // nothing is allocated or dropped under it
  bool is_removed_ = false;
  Step step_;
  size_t live_ = 0;            // claims, of all steps
  std::optional<Step> ended_;  // that the next slab is made for
  // Of the steps in a row that needed less than the slab has, the one that needed most.
  std::optional<Step> smaller_;
  size_t smaller_steps_ = 0;
  std::shared_ptr<Arena> arena_;
  size_t made_for_ = 0;        // the most bytes at one time of the step that the slab was made for
  size_t refused_ = SIZE_MAX;  // the device had no room for a slab of so many bytes
  BufferStats stats_;
};

}  // namespace memopt::saved
