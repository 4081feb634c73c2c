// The state that a result depends on besides arguments: random generators, autocast, the default
// dtype.
//
// A region takes a snapshot when its forward begins and replays it around the recompute. (The
// default device is Python's own; python/call.cpp replays it.)
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>

#include <optional>

#include "generators.h"

namespace memopt::saved {

struct Autocast {
  c10::DeviceType device_type;
  bool enabled;
  at::ScalarType dtype;

  static Autocast now(c10::DeviceType device_type);
  void set() const;
  bool operator==(const Autocast& other) const;
};

class ContextState {
 public:
  // For the CPU and `devices`; with `random`, of their generators too.
  static ContextState capture(const Devices& devices, bool random);

  // To be called when forward has ended.
  void forward_ended() {
    if (generators_.has_value()) generators_->forget_unmoved();
  }

  // Whether all is now as it was then. To be asked once.
  bool is_unchanged();

 private:
  friend class ContextStateGuard;
  std::optional<Generators> generators_;
  c10::SmallVector<Autocast, 2> autocast_;
  bool autocast_cache_ = true;
  caffe2::TypeMeta default_dtype_;
};

// Runs a scope in the state of a snapshot; afterwards everything is as it was before the scope.
class ContextStateGuard {
 public:
  explicit ContextStateGuard(const ContextState& then);
  ~ContextStateGuard();
  ContextStateGuard(const ContextStateGuard&) = delete;
  ContextStateGuard& operator=(const ContextStateGuard&) = delete;

 private:
  std::optional<GeneratorsGuard> generators_;
  c10::SmallVector<Autocast, 2> autocast_before_;
  bool autocast_cache_before_;
  caffe2::TypeMeta default_dtype_before_;
};

}  // namespace memopt::saved
