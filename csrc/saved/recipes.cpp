#include "recipes.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <utility>

#include "detached.h"
#include "kept.h"
#include "untracked.h"

namespace memopt::saved {

namespace {

c10::StorageImpl* key_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

c10::weak_intrusive_ptr<c10::StorageImpl> weak_storage(const at::Tensor& tensor) {
  return c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl());
}

// Whether a storage and strides say all about its values.
bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !autograd::is_traced(tensor) &&
         !tensor.is_nested() && !tensor.is_conj() && !tensor.is_neg();
}

// Whether its storage was not freed under it.
bool has_memory(const at::Tensor& tensor) {
  return tensor.numel() == 0 || !tensor.has_storage() || tensor.storage().nbytes() != 0;
}

// Recipes through which a tensor is made, at most: each takes a few frames of the stack.
constexpr int64_t kLongestChain = 64;

class KeptCell : public Cell {
 public:
  explicit KeptCell(const at::Tensor& tensor) : kept_(tensor), storage_(key_of(tensor)) {}

  void release_resources() override {
    kept_.reset();
    Cell::release_resources();
  }

  // A parameter's memory is freed under it, or its data exchanged.
  bool is_there() const override {
    return key_of(kept_->tensor()) == storage_ && has_memory(kept_->tensor());
  }

 protected:
  bool is_at_hand() const override { return true; }
  at::Tensor make() override { return kept_->restore(); }

 private:
  std::optional<Kept> kept_;
  const c10::StorageImpl* storage_;  // then, to compare
};

// What the outer hooks made of a tensor.
class OuterCell : public Cell {
 public:
  explicit OuterCell(c10::intrusive_ptr<Handle> handle) : handle_(std::move(handle)) {}

  void release_resources() override {
    handle_.reset();
    Cell::release_resources();
  }

 protected:
  at::Tensor make() override { return handle_->restore(); }

 private:
  c10::intrusive_ptr<Handle> handle_;
};

class RecipeCell : public Cell {
 public:
  using Run = std::function<at::Tensor(const std::vector<at::Tensor>&)>;
  using Inputs = std::vector<std::optional<Use>>;

  RecipeCell(Inputs inputs, Run run, Geometry geometry)
      : inputs_(std::move(inputs)), run_(std::move(run)), geometry_(std::move(geometry)) {
    for (const auto& input : inputs_) {
      if (input.has_value())
        chain_length_ = std::max(chain_length_, 1 + input->cell().chain_length());
    }
  }

  bool is_there() const override {
    return std::all_of(inputs_.begin(), inputs_.end(), [](const std::optional<Use>& input) {
      return !input.has_value() || input->cell().is_there();
    });
  }

  int64_t chain_length() const override { return chain_length_; }

  void release_resources() override {
    inputs_.clear();
    Cell::release_resources();
  }

 protected:
  at::Tensor make() override {
    std::vector<at::Tensor> tensors;
    tensors.reserve(inputs_.size());
    for (auto& input : inputs_) {
      tensors.push_back(input.has_value() ? input->take() : at::Tensor());
      TORCH_CHECK(!tensors.back().defined() || has_memory(tensors.back()),
                  "memopt.recompute(): a tensor that a recipe reads must be in memory in backward, "
                  "got one of shape ",
                  tensors.back().sizes(), " whose storage was freed");
    }
    const Untracked untracked;
    const at::Tensor output = run_(tensors);
    if (output.strides() == at::IntArrayRef(geometry_.strides)) return output;
    // The outer hooks gave an input back in other strides, and an activation's output has its
    // input's.
    return at::empty_strided(geometry_.sizes, geometry_.strides, output.options()).copy_(output);
  }

 private:
  Inputs inputs_;
  Run run_;
  Geometry geometry_;
  int64_t chain_length_ = 1;
};

// A reader of a cell in the autograd graph.
class CellHandle : public Handle {
 public:
  CellHandle(c10::intrusive_ptr<Cell> cell, std::optional<Geometry> view)
      : use_(std::move(cell), std::move(view)) {}

  at::Tensor restore() override { return use_.take(); }

 private:
  Use use_;
};

}  // namespace

void Recipes::add(const at::Tensor& output, autograd::Recipe recipe) {
  if (!is_plain(output) || output.storage_offset() != 0) return;
  auto entry = std::make_shared<Output>(Output{weak_storage(output),
                                               Version(output),
                                               Geometry::of(output),
                                               {},
                                               std::move(recipe.run),
                                               /*chain_length=*/1,
                                               std::nullopt});
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const at::Tensor& tensor : recipe.inputs) {
    if (!tensor.defined()) {
      entry->inputs.emplace_back();
      continue;
    }
    if (!is_plain(tensor)) return;
    auto made_by = output_of(tensor);
    if (made_by != nullptr && made_by->chain_length >= kLongestChain) made_by = nullptr;
    if (made_by != nullptr)
      entry->chain_length = std::max(entry->chain_length, 1 + made_by->chain_length);
    entry->inputs.emplace_back(
        Input{weak_storage(tensor), Geometry::of(tensor), Version(tensor), std::move(made_by)});
  }
  sweep();
  outputs_.insert_or_assign(key_of(output), std::move(entry));
}

std::optional<Use> Recipes::use_of(const Input& input) {
  if (input.version.moved()) return std::nullopt;
  if (const auto found = held_.find(input.storage._unsafe_get_target()); found != held_.end()) {
    for (const Held& held : found->second) {
      if (held.version.moved() || !(held.geometry == input.geometry)) continue;
      if (auto cell = held.cell.lock(); cell.defined() && cell->is_there())
        return Use(std::move(cell), held.view);
    }
  }
  if (input.made_by == nullptr) return std::nullopt;
  auto cell = cell_of(*input.made_by);
  if (!cell.defined()) return std::nullopt;
  return Use(std::move(cell), input.geometry);
}

std::shared_ptr<Recipes::Output> Recipes::output_of(const at::Tensor& tensor) {
  const auto found = outputs_.find(key_of(tensor));
  if (found == outputs_.end()) return nullptr;
  const Output& output = *found->second;
  if (output.version.moved() || output.geometry.dtype != tensor.scalar_type()) return nullptr;
  // tensor.data counts its writes apart.
  if (Version(tensor).then() != output.version.then()) return nullptr;
  return found->second;
}

c10::intrusive_ptr<Cell> Recipes::cell_of(Output& output) {
  if (output.cell.has_value()) {
    if (auto cell = output.cell->lock(); cell.defined()) {
      if (cell->is_there()) return cell;
      return {};
    }
  }
  RecipeCell::Inputs inputs;
  inputs.reserve(output.inputs.size());
  for (const std::optional<Input>& input : output.inputs) {
    inputs.push_back(input.has_value() ? use_of(*input) : std::nullopt);
    if (input.has_value() && !inputs.back().has_value()) return {};
  }
  auto cell = c10::make_intrusive<RecipeCell>(std::move(inputs), output.run, output.geometry);
  if (cell->chain_length() > kLongestChain) return {};
  output.cell = c10::weak_intrusive_ptr<Cell>(cell);
  return cell;
}

c10::intrusive_ptr<Handle> Recipes::pack(const at::Tensor& tensor) {
  if (!is_plain(tensor)) {
    if (outer_.defined()) return outer_->pack(tensor);
    return c10::make_intrusive<Kept>(detached(tensor));
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto output = output_of(tensor);
    if (auto cell = output == nullptr ? nullptr : cell_of(*output); cell.defined()) {
      const Geometry view = Geometry::of(tensor);
      hold(tensor, cell, view);
      return c10::make_intrusive<CellHandle>(std::move(cell), view);
    }
  }
  c10::intrusive_ptr<Cell> cell;
  if (outer_.defined()) {
    auto handle = outer_->pack(tensor);
    if (!handle.defined()) return {};
    cell = c10::make_intrusive<OuterCell>(std::move(handle));
  } else {
    cell = c10::make_intrusive<KeptCell>(detached(tensor));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  hold(tensor, cell, std::nullopt);
  return c10::make_intrusive<CellHandle>(std::move(cell), std::nullopt);
}

void Recipes::hold(const at::Tensor& tensor, const c10::intrusive_ptr<Cell>& cell,
                   std::optional<Geometry> view) {
  sweep();
  auto& all = held_[key_of(tensor)];
  Held held{weak_storage(tensor), Geometry::of(tensor), Version(tensor),
            c10::weak_intrusive_ptr<Cell>(cell), std::move(view)};
  for (Held& other : all) {
    if (!other.cell.expired() && !(other.geometry == held.geometry)) continue;
    other = std::move(held);
    return;
  }
  all.push_back(std::move(held));
}

void Recipes::sweep() {
  if (outputs_.size() + held_.size() < sweep_at_) return;
  for (auto entry = outputs_.begin(); entry != outputs_.end();) {
    entry = entry->second->storage.expired() ? outputs_.erase(entry) : std::next(entry);
  }
  for (auto entry = held_.begin(); entry != held_.end();) {
    auto& all = entry->second;
    const auto gone = [](const Held& held) { return held.cell.expired(); };
    all.erase(std::remove_if(all.begin(), all.end(), gone), all.end());
    entry = all.empty() ? held_.erase(entry) : std::next(entry);
  }
  sweep_at_ = std::max<size_t>(256, 2 * (outputs_.size() + held_.size()));
}

}  // namespace memopt::saved
