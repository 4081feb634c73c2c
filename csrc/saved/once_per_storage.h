// A decorator of fates: what the fate makes of a storage serves every tensor that is saved on it.
//
// So a tensor that several ops save, and views of one memory, are copied once. Like a kept view, a
// handle holds its whole storage.
//
// It leaves alone small tensors, and those whose memory is held anyway, so that nothing would be
// freed: leaves that require a gradient, and whatever `is_held` says.
#pragma once

#include <mutex>
#include <unordered_map>

#include "fate.h"
#include "geometry.h"
#include "shared.h"
#include "version.h"

namespace memopt::saved {

class OncePerStorage : public Fate {
 public:
  using IsHeld = bool (*)(const at::Tensor& tensor);

  OncePerStorage(c10::intrusive_ptr<Fate> fate, IsHeld is_held)
      : fate_(std::move(fate)), is_held_(is_held) {}

  c10::intrusive_ptr<Handle> take(const at::Tensor& tensor) override;

 private:
  struct Taken {
    StorageName storage;
    Version version;
    c10::weak_intrusive_ptr<SharedTensor> shared;
  };

  // What holds the storage already; empty if nothing does, or it was written since.
  c10::intrusive_ptr<SharedTensor> taken(const at::Tensor& tensor);
  void remember(const at::Tensor& tensor, const c10::intrusive_ptr<SharedTensor>& shared);

  c10::intrusive_ptr<Fate> fate_;
  IsHeld is_held_;
  std::mutex mutex_;  // nothing is called, and no tensor dropped, under it
  std::unordered_map<c10::StorageImpl*, Taken> taken_;
  size_t sweep_at_ = 256;
};

}  // namespace memopt::saved
