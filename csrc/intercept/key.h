// How calls of PyTorch's ops come here: by a dispatch key that no tensor has and that is on only
// while a thread wants it. Ops that have no kernel under the key fall through it, which costs them
// nothing.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace memopt::intercept {

// Above autograd and autocast, below the transforms of torch.func. It was made for torchdistx, a
// library that PyTorch 2.1 was the last to run with.
constexpr auto kInterceptKey = c10::DispatchKey::DeferredInit;

// While it lives this thread's calls come here.
class Intercept {
 public:
  Intercept();
  ~Intercept();
  Intercept(const Intercept&) = delete;
  Intercept& operator=(const Intercept&) = delete;
};

// The calls inside are PyTorch's, and so are those that they are composed of.
class PassOn {
  const c10::impl::ExcludeDispatchKeyGuard guard_{kInterceptKey};
};

// What is called below the key.
inline c10::DispatchKeySet below_intercept(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInterceptKey);
}

}  // namespace memopt::intercept
