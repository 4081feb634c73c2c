#include "held.h"

#include <algorithm>
#include <utility>

#include "kept.h"
#include "shared.h"

namespace memopt::saved {

c10::intrusive_ptr<Handle> keep_wanted(const WeakTensor& saved, const Wanted& wanted,
                                       Alive& alive) {
  auto impl = saved.lock();
  if (!impl.defined()) return {};
  const auto& tensor = alive.tensors.emplace_back(std::move(impl));
  // Sharding frees a parameter's memory, or exchanges its data.
  const bool is_it = is_plain(tensor) && storage_of(tensor) == address_of(wanted.storage) &&
                     Geometry::of(tensor) == wanted.geometry && has_memory(tensor);
  if (!is_it) return {};
  auto handle = keep(tensor);
  alive.push_back(handle);
  return handle;
}

void HeldTensors::hold(const at::Tensor& tensor, const c10::intrusive_ptr<Handle>& handle,
                       std::optional<Geometry> view) {
  insert({name_of_storage(tensor), Geometry::of(tensor), Version(tensor),
          c10::weak_intrusive_ptr<Handle>(handle), std::move(view)});
}

void HeldTensors::note(const WeakNode& node, const at::Tensor& tensor) {
  noted_.push_back({weak(tensor), Version(tensor).then(), node});
}

void HeldTensors::insert(Held held) {
  auto& all = held_[address_of(held.storage)];
  for (Held& other : all) {
    if (!other.is_gone() && !(other.geometry == held.geometry)) continue;
    other = std::move(held);
    return;
  }
  all.push_back(std::move(held));
}

void HeldTensors::look_through_notes(Alive& alive) {
  const c10::intrusive_ptr<Handle> none;
  for (SavedInNode& saved : noted_) {
    auto impl = saved.tensor.lock();
    if (!impl.defined()) continue;
    const auto& tensor = alive.tensors.emplace_back(std::move(impl));
    if (saved.node.expired() || Version(tensor).then() != saved.version) continue;
    insert({name_of_storage(tensor), Geometry::of(tensor), Version(tensor),
            c10::weak_intrusive_ptr<Handle>(none), std::nullopt, std::move(saved)});
  }
  noted_.clear();
}

c10::intrusive_ptr<Handle> HeldTensors::find(const Wanted& wanted, Alive& alive) {
  const auto found = held_.find(address_of(wanted.storage));
  if (found == held_.end()) return {};
  for (Held& held : found->second) {
    if (held.version.moved() || !(held.geometry == wanted.geometry)) continue;
    auto handle = held.handle.lock();
    if (!handle.defined() && held.in_node.has_value() && !held.in_node->node.expired()) {
      handle = keep_wanted(held.in_node->tensor, wanted, alive);
      held.handle = c10::weak_intrusive_ptr<Handle>(handle);
    }
    if (!handle.defined()) continue;
    alive.push_back(handle);
    if (!handle->is_there()) continue;
    if (handle->is_at_hand()) return handle;
    auto shared =
        c10::intrusive_ptr<SharedTensor>::reclaim_copy(static_cast<SharedTensor*>(handle.get()));
    return c10::make_intrusive<Reader>(std::move(shared), held.view);
  }
  return {};
}

c10::intrusive_ptr<Handle> HeldTensors::reader_of(const Wanted& wanted, Alive& alive) {
  auto reader = find(wanted, alive);
  if (reader.defined() || noted_.empty()) return reader;
  look_through_notes(alive);
  return find(wanted, alive);
}

void HeldTensors::forget_what_is_gone() {
  const auto is_gone = [](const auto& saved) { return saved.is_gone(); };
  noted_.erase(std::remove_if(noted_.begin(), noted_.end(), is_gone), noted_.end());
  for (auto entry = held_.begin(); entry != held_.end();) {
    auto& all = entry->second;
    all.erase(std::remove_if(all.begin(), all.end(), is_gone), all.end());
    entry = all.empty() ? held_.erase(entry) : std::next(entry);
  }
}

}  // namespace memopt::saved
