#include "arguments.h"

#include "kept.h"

namespace memopt::saved {

Arguments::Arguments(const std::vector<ArgumentTensor>& tensors, Fate* fate) {
  held_.reserve(tensors.size());
  for (const auto& [tensor, may_leave_device] : tensors) {
    Held held{Version(tensor), {}, {}, tensor.requires_grad()};
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
    if (!held.handle.defined()) {
      tensors.push_back(held.saved.unpack());
      continue;
    }
    auto tensor = held.handle->restore();
    // Where a fate gave another tensor back, that one has no history, and is this region's own.
    if (tensor.requires_grad() != held.requires_grad) {
      auto* impl = tensor.unsafeGetTensorImpl();
      tensor = at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                        /*allow_tensor_metadata_change=*/false));
      tensor.set_requires_grad(held.requires_grad);
    }
    tensors.push_back(std::move(tensor));
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
