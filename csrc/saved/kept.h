// The first fate: the handle holds the tensor itself.
#pragma once

#include "detached.h"
#include "fate.h"
#include "geometry.h"
#include "version.h"

namespace memopt::saved {

class Kept : public Handle {
 public:
  explicit Kept(at::Tensor tensor)
      : tensor_(std::move(tensor)), version_(tensor_), storage_(storage_of(tensor_)) {}

  // Runs when the last reader goes; weak references may stay longer.
  void release_resources() override { tensor_.reset(); }

  at::Tensor restore() override {
    version_.check_unwritten();
    return tensor_;
  }

  bool is_at_hand() const override { return true; }

  // Sharding frees a parameter's memory, or exchanges its data.
  bool is_there() const override {
    return storage_of(tensor_) == storage_ && (storage_ == nullptr || has_memory(tensor_));
  }

 private:
  static const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  }

  at::Tensor tensor_;
  Version version_;
  const c10::StorageImpl* storage_;  // when it was saved; only compared
};

inline c10::intrusive_ptr<Handle> keep(const at::Tensor& tensor) {
  return c10::make_intrusive<Kept>(detached(tensor));
}

class Keep : public Fate {
 public:
  c10::intrusive_ptr<Handle> take(const at::Tensor& tensor) override { return keep(tensor); }
};

}  // namespace memopt::saved
