#include "context_state.h"

#include <ATen/autocast_mode.h>

#include <algorithm>

namespace memopt::saved {

namespace {

bool has_autocast(c10::DeviceType type) {
  const auto& known = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
  return std::find(known.begin(), known.end(), type) != known.end();
}

}  // namespace

Autocast Autocast::now(c10::DeviceType device_type) {
  return {device_type, at::autocast::is_autocast_enabled(device_type),
          at::autocast::get_autocast_dtype(device_type)};
}

void Autocast::set() const {
  at::autocast::set_autocast_enabled(device_type, enabled);
  at::autocast::set_autocast_dtype(device_type, dtype);
}

bool Autocast::operator==(const Autocast& other) const {
  return device_type == other.device_type && enabled == other.enabled && dtype == other.dtype;
}

ContextState ContextState::capture(const Devices& devices, bool random) {
  ContextState context;
  if (random) context.generators_ = Generators::capture(devices);
  context.autocast_.push_back(Autocast::now(c10::kCPU));
  for (const auto& device : devices) {
    const auto is_same = [&](const Autocast& a) { return a.device_type == device.type(); };
    if (has_autocast(device.type()) &&
        std::none_of(context.autocast_.begin(), context.autocast_.end(), is_same)) {
      context.autocast_.push_back(Autocast::now(device.type()));
    }
  }
  context.autocast_cache_ = at::autocast::is_autocast_cache_enabled();
  context.default_dtype_ = c10::get_default_dtype();
  return context;
}

bool ContextState::is_unchanged() {
  if (generators_.has_value()) {
    generators_->forget_unmoved();
    if (!generators_->is_empty()) return false;
  }
  const auto is_now = [](const Autocast& then) { return then == Autocast::now(then.device_type); };
  return std::all_of(autocast_.begin(), autocast_.end(), is_now) &&
         default_dtype_ == c10::get_default_dtype();
}

ContextStateGuard::ContextStateGuard(const ContextState& then)
    : autocast_cache_before_(at::autocast::is_autocast_cache_enabled()),
      default_dtype_before_(c10::get_default_dtype()) {
  if (then.generators_.has_value()) generators_.emplace(*then.generators_);
  for (const auto& state : then.autocast_) {
    autocast_before_.push_back(Autocast::now(state.device_type));
    if (!(state == autocast_before_.back())) state.set();
  }
  at::autocast::set_autocast_cache_enabled(then.autocast_cache_);
  // Weights cast in the recompute are cached until the outermost scope ends, as torch.autocast
  // does.
  at::autocast::increment_nesting();
  // All threads share the default dtype: it is written only where it has changed since.
  if (then.default_dtype_ != default_dtype_before_) c10::set_default_dtype(then.default_dtype_);
}

ContextStateGuard::~ContextStateGuard() {
  if (c10::get_default_dtype() != default_dtype_before_) {
    c10::set_default_dtype(default_dtype_before_);
  }
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_cache_enabled(autocast_cache_before_);
  for (const auto& state : autocast_before_) state.set();
}

}  // namespace memopt::saved
