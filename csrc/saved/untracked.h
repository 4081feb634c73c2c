// Around what is computed in backward to give back what forward saved: as forward ran it, outside
// whatever surrounds backward.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace memopt::saved {

// The modes of torch.vmap and torch.func that this thread is in. A backward may run inside one
// (autograd.grad with is_grads_batched); what is made again is what forward saved, outside.
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

}  // namespace memopt::saved
