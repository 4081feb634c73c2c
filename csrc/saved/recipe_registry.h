// The registry of outputs, which finds the saved tensors that have a recipe (recipe.h).
//
// Inside memopt.recipes() the ops enter their outputs in this registry (autograd/recipe.h), by
// storage and weakly. When autograd then saves a tensor on such a storage, whatever op saves it and
// whichever view of the output it is, its handle becomes a reader of the recipe with the view's
// geometry. Recipes chain: an input may itself have one.
//
// A recipe is used if it saves memory, that is, if each of its inputs is held by a handle of this
// scope already (the op's own node saved it, or another op did), or has such a recipe itself. (A
// dropout saves 16 bytes and not its input; so its output has a recipe only where something else
// saves that input or it can be recomputed.) It is not used if the output was written in place
// since, for subclasses, for views of another dtype, or once an input has left the memory (the
// weight of a sharded module whose output another module saves).
//
// A copy of an output in another dtype, as autocast makes one for each matrix product, has a recipe
// as well: the output's, and the conversion. All copies in one dtype share what is recomputed. The
// copy's grad_fn leads to the output's node (cast.h).
//
// Sums and products of PyTorch's have a recipe too where one operand has one: whatever is saved of
// the other is enough to make them again. So the sum of a norm's output and the residual, as
// ResNets add them, is not kept, nor the product of an activation and a gate. And so have products,
// quotients and powers whose own node saves what they are made of: a square and its scale
// (StarReLU) cost nothing beyond what is squared. A sum that a recipe makes is an operand of at
// most kMostSums others: backward holds as many at a time. Another kind of sum: residual_sum.cpp.
//
// An activation that writes over an output with a recipe loses nothing by it: a stand-in without
// memory gets the recipe, is saved and read in the output's place, and what stands in the memory
// now gets a recipe that begins there (autograd/activation_in_place.cpp).
//
// A recipe takes its inputs from the handles that hold them, whatever those are, so that an input
// that has moved to the host stays there.
//
// A pair of saved-tensor hooks costs what PyTorch takes to call it from C++, some 2 us for each
// tensor, and the registry adds two hash lookups and about 200 bytes. So where the scope's hooks
// would do nothing but ask the registry (is_alone()), ops that are known run without them, and the
// registry is shown what they have saved: the outputs with a recipe are exchanged in the node, and
// of the others it notes, weakly, that the node holds them (intercept/savers.cpp; memopt's own
// nodes).
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "../autograd/recipe.h"
#include "cast.h"
#include "fate.h"
#include "geometry.h"
#include "held.h"
#include "recipe.h"
#include "shared.h"
#include "version.h"

namespace memopt::saved {

class RecipeRegistry : public Fate, public autograd::RecipeRecorder {
 public:
  void add(const at::Tensor& output, autograd::Recipe recipe) override;
  void place(const at::Tensor& output, const torch::autograd::variable_list& saved) override;
  bool needs_no_hooks(const torch::autograd::variable_list& saved) override;
  at::Tensor stand_in_for(const at::Tensor& tensor) override;

  // Whether what autograd saves in this thread now would come here and to nothing else. To be set
  // by the scope; false until then.
  using IsAlone = std::function<bool()>;
  void set_alone(IsAlone alone) { alone_ = std::move(alone); }
  bool is_alone() const { return alone_ && alone_(); }

  // Whether what autograd saves in this thread now would come here first. To be set by the scope;
  // false until then.
  using IsFirst = std::function<bool()>;
  void set_first(IsFirst first) { first_ = std::move(first); }

  // Shows the registry what `node` has saved without hooks; whether it has put a recipe there.
  bool see_saved(const autograd::NodePointer& node, torch::autograd::SavedVariable& saved) override;
  bool sees_saved(const torch::autograd::variable_list& saved) override;

  // The recipe of a residual sum (residual_sum.cpp). add_sum() tells of one that was computed just
  // now, and drops what is held of the one before. What is kept for it goes to `outer`, or stays;
  // sums have no recipe until keep_branches() was called.
  void keep_branches(c10::intrusive_ptr<Packer> outer);
  void add_sum(const at::Tensor& sum, const at::Tensor& residual, const at::Tensor& branch);

  // A reader of the tensor's recipe; empty if it has none or that would save nothing.
  c10::intrusive_ptr<Handle> take(const at::Tensor& tensor) override;

  // Whether the tensor may have a recipe; quick.
  bool may_make(const at::Tensor& tensor);
  // Tells of an op of PyTorch's, whose output has a recipe if one of its inputs does;
  void add_made_of(const at::Tensor& output, autograd::Recipe recipe, bool is_sum);
  // of one whose output has a recipe if its inputs are kept, as those are that its own node saves.
  void add_made_of_kept(const at::Tensor& output, autograd::Recipe recipe);

  // Whether saving the tensor would cost nothing: a handle of this scope holds it already, or it
  // has a recipe.
  bool keeps_anyway(const at::Tensor& tensor);

  // Tells the registry which handle another fate made for a tensor, so that recipes can read the
  // tensor from it. Returns the handle for the graph.
  c10::intrusive_ptr<Handle> hold(const at::Tensor& tensor, c10::intrusive_ptr<Handle> handle);

 private:
  struct Output;
  // An input of a recipe: enough to find the handle that holds it, even when the tensor is gone.
  struct Input {
    StorageName storage;
    Geometry geometry;
    Version version;
    std::shared_ptr<Output> made_by;  // if it is an output with a recipe itself, perhaps unsaved
    std::optional<WeakTensor> saved;  // by the op's own node, without hooks
  };
  // What was made again and converted.
  struct SharedCast {
    at::ScalarType dtype;
    c10::weak_intrusive_ptr<SharedTensor> shared;
  };
  struct Output {
    StorageName storage;
    Version version;
    Geometry geometry;
    c10::SmallVector<std::optional<Input>, 4> inputs;
    RecipeHandle::Run run;
    RecipeHandle::RunWith run_with;
    RecipeHandle::Gradient gradient;
    std::optional<autograd::Behind> behind;
    int64_t chain_length;  // of recipes, by made_by
    int64_t sums;          // with recipes that it is made through, itself among them
    bool is_of_pytorch;    // made by an op that is not memopt's
    std::optional<c10::weak_intrusive_ptr<SharedTensor>> shared;  // once it was saved
    at::Device device;
    // Where it stands in the graph; that of a cast of it leads here.
    std::optional<WeakNode> node = {};
    const torch::autograd::Node* node_address = nullptr;
    uint32_t output_nr = 0;
    c10::SmallVector<SharedCast, 1> casts = {};
  };
  // What is known of an op that enters its output: how many sums its recipe makes itself, whether
  // it is PyTorch's (such a recipe leads through few sums), and whether that is of use only where
  // an input has a recipe.
  struct Maker {
    int64_t sums = 0;
    bool is_of_pytorch = false;
    bool needs_made_input = false;
  };
  void enter(const at::Tensor& output, autograd::Recipe recipe, Maker maker);
  // The output on `tensor`'s storage, unless it was written in place since, also under tensor.data,
  // or is of another dtype.
  std::shared_ptr<Output> output_of(const at::Tensor& tensor);
  // Its recipe; empty if that would save nothing.
  c10::intrusive_ptr<SharedTensor> recipe_of(Output& output, Alive& alive);
  // The same for a tensor that is a cast of an output or a view of one.
  c10::intrusive_ptr<SharedTensor> recipe_of_cast(const at::Tensor& tensor, Alive& alive);
  // `node`: that of the op whose input it is, where it stands in the graph.
  c10::intrusive_ptr<Handle> reader_of(const Input& input, const std::optional<WeakNode>& node,
                                       Alive& alive);
  // A reader of the recipe of the output that it is, if it is one.
  c10::intrusive_ptr<Handle> made_by(const Input& input, Alive& alive);
  // If it is the latest sum, has its recipe keep the branch's result, where that may be. The handle
  // is to live until a recipe reads it.
  c10::intrusive_ptr<Handle> keep_branch_of(const at::Tensor& sum);
  // Forgets what is gone, when there is twice as much as after the last time.
  void sweep();

  // Backward inside the scope may save tensors on other threads (create_graph=True). Nothing is
  // called, and no tensor dropped, under the lock.
  std::mutex mutex_;
  std::unordered_map<c10::StorageImpl*, std::shared_ptr<Output>> outputs_;
  // Outputs by their nodes; the latest wait in `placed_` until a cast is saved.
  std::unordered_map<const torch::autograd::Node*, std::shared_ptr<Output>> nodes_;
  std::vector<std::shared_ptr<Output>> placed_;
  HeldTensors held_;
  size_t sweep_at_ = 256;
  IsAlone alone_;
  IsFirst first_;
  // The latest sum that was not saved yet, its branch's result, and what becomes of that.
  struct LatestSum {
    std::function<c10::intrusive_ptr<Handle>(const at::Tensor&)> keeper;
    std::shared_ptr<Output> output;
    at::Tensor branch;
  };
  LatestSum sum_;
};

// Whether the sum of the two is one that keep_branches() is for. Reads shapes and dtypes alone.
bool is_residual_sum(const at::Tensor& residual, const at::Tensor& branch);

}  // namespace memopt::saved
