#include "once_per_storage.h"

#include <algorithm>
#include <iterator>

#include "unwritten.h"

namespace memopt::saved {

bool is_held_by_its_graph(const at::Tensor& tensor) {
  const auto is_held = [](const at::TensorBase& of) { return of.is_leaf() && of.requires_grad(); };
  return is_held(tensor) || (tensor.is_view() && is_held(tensor._base()));
}

c10::intrusive_ptr<Handle> OncePerStorage::take(const at::Tensor& tensor) {
  if (!is_plain(tensor) || tensor.storage().nbytes() < min_bytes_) return {};
  if (is_held_by_its_graph(tensor) || is_held_(tensor)) return {};
  auto shared = taken_->find(tensor);
  if (!shared.defined()) {
    if (taken_->is_held(tensor)) return {};
    auto handle = fate_->take(whole_storage(tensor));
    if (!handle.defined()) return {};
    shared = c10::make_intrusive<SharedTensor>(std::move(handle));
    taken_->remember(tensor, shared);
  }
  auto reader = c10::make_intrusive<Reader>(std::move(shared), Geometry::of(tensor));
  return c10::make_intrusive<Unwritten>(tensor, std::move(reader));
}

c10::intrusive_ptr<SharedTensor> TakenStorages::find(const at::Tensor& tensor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = taken_.find(storage_of(tensor));
  if (found == taken_.end()) return {};
  const Version& version = found->second.version;
  if (version.moved() || !version.counts_with(Version(tensor))) return {};
  return found->second.shared.lock();
}

void TakenStorages::remember(const at::Tensor& tensor,
                             const c10::intrusive_ptr<SharedTensor>& shared) {
  const std::lock_guard<std::mutex> lock(mutex_);
  taken_.insert_or_assign(storage_of(tensor), Taken{name_of_storage(tensor), Version(tensor),
                                                    c10::weak_intrusive_ptr<SharedTensor>(shared)});
  if (taken_.size() + held_.size() < sweep_at_) return;
  std::erase_if(taken_, [](const auto& entry) { return entry.second.shared.expired(); });
  std::erase_if(held_, [](const auto& entry) { return entry.second.expired(); });
  sweep_at_ = std::max<size_t>(256, 2 * (taken_.size() + held_.size()));
}

void TakenStorages::forget(const StorageName& storage) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = taken_.find(storage._unsafe_get_target());
  if (found != taken_.end() && found->second.shared.expired()) taken_.erase(found);
}

void TakenStorages::remember_held(const StorageName& storage) {
  const std::lock_guard<std::mutex> lock(mutex_);
  held_.insert_or_assign(storage._unsafe_get_target(), storage);
}

bool TakenStorages::is_held(const at::Tensor& tensor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = held_.find(storage_of(tensor));
  // An entry names its storage weakly, so that no other one can have its address.
  return found != held_.end();
}

}  // namespace memopt::saved
