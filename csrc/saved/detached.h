// A tensor without its history, for the graph to hold. PyTorch gives default hooks the tensor
// itself; if that is a node's own output, the node would hold itself.
//
// A leaf has no history: the graph holds the very tensor, as it does without hooks, so that it
// keeps no memory of a parameter whose data is exchanged between forward and backward (sharding by
// DeepSpeed's ZeRO).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace memopt::saved {

// Shares memory and version counter with `tensor`. A mode that is watching operators must not see
// this; only a subclass, which makes its own copy, is asked through the dispatcher.
inline at::Tensor detached(const at::Tensor& tensor) {
  if (tensor.is_leaf()) return tensor;
  const auto* impl = tensor.unsafeGetTensorImpl();
  std::optional<c10::impl::ExcludeDispatchKeyGuard> unseen;
  if (!impl->key_set().has(c10::DispatchKey::Python)) unseen.emplace(c10::DispatchKey::Python);
  return at::Tensor(impl->shallow_copy_and_detach(
      /*version_counter=*/impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

}  // namespace memopt::saved
