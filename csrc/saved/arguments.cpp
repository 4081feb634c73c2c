#include "arguments.h"

#include "host_copy.h"
#include "kept.h"

namespace memopt::saved {

Arguments::Arguments(const std::vector<ArgumentTensor>& tensors, bool offload_to_cpu) {
  kept_.reserve(tensors.size());
  for (const auto& [tensor, may_leave_device] : tensors) {
    Kept kept{Version(tensor), {}, {}};
    if (tensor.is_inference()) {  // autograd refuses to save these
      kept.handle = c10::make_intrusive<saved::Kept>(tensor);
    } else if (offload_to_cpu && may_leave_device && is_worth_a_host_copy(tensor)) {
      kept.handle = c10::make_intrusive<HostCopy>(tensor);
    } else {
      kept.saved = torch::autograd::SavedVariable(tensor, /*is_output=*/false);
    }
    kept_.push_back(std::move(kept));
  }
}

std::vector<at::Tensor> Arguments::restore() const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(kept_.size());
  for (const auto& kept : kept_) {
    tensors.push_back(kept.handle.defined() ? kept.handle->restore() : kept.saved.unpack());
  }
  return tensors;
}

std::optional<Arguments::Written> Arguments::first_written() const {
  for (size_t number = 0; number < kept_.size(); ++number) {
    const auto& version = kept_[number].version;
    if (version.moved()) return Written{number, version};
  }
  return std::nullopt;
}

}  // namespace memopt::saved
