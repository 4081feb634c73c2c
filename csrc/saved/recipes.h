// The second fate: an output of one of memopt's ops is not kept; in its place stands its recipe,
// the op and what the op's own node saves anyway.
//
// Inside memopt.recompute() the ops write their outputs into this book (autograd/recipe.h), by
// storage, weakly. When autograd saves a tensor on such a storage, whatever op saves it and
// whichever view of the output it is, the handle holds a Use of the recipe and the view's geometry.
// Recipes chain: an input may itself be one.
//
// A recipe is used if it saves memory, that is, if each of its inputs is held by a handle of this
// scope already (the op's own node saved it, or another op did), or has such a recipe itself. (A
// dropout saves 16 bytes and not its input; so its output has a recipe only where something else
// saves that input or it can be made again.) It is not used if the output was written in place
// since, for subclasses and for views of another dtype, nor once an input has left the memory (the
// weight of a sharded module whose output another module saves).
//
// Everything else goes to `outer`, the hooks that were active around the scope, or is kept. A
// recipe takes its inputs from the handles that hold them, so that an input that the outer hooks
// moved to the host stays there.
//
// A pair of saved-tensor hooks around a scope costs what PyTorch takes to call it from C++; the
// book adds two hash lookups and about 200 bytes per saved tensor.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../autograd/recipe.h"
#include "cell.h"
#include "version.h"

namespace memopt::saved {

class Recipes : public Packer, public autograd::RecipeBook {
 public:
  // `outer` may be empty: then what has no recipe is kept.
  explicit Recipes(c10::intrusive_ptr<Packer> outer) : outer_(std::move(outer)) {}

  void add(const at::Tensor& output, autograd::Recipe recipe) override;
  c10::intrusive_ptr<Handle> pack(const at::Tensor& tensor) override;

 private:
  // Weak, and yet a name: while it is held no other storage can have the address.
  using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  struct Output;
  // An input of a recipe: enough to find the handle that holds it, even when the tensor is gone.
  struct Input {
    Storage storage;
    Geometry geometry;
    Version version;
    std::shared_ptr<Output> made_by;  // if it is an output with a recipe itself, perhaps unsaved
  };
  struct Output {
    Storage storage;
    Version version;
    Geometry geometry;
    c10::SmallVector<std::optional<Input>, 4> inputs;
    std::function<at::Tensor(const std::vector<at::Tensor>&)> run;
    int64_t chain_length;                               // of recipes, by made_by
    std::optional<c10::weak_intrusive_ptr<Cell>> cell;  // once it was saved
  };
  // A tensor that a handle of this scope holds.
  struct Held {
    Storage storage;
    Geometry geometry;
    Version version;
    c10::weak_intrusive_ptr<Cell> cell;
    std::optional<Geometry> view;  // of the cell's tensor, unless that is it
  };

  // The output on `tensor`'s storage, unless it was written in place since, also under tensor.data,
  // or is of another dtype.
  std::shared_ptr<Output> output_of(const at::Tensor& tensor);
  // The cell of its recipe; empty if that would save nothing.
  c10::intrusive_ptr<Cell> cell_of(Output& output);
  std::optional<Use> use_of(const Input& input);
  void hold(const at::Tensor& tensor, const c10::intrusive_ptr<Cell>& cell,
            std::optional<Geometry> view);
  // Forgets what is gone, when there is twice as much as after the last time.
  void sweep();

  c10::intrusive_ptr<Packer> outer_;
  // Backward inside the scope may save tensors on other threads (create_graph=True).
  std::mutex mutex_;
  std::unordered_map<c10::StorageImpl*, std::shared_ptr<Output>> outputs_;
  std::unordered_map<c10::StorageImpl*, c10::SmallVector<Held, 1>> held_;
  size_t sweep_at_ = 256;
};

}  // namespace memopt::saved
