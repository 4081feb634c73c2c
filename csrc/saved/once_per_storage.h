// A decorator of fates: what the fate makes of a storage serves every tensor that is saved on it.
//
// So a tensor that several ops save, and views of one memory, are copied once. Like a kept view, a
// handle holds its whole storage.
//
// It leaves alone small tensors, and those whose memory is held anyway, so that nothing would be
// freed: leaves that require a gradient, whatever `is_held` says, and storages that were found
// alive when they came back (a buffer, say).
#pragma once

#include <mutex>
#include <unordered_map>

#include "fate.h"
#include "geometry.h"
#include "shared.h"
#include "version.h"

namespace memopt::saved {

// What stands for storages that were taken. Fates may share one.
class TakenStorages {
 public:
  // What holds the storage already; empty if nothing does, or it was written since.
  c10::intrusive_ptr<SharedTensor> find(const at::Tensor& tensor);
  void remember(const at::Tensor& tensor, const c10::intrusive_ptr<SharedTensor>& shared);

  // What stood for the storage is gone.
  void forget(const StorageName& storage);

  // The storage is held by something else: to take it would free nothing.
  void remember_held(const StorageName& storage);
  bool is_held(const at::Tensor& tensor);

 private:
  struct Taken {
    StorageName storage;
    Version version;
    c10::weak_intrusive_ptr<SharedTensor> shared;
  };

  std::mutex mutex_;  // nothing is called, and no tensor dropped, under it
  std::unordered_map<c10::StorageImpl*, Taken> taken_;
  std::unordered_map<c10::StorageImpl*, StorageName> held_;
  size_t sweep_at_ = 256;
};

// Whether its graph holds it anyway: to add a leaf's gradient to it, or as what its views lie in.
bool is_held_by_its_graph(const at::Tensor& tensor);

class OncePerStorage : public Fate {
 public:
  using IsHeld = bool (*)(const at::Tensor& tensor);

  // Storages of fewer than `min_bytes` are left alone.
  OncePerStorage(c10::intrusive_ptr<Fate> fate, IsHeld is_held, size_t min_bytes,
                 std::shared_ptr<TakenStorages> taken)
      : fate_(std::move(fate)),
        is_held_(is_held),
        min_bytes_(min_bytes),
        taken_(std::move(taken)) {}

  c10::intrusive_ptr<Handle> take(const at::Tensor& tensor) override;

 private:
  c10::intrusive_ptr<Fate> fate_;
  IsHeld is_held_;
  size_t min_bytes_;
  std::shared_ptr<TakenStorages> taken_;
};

}  // namespace memopt::saved
