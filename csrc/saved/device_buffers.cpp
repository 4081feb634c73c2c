#include "device_buffers.h"

#include <utility>

namespace memopt::saved {

namespace {

// So many steps in a row must need less than the slab has, before there is a smaller one: the last
// batch of an epoch is often smaller than the others.
constexpr size_t kStepsBeforeLess = 16;

// There are loops in which some graph is always alive (a forward before the backward of the step
// before, several threads). A step counts as ended when so many times what it held at one time has
// come, and not a few.
constexpr size_t kTurns = 4;
constexpr size_t kLeastTaken = 64;

}  // namespace

DeviceBuffers::Claim DeviceBuffers::begin(const at::Tensor& bytes) {
  const auto size = static_cast<size_t>(bytes.numel());
  Claim claim;
  std::shared_ptr<Arena> arena;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    claim = {step_.number, step_.demand.begin(size), size, nullptr};
    step_.storages.push_back(name_of_storage(bytes));
    ++live_;
    stats_.kept_bytes += size;
    arena = arena_;
  }
  try {
    if (arena != nullptr) claim.lease = arena->copy(bytes);
  } catch (...) {
    end(claim, /*had_lease=*/false);
    throw;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (claim.lease != nullptr) {
    stats_.kept_bytes -= size;
    ++stats_.copies;
    stats_.copied_bytes += size;
    return claim;
  }
  step_.has_no_room = true;
  if (arena != nullptr) {
    ++stats_.fallbacks;
    stats_.fallback_bytes += size;
  }
  return claim;
}

void DeviceBuffers::end(const Claim& claim, bool had_lease) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (claim.step == step_.number) step_.demand.end(claim.id);
  if (!had_lease) stats_.kept_bytes -= claim.bytes;
  --live_;
  const auto& demand = step_.demand;
  const bool has_turned =
      demand.begun() >= kLeastTaken && demand.begun() >= kTurns * demand.most_held();
  if (live_ == 0 || has_turned) end_step();
}

void DeviceBuffers::end_step() {
  if (step_.demand.begun() == 0) return;
  ++stats_.steps;
  const uint64_t next = step_.number + 1;
  const bool is_smaller = !step_.has_no_room && step_.demand.most() < made_for_;
  if (step_.has_no_room) {
    ended_ = std::move(step_);
  } else if (is_smaller) {
    if (!smaller_.has_value() || smaller_->demand.most() <= step_.demand.most()) {
      smaller_ = std::move(step_);
    }
    if (++smaller_steps_ == kStepsBeforeLess) ended_ = std::move(smaller_);
  }
  if (!is_smaller || smaller_steps_ == kStepsBeforeLess) {
    smaller_.reset();
    smaller_steps_ = 0;
  }
  step_ = Step{};
  step_.number = next;
}

size_t DeviceBuffers::wanted(const Step& step,
                             const std::unordered_set<c10::StorageImpl*>* constant) {
  std::vector<bool> is_held;
  is_held.reserve(step.storages.size());
  for (const auto& storage : step.storages) {
    is_held.push_back(constant == nullptr ? !storage.expired()
                                          : constant->contains(storage._unsafe_get_target()));
    if (is_held.back()) taken_->remember_held(storage);
  }
  return step.demand.slab_bytes([&](offload::Demand::Id id) { return !is_held[id]; });
}

void DeviceBuffers::settle(const std::unordered_set<c10::StorageImpl*>* constant) {
  std::optional<Step> ended;
  std::shared_ptr<Arena> before;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!ended_.has_value()) return;
    ended = std::exchange(ended_, std::nullopt);
  }
  const size_t bytes = wanted(*ended, constant);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t size = arena_ == nullptr ? 0 : arena_->size();
    if (is_removed_ || bytes >= refused_) return;
    if (ended->has_no_room && bytes <= size) return;  // a user keeps what a recompute was given
    made_for_ = ended->demand.most();
    if (bytes == size) return;
    if (size != 0) ++stats_.relearned;
    before = std::move(arena_);
  }
  before.reset();  // first, as there may not be room for both
  std::shared_ptr<Arena> made;
  try {
    if (bytes != 0) made = std::make_shared<Arena>(device_, bytes);
  } catch (const c10::Error&) {
    TORCH_WARN("checkpoint.buffers: ", device_, " has no space for one piece of ", bytes,
               " bytes: the inputs of regions are kept as they are");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (made == nullptr && bytes != 0) refused_ = bytes;
  if (!is_removed_) arena_ = std::move(made);
}

void DeviceBuffers::found_elsewhere(const StorageName& storage, size_t bytes) {
  taken_->remember_held(storage);
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.found_elsewhere_bytes += bytes;
}

void DeviceBuffers::remove() {
  std::shared_ptr<Arena> arena;
  const std::lock_guard<std::mutex> lock(mutex_);
  is_removed_ = true;
  ended_.reset();
  arena = std::move(arena_);
}

BufferStats DeviceBuffers::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto stats = stats_;
  if (arena_ == nullptr) return stats;
  stats.slab_bytes = arena_->size();
  stats.in_use = arena_->in_use();
  stats.high_water = arena_->high_water();
  return stats;
}

}  // namespace memopt::saved
