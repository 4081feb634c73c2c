#include "region.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <string_view>

#include "current.h"
#include "flags.h"
#include "recompute.h"
#include "untracked.h"

namespace memopt::saved {

namespace {

std::atomic<int64_t> live_regions{0};

// Ends a recompute that was counted among the running ones, and tells those who wait for it.
class Running {
 public:
  Running(std::mutex& mutex, std::condition_variable& ended,
          std::unordered_map<int64_t, int>& running, int64_t task)
      : mutex_(mutex), ended_(ended), running_(running), task_(task) {}
  ~Running() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--running_[task_] == 0) running_.erase(task_);
    ended_.notify_all();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  std::mutex& mutex_;
  std::condition_variable& ended_;
  std::unordered_map<int64_t, int>& running_;
  int64_t task_;
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

// Whether its interpreter raised this: it does so where an exception passes through it, the one too
// that ends a recompute.
bool is_of_torchscript(const std::exception& error) {
  return std::string_view(error.what()).find("TorchScript interpreter") != std::string_view::npos;
}

}  // namespace

Region::Region(std::unique_ptr<Function> function, const std::vector<ArgumentTensor>& tensors,
               FateOfArguments* fate_of_arguments, RegionOptions options)
    : options_(options),
      function_(std::move(function)),
      arguments_(tensors, fate_of_arguments),
      context_state_(ContextState::capture(devices_of(tensors), options_.preserve_rng_state)) {
  ++live_regions;
}

Region::~Region() {
  release_resources();
}

void Region::release_resources() {
  if (function_ == nullptr) return;  // the second time
  arguments_ = Arguments({}, nullptr);
  function_.reset();
  --live_regions;
}

int64_t Region::live() {
  return live_regions;
}

Region::Task Region::Task::current() {
  const auto& group = c10::AutogradState::get_tls_state().get_graph_exec_group();
  if (!group.has_value()) return {torch::autograd::get_current_graph_task_id(), std::nullopt};
  auto* object = group->ptr(&group->pyinterpreter());
  return {static_cast<int64_t>(reinterpret_cast<intptr_t>(object)), *group};
}

c10::intrusive_ptr<Handle> Region::pack(const at::Tensor& tensor) {
  auto metadata = Metadata::of(tensor);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (slots_.empty()) {
    constexpr size_t kUsual = 32;  // what a transformer's block saves
    slots_.reserve(kUsual);
    metadata_.reserve(kUsual);
  }
  auto slot = c10::make_intrusive<Slot>(
      c10::intrusive_ptr<Region>::unsafe_reclaim_from_nonowning(this), slots_.size());
  slots_.emplace_back(slot);
  metadata_.push_back(std::move(metadata));
  return slot;
}

void Region::note_arguments(const void* op, Numbers numbers) {
  if (numbers.empty()) return;
  const bool are_arguments =
      std::all_of(numbers.begin(), numbers.end(), [](int8_t number) { return number >= 0; });
  const std::lock_guard<std::mutex> lock(mutex_);
  last_ = {are_arguments ? op : nullptr,
           op_calls_,
           slots_.size() - numbers.size(),
           {numbers.begin(), numbers.end()}};
}

bool Region::pack_arguments(const void*, OpArguments) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++op_calls_;
  return false;
}

void Region::forward_ended() {
  context_state_.forward_ended();
  forward_ended_ = true;
}

at::Tensor Region::fill(Slot& slot) {
  const auto task = Task::current();
  while (true) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (auto rebuilt = slot.take(task.id)) {
      lock.unlock();
      const auto& version = rebuilt->version;
      TORCH_CHECK(!version.moved(), "checkpoint: tensor ", slot.index(), " saved in region ",
                  function_->name(), " must not be written in place after it is saved, got ",
                  Metadata::of(rebuilt->tensor).text(), " at version ", version.now(),
                  "; it was saved at version ", version.then());
      return std::move(rebuilt->tensor);
    }
    if (running_.count(task.id) != 0 && !flags().recomputing) {
      ended_.wait(lock);
    } else {
      ++running_[task.id];
      lock.unlock();
      const Running running(mutex_, ended_, running_, task.id);
      recompute(task, wanted(task, slot));
    }
  }
}

Region::Slots Region::live_slots() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Slots slots;
  slots.reserve(slots_.size());
  for (const auto& slot : slots_) slots.push_back(slot.lock());
  return slots;
}

Region::Slots Region::wanted(const Task& task, const Slot& slot) {
  auto slots = live_slots();
  bool is_first = false;
  if (task.id != kNoBackward) {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_first = recomputed_in_.emplace(task.id, task.group).second;
  }
  if (!is_first) {
    // Someone looks at a node's saved tensors, or a node reads its own a second time.
    for (size_t index = 0; index < slots.size(); ++index) {
      if (index != slot.index()) slots[index].reset();
    }
  } else if (!task.group.has_value()) {
    // Backward may end without opening every slot (inputs=), and the graph may live on.
    auto self = c10::weak_intrusive_ptr<Region>(
        c10::intrusive_ptr<Region>::unsafe_reclaim_from_nonowning(this));
    torch::autograd::Engine::get_default_engine().queue_callback([self, id = task.id]() {
      if (auto region = self.lock(); region.defined()) region->forget(id);
    });
  }
  return slots;
}

void Region::put(Slot& slot, int64_t task, at::Tensor tensor) {
  std::optional<Slot::Rebuilt> before;  // dropped after the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  before = slot.put(task, std::move(tensor));
}

void Region::forget(int64_t task) {
  const auto slots = live_slots();
  std::vector<std::optional<Slot::Rebuilt>> dropped;  // after the lock
  dropped.reserve(slots.size());
  std::optional<c10::SafePyObject> group;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = recomputed_in_.find(task); found != recomputed_in_.end()) {
    group = found->second;
    recomputed_in_.erase(found);
  }
  for (const auto& slot : slots) {
    if (slot.defined()) dropped.push_back(slot->take(task));
  }
}

void Region::recompute(const Task& task, Slots wanted) {
  check_arguments_unwritten();
  const auto tensors = arguments_.restore();
  Recompute::Forward forward{options_, *function_, {}, {}, forward_ended_};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    forward.metadata = metadata_;
    forward.last = last_;
  }
  const auto recompute = c10::make_intrusive<Recompute>(
      std::move(forward), std::move(wanted),
      [this, id = task.id](Slot& slot, at::Tensor tensor) { put(slot, id, std::move(tensor)); });
  try {
    const ContextStateGuard context(context_state_);
    const FlagsGuard flags({/*checkpointing=*/false, /*recomputing=*/true, /*disabled=*/false});
    const at::AutoGradMode grad_mode(true);
    const c10::impl::ExcludeDispatchKeyGuard outside_transforms(active_transforms());
    try {
      function_->run(tensors, recompute);
    } catch (const std::exception& error) {
      if (!recompute->was_ended() || !is_of_torchscript(error)) throw;
    }
    recompute->check_ended();
  } catch (...) {
    forget(task.id);
    throw;
  }
}

void Region::check_arguments_unwritten() const {
  auto written = arguments_.first_written(/*hooks_copy=*/false);
  if (written && function_->hooks_copy_on_write())
    written = arguments_.first_written(/*hooks_copy=*/true);
  if (written) {
    TORCH_CHECK(
        false, "checkpoint: ", function_->argument_name(written->number), " of region ",
        function_->name(),
        " must not be written in place before backward has used it, got a tensor at version ",
        written->version.now(), "; forward was called with version ", written->version.then());
  }
}

}  // namespace memopt::saved
