// The tensors that a scope's graph holds, and what holds them, so that recipes can read them:
// handles, or nodes that have saved the tensor itself without hooks. All references are weak.
//
// Most of what nodes save is asked for by no recipe. So it is noted in a list, which is gone
// through when a recipe looks for a tensor that nothing else holds.
#pragma once

#include <c10/util/SmallVector.h>

#include <optional>
#include <unordered_map>
#include <vector>

#include "cast.h"
#include "geometry.h"
#include "handle.h"
#include "version.h"

namespace memopt::saved {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

inline WeakTensor weak(const at::Tensor& tensor) {
  return WeakTensor(tensor.getIntrusivePtr());
}

// Handles and tensors that a call has looked at. Another thread may drop the last other reference
// meanwhile, and a tensor's end may run anything: they are dropped after the registry's lock.
struct Alive {
  c10::SmallVector<c10::intrusive_ptr<Handle>, 8> handles;
  c10::SmallVector<at::Tensor, 4> tensors;
  void push_back(c10::intrusive_ptr<Handle> handle) { handles.push_back(std::move(handle)); }
};

// A tensor as it was, which a recipe reads.
struct Wanted {
  const StorageName& storage;
  const Geometry& geometry;
};

// Under the registry's lock.
class HeldTensors {
 public:
  // `handle` holds the tensor: it is at hand, or a shared one, with `view` unless that is it.
  void hold(const at::Tensor& tensor, const c10::intrusive_ptr<Handle>& handle,
            std::optional<Geometry> view);

  // `node` has saved the tensor itself.
  void note(const WeakNode& node, const at::Tensor& tensor);

  // A handle to read it from; empty if nothing holds it.
  c10::intrusive_ptr<Handle> reader_of(const Wanted& wanted, Alive& alive);

  size_t size() const { return held_.size() + noted_.size(); }
  void forget_what_is_gone();

 private:
  // A tensor that a node holds, as long as both live.
  struct SavedInNode {
    WeakTensor tensor;
    uint32_t version;
    WeakNode node;
    bool is_gone() const { return tensor.expired() || node.expired(); }
  };
  struct Held {
    StorageName storage;
    Geometry geometry;
    Version version;
    c10::weak_intrusive_ptr<Handle> handle;
    std::optional<Geometry> view;
    std::optional<SavedInNode> in_node = {};
    bool is_gone() const {
      return handle.expired() && (!in_node.has_value() || in_node->is_gone());
    }
  };

  void insert(Held held);
  void look_through_notes(Alive& alive);
  c10::intrusive_ptr<Handle> find(const Wanted& wanted, Alive& alive);

  std::unordered_map<c10::StorageImpl*, c10::SmallVector<Held, 1>> held_;
  std::vector<SavedInNode> noted_;
};

// Holds the tensor itself; empty if it is not what is wanted any more.
c10::intrusive_ptr<Handle> keep_wanted(const WeakTensor& saved, const Wanted& wanted, Alive& alive);

}  // namespace memopt::saved
