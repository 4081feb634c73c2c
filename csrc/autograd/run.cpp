#include "run.h"

namespace memopt::autograd {

bool needs_node(const char* op, at::TensorList tensors) {
  const bool grad = at::GradMode::is_enabled();
  bool needed = false;
  for (const Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor._fw_grad(/*level=*/0).defined(), op,
                                ": forward-mode differentiation (jvp) is not supported; use "
                                "backward, or torch.nn.functional's op");
    needed = needed || (grad && tensor.requires_grad());
  }
  return needed;
}

}  // namespace memopt::autograd
