// A guard for code that backward runs to give back what forward saved: it must compute as forward
// did, outside of the modes that surround backward.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace memopt::saved {

// The modes of torch.vmap and torch.func that this thread is in. A backward may run inside one
// (autograd.grad with is_grads_batched), but what is made again was saved outside of it.
inline c10::DispatchKeySet active_transforms() {
  const c10::DispatchKeySet transforms(
      {c10::DispatchKey::VmapMode, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::FuncTorchVmapMode});
  return c10::impl::tls_local_dispatch_key_set().included_ & transforms;
}

// No graph, no autocast, no transforms.
struct Untracked {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard outside_transforms{active_transforms()};
};

// For copies and allocations of the library's own: seen by nothing that watches operators, and the
// same in any mode.
struct Unseen {
  Untracked untracked;
  c10::InferenceMode no_inference{false};  // its tensors cannot be saved for backward
  c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace memopt::saved
