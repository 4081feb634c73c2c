#include "cell.h"

#include <ATen/ops/as_strided.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <utility>

#include "untracked.h"

namespace memopt::saved {

namespace {

// What torch::autograd::get_current_graph_task_id() returns outside backward.
constexpr int64_t kNoBackward = -1;

std::atomic<int64_t> live_cells{0};

std::optional<c10::Stream> current_stream(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

}  // namespace

Geometry Geometry::of(const at::Tensor& tensor) {
  Geometry geometry;
  geometry.dtype = tensor.scalar_type();
  geometry.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  geometry.strides.assign(tensor.strides().begin(), tensor.strides().end());
  geometry.offset = tensor.storage_offset();
  return geometry;
}

bool Geometry::operator==(const Geometry& other) const {
  return dtype == other.dtype && sizes == other.sizes && strides == other.strides &&
         offset == other.offset;
}

Cell::Cell() {
  ++live_cells;
}

Cell::~Cell() {
  release_resources();
}

void Cell::release_resources() {
  if (std::exchange(released_, true)) return;
  made_.reset();
  --live_cells;
}

int64_t Cell::live() {
  return live_cells;
}

void Cell::add_use() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++uses_;
}

at::Tensor Cell::drop_if_taken_by_all() {
  if (!made_.has_value() || taken_ < uses_) return {};
  at::Tensor dropped = std::move(made_->tensor);
  made_.reset();
  return dropped;
}

void Cell::remove_use(const Use& use) {
  at::Tensor dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  --uses_;
  if (made_.has_value() && use.taken_in_ == made_->task) --taken_;
  dropped = drop_if_taken_by_all();
}

void Cell::forget(int64_t task) {
  at::Tensor dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!made_.has_value() || made_->task != task) return;
  dropped = std::move(made_->tensor);
  made_.reset();
}

at::Tensor Cell::take(Use& use) {
  if (is_at_hand()) return make();
  const int64_t task = torch::autograd::get_current_graph_task_id();
  at::Tensor dropped;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (made_.has_value() && made_->task == task &&
        made_->stream == current_stream(made_->tensor)) {
      at::Tensor tensor = made_->tensor;
      if (use.taken_in_ != task) ++taken_;
      use.taken_in_ = task;
      dropped = drop_if_taken_by_all();
      return tensor;
    }
  }
  at::Tensor tensor = make();
  if (task == kNoBackward) return tensor;
  const std::lock_guard<std::mutex> lock(mutex_);
  // A Use that takes it a second time, or after the others, has nobody to share it with.
  if (use.taken_in_ == task || uses_ == 1 || (made_.has_value() && made_->task == task))
    return tensor;
  if (made_.has_value()) dropped = std::move(made_->tensor);  // a backward that raised, or another
  made_ = Made{task, current_stream(tensor), tensor};
  taken_ = 1;
  use.taken_in_ = task;
  // Backward may end without asking every consumer (inputs=), and the graph may live on.
  auto self =
      c10::weak_intrusive_ptr<Cell>(c10::intrusive_ptr<Cell>::unsafe_reclaim_from_nonowning(this));
  torch::autograd::Engine::get_default_engine().queue_callback([self, task]() {
    if (auto cell = self.lock(); cell.defined()) cell->forget(task);
  });
  return tensor;
}

at::Tensor Use::take() {
  const at::Tensor tensor = cell_->take(*this);
  if (!view_.has_value() || Geometry::of(tensor) == *view_) return tensor;
  const Untracked untracked;
  return tensor.as_strided(view_->sizes, view_->strides, view_->offset);
}

void Use::release() {
  if (!cell_.defined()) return;
  cell_->remove_use(*this);
  cell_.reset();
}

}  // namespace memopt::saved
