#include "handle_hooks.h"

#include <memory>

namespace memopt::saved {

using torch::autograd::SavedVariable;

at::Tensor tensor_for_hooks(const SavedVariable& saved) {
  auto raw = saved.get_raw_data();
  const bool hooks_get_it =
      raw.has_value() && raw->defined() && !raw->unsafeGetTensorImpl()->is_wrapped_number();
  return hooks_get_it ? std::move(*raw) : at::Tensor();
}

void put_in_place(SavedVariable& saved, c10::intrusive_ptr<Handle> handle) {
  saved.register_hooks(std::make_unique<HandleHooks>(std::move(handle), &saved));
}

bool Packer::pack_saved(const autograd::NodePointer&, SavedVariable& saved) {
  const auto tensor = tensor_for_hooks(saved);
  if (!tensor.defined()) return false;
  put_in_place(saved, pack(tensor));
  return true;
}

}  // namespace memopt::saved
