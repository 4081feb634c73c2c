#include "shared.h"

#include <torch/csrc/autograd/engine.h>

#include "current.h"

namespace memopt::saved {

void SharedTensor::release_resources() {
  restored_.reset();
  source_.reset();
}

void SharedTensor::add_reader() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++readers_;
}

at::Tensor SharedTensor::drop_if_read_by_all() {
  if (!restored_.has_value() || have_read_ < readers_) return {};
  at::Tensor dropped = std::move(restored_->tensor);
  restored_.reset();
  return dropped;
}

void SharedTensor::remove_reader(const Reader& reader) {
  at::Tensor dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  --readers_;
  const bool passed = reader.passed_in_ != -1 && reader.passed_in_ == passed_in_;
  if (passed) --passed_by_;
  if (restored_.has_value() &&
      (reader.read_in_ == restored_->task || reader.passed_in_ == restored_->task)) {
    --have_read_;
  }
  dropped = drop_if_read_by_all();
}

void SharedTensor::forget(int64_t task) {
  at::Tensor dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!restored_.has_value() || restored_->task != task) return;
  dropped = std::move(restored_->tensor);
  restored_.reset();
}

at::Tensor SharedTensor::restore_for(Reader& reader) {
  const int64_t task = torch::autograd::get_current_graph_task_id();
  at::Tensor dropped;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (restored_.has_value() && restored_->task == task &&
        restored_->stream == current_stream(restored_->tensor.device())) {
      at::Tensor tensor = restored_->tensor;
      if (reader.read_in_ != task) ++have_read_;
      reader.read_in_ = task;
      dropped = drop_if_read_by_all();
      return tensor;
    }
  }
  at::Tensor tensor = restore();
  if (task == kNoBackward) return tensor;
  const std::lock_guard<std::mutex> lock(mutex_);
  // A reader that asks a second time, or after the others, has no one to share it with.
  if (reader.read_in_ == task || readers_ == 1 + passed_by(task) ||
      (restored_.has_value() && restored_->task == task)) {
    return tensor;
  }
  // What is left from a backward that raised, or from another one.
  if (restored_.has_value()) dropped = std::move(restored_->tensor);
  restored_ = Restored{task, current_stream(tensor.device()), tensor};
  have_read_ = 1 + passed_by(task);
  reader.read_in_ = task;
  // Backward may end without asking every consumer (inputs=), and the graph may live on.
  auto self = c10::weak_intrusive_ptr<SharedTensor>(
      c10::intrusive_ptr<SharedTensor>::unsafe_reclaim_from_nonowning(this));
  torch::autograd::Engine::get_default_engine().queue_callback([self, task]() {
    if (auto shared = self.lock(); shared.defined()) shared->forget(task);
  });
  return tensor;
}

bool SharedTensor::pass_by(Reader& reader) {
  const int64_t task = torch::autograd::get_current_graph_task_id();
  if (task == kNoBackward) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (restored_.has_value() && restored_->task == task) return false;
  if (reader.read_in_ == task || reader.passed_in_ == task) return true;
  if (passed_in_ != task) passed_by_ = 0;
  passed_in_ = reader.passed_in_ = task;
  ++passed_by_;
  return true;
}

at::Tensor Reader::restore() {
  const at::Tensor tensor = shared_->restore_for(*this);
  return view_.has_value() ? view_of_storage(tensor, *view_) : tensor;
}

at::Tensor Reader::gradient(const autograd::Behind& behind, const at::Tensor& grad) {
  const auto source = shared_->source();
  if (!source->has_gradient(view_, grad) || !pass_by()) return {};
  return source->gradient(behind, grad);
}

void Reader::release_resources() {
  if (!shared_.defined()) return;
  shared_->remove_reader(*this);
  shared_.reset();
}

}  // namespace memopt::saved
