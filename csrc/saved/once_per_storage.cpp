#include "once_per_storage.h"

#include <algorithm>
#include <iterator>

#include "unwritten.h"

namespace memopt::saved {

namespace {

// A copy of less costs more time than its memory is worth.
constexpr size_t kFewestBytes = 1024;

}  // namespace

c10::intrusive_ptr<Handle> OncePerStorage::take(const at::Tensor& tensor) {
  if (!is_plain(tensor) || tensor.storage().nbytes() < kFewestBytes) return {};
  if ((tensor.is_leaf() && tensor.requires_grad()) || is_held_(tensor)) return {};
  auto shared = taken(tensor);
  if (!shared.defined()) {
    auto handle = fate_->take(whole_storage(tensor));
    if (!handle.defined()) return {};
    shared = c10::make_intrusive<SharedTensor>(std::move(handle));
    remember(tensor, shared);
  }
  auto reader = c10::make_intrusive<Reader>(std::move(shared), Geometry::of(tensor));
  return c10::make_intrusive<Unwritten>(tensor, std::move(reader));
}

c10::intrusive_ptr<SharedTensor> OncePerStorage::taken(const at::Tensor& tensor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = taken_.find(storage_of(tensor));
  if (found == taken_.end()) return {};
  const Version& version = found->second.version;
  // tensor.data counts its writes apart.
  if (version.moved() || version.then() != Version(tensor).then()) return {};
  return found->second.shared.lock();
}

void OncePerStorage::remember(const at::Tensor& tensor,
                              const c10::intrusive_ptr<SharedTensor>& shared) {
  const std::lock_guard<std::mutex> lock(mutex_);
  taken_.insert_or_assign(storage_of(tensor), Taken{name_of_storage(tensor), Version(tensor),
                                                    c10::weak_intrusive_ptr<SharedTensor>(shared)});
  if (taken_.size() < sweep_at_) return;
  for (auto entry = taken_.begin(); entry != taken_.end();) {
    entry = entry->second.shared.expired() ? taken_.erase(entry) : std::next(entry);
  }
  sweep_at_ = std::max<size_t>(256, 2 * taken_.size());
}

}  // namespace memopt::saved
