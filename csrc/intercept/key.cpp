#include "key.h"

#include <torch/library.h>

namespace memopt::intercept {

namespace {

// `step`: how many more of this thread's objects want the key.
void count(int step) {
  thread_local int wanted = 0;
  wanted += step;
  c10::impl::tls_set_dispatch_key_included(kInterceptKey, wanted > 0);
}

}  // namespace

Intercept::Intercept() {
  count(+1);
}

Intercept::~Intercept() {
  count(-1);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace memopt::intercept
