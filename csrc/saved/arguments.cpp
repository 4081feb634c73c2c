#include "arguments.h"

#include "kept.h"

namespace memopt::saved {

Arguments::Arguments(const std::vector<ArgumentTensor>& tensors, Fate* fate) {
  held_.reserve(tensors.size());
  for (const auto& [tensor, may_leave_device] : tensors) {
    Held held{Version(tensor), {}, {}};
    if (tensor.is_inference()) {  // autograd does not save these
      held.handle = c10::make_intrusive<Kept>(tensor);
    } else if (fate != nullptr && may_leave_device) {
      held.handle = fate->take(tensor);
    }
    if (!held.handle.defined())
      held.saved = torch::autograd::SavedVariable(tensor, /*is_output=*/false);
    held_.push_back(std::move(held));
  }
}

std::vector<at::Tensor> Arguments::restore() const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(held_.size());
  for (const auto& held : held_) {
    tensors.push_back(held.handle.defined() ? held.handle->restore() : held.saved.unpack());
  }
  return tensors;
}

std::optional<Arguments::Written> Arguments::first_written() const {
  for (size_t number = 0; number < held_.size(); ++number) {
    const auto& version = held_[number].version;
    if (version.moved()) return Written{number, version};
  }
  return std::nullopt;
}

}  // namespace memopt::saved
