#include "region.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>

#include "flags.h"
#include "recompute.h"

namespace memopt::saved {

namespace {

// What torch::autograd::get_current_graph_task_id() returns outside backward.
constexpr int64_t kNoBackward = -1;

std::atomic<int64_t> live_regions{0};

// The running backward, or the torch.utils.checkpoint.GraphExecGroup that several share.
struct Task {
  int64_t id;
  bool is_group;

  static Task current() {
    const auto& group = c10::AutogradState::get_tls_state().get_graph_exec_group();
    if (group.has_value()) {
      auto* object = group->ptr(&group->pyinterpreter());
      return {static_cast<int64_t>(reinterpret_cast<intptr_t>(object)), true};
    }
    return {torch::autograd::get_current_graph_task_id(), false};
  }
};

Devices devices_of(const std::vector<ArgumentTensor>& tensors) {
  Devices devices;
  for (const auto& argument : tensors) {
    const auto device = argument.tensor.device();
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  return devices;
}

}  // namespace

Region::Region(std::unique_ptr<Function> function, const std::vector<ArgumentTensor>& tensors,
               RegionOptions options)
    : options_(options),
      function_(std::move(function)),
      arguments_(tensors, options.offload_to_cpu),
      ambient_(Ambient::capture(devices_of(tensors), options.preserve_rng_state)) {
  ++live_regions;
}

Region::~Region() {
  release_resources();
}

void Region::release_resources() {
  if (function_ == nullptr) return;  // the second time
  arguments_ = Arguments({}, false);
  function_.reset();
  --live_regions;
}

int64_t Region::live() {
  return live_regions;
}

c10::intrusive_ptr<Handle> Region::pack(const at::Tensor& tensor) {
  auto metadata = Metadata::of(tensor);
  const std::lock_guard<std::mutex> lock(slots_mutex_);
  auto slot = c10::make_intrusive<Slot>(
      c10::intrusive_ptr<Region>::unsafe_reclaim_from_nonowning(this), slots_.size());
  slots_.emplace_back(slot);
  metadata_.push_back(std::move(metadata));
  return slot;
}

void Region::forward_ended() {
  ambient_.forward_ended();
  forward_ended_ = true;
}

at::Tensor Region::fill(Slot& slot) {
  const auto task = Task::current();
  const std::lock_guard<std::recursive_mutex> lock(recompute_mutex_);
  auto rebuilt = slot.take(task.id);
  if (!rebuilt.has_value()) {
    recompute(task.id, wanted(task.id, slot));
    rebuilt = slot.take(task.id);
  }
  const auto& version = rebuilt->version;
  TORCH_CHECK(!version.moved(), "checkpoint: tensor ", slot.index(), " saved in region ",
              function_->name(), " must not be written in place after it is saved, got ",
              Metadata::of(rebuilt->tensor).text(), " at version ", version.now(),
              "; it was saved at version ", version.then());
  return std::move(rebuilt->tensor);
}

// The slots, by index, to fill in the recompute that `slot` asks for.
std::vector<c10::intrusive_ptr<Slot>> Region::wanted(int64_t task, Slot& slot) {
  auto slots = live_slots();
  if (task == kNoBackward || !recomputed_in_.insert(task).second) {
    // Someone looks at a node's saved tensors, or a node reads its own a second time.
    for (size_t index = 0; index < slots.size(); ++index) {
      if (index != slot.index()) slots[index].reset();
    }
  } else if (!Task::current().is_group) {
    // Backward may end without opening every slot (inputs=), and the graph may live on.
    auto self = c10::weak_intrusive_ptr<Region>(
        c10::intrusive_ptr<Region>::unsafe_reclaim_from_nonowning(this));
    torch::autograd::Engine::get_default_engine().queue_callback([self, task]() {
      if (auto region = self.lock(); region.defined()) region->forget(task);
    });
  }
  return slots;
}

std::vector<c10::intrusive_ptr<Slot>> Region::live_slots() {
  const std::lock_guard<std::mutex> lock(slots_mutex_);
  std::vector<c10::intrusive_ptr<Slot>> slots;
  slots.reserve(slots_.size());
  for (const auto& slot : slots_) slots.push_back(slot.lock());
  return slots;
}

void Region::forget(int64_t task) {
  const std::lock_guard<std::recursive_mutex> lock(recompute_mutex_);
  recomputed_in_.erase(task);
  for (const auto& slot : live_slots()) {
    if (slot.defined()) slot->take(task);
  }
}

void Region::recompute(int64_t task, std::vector<c10::intrusive_ptr<Slot>> wanted) {
  check_arguments_unwritten();
  const auto tensors = arguments_.restore();
  const auto recompute = c10::make_intrusive<Recompute>(*this, task, std::move(wanted));
  try {
    const AmbientGuard ambient(ambient_);
    const FlagsGuard flags({/*checkpointing=*/false, /*recomputing=*/true, /*disabled=*/false});
    const at::AutoGradMode grad_mode(true);
    function_->run(tensors, recompute);
    recompute->check_ended();
  } catch (...) {
    forget(task);
    throw;
  }
}

void Region::check_arguments_unwritten() const {
  if (const auto written = arguments_.first_written()) {
    TORCH_CHECK(
        false, "checkpoint: ", function_->argument_name(written->number), " of region ",
        function_->name(),
        " must not be written in place before backward has used it, got a tensor at version ",
        written->version.now(), "; forward was called with version ", written->version.then());
  }
}

}  // namespace memopt::saved
