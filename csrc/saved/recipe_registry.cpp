#include "recipe_registry.h"

#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "handle_hooks.h"

namespace memopt::saved {

namespace {

using torch::autograd::variable_list;

// Recipes through which a tensor is made, at most: each takes a few frames of the stack.
constexpr int64_t kLongestChain = 64;
// Sums among these: while one is made in backward, so are those that it is made of.
constexpr int64_t kMostSums = 3;

bool is_row_major(const Geometry& geometry) {
  int64_t stride = 1;
  for (size_t i = geometry.sizes.size(); i-- > 0;) {
    if (geometry.sizes[i] != 1 && geometry.strides[i] != stride) return false;
    stride *= geometry.sizes[i];
  }
  return true;
}

// Whether a copy's elements stand in its memory as those of what was copied in its own.
bool is_in_order_of(const Geometry& copy, const Geometry& copied, bool reshaped) {
  if (!reshaped) return copy.sizes == copied.sizes && copy.strides == copied.strides;
  return is_row_major(copy) && is_row_major(copied) &&
         c10::multiply_integers(copy.sizes) == c10::multiply_integers(copied.sizes);
}

// The node that holds a parameter as long as its gradient is wanted: no sum saves its operands.
std::optional<WeakNode> holder_of_leaf(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_leaf() || !tensor.requires_grad()) return std::nullopt;
  return weak(torch::autograd::impl::grad_accumulator(tensor));
}

}  // namespace

void RecipeRegistry::add(const at::Tensor& output, autograd::Recipe recipe) {
  enter(output, std::move(recipe), Maker{});
}

void RecipeRegistry::add_made_of(const at::Tensor& output, autograd::Recipe recipe, bool is_sum) {
  enter(output, std::move(recipe), {is_sum ? 1 : 0, /*is_of_pytorch=*/true, true});
}

void RecipeRegistry::add_made_of_kept(const at::Tensor& output, autograd::Recipe recipe) {
  enter(output, std::move(recipe), {/*sums=*/0, /*is_of_pytorch=*/true, false});
}

bool RecipeRegistry::may_make(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return outputs_.find(storage_of(tensor)) != outputs_.end();
}

void RecipeRegistry::enter(const at::Tensor& output, autograd::Recipe recipe, Maker maker) {
  if (!is_plain(output) || output.storage_offset() != 0) return;
  auto entry = std::make_shared<Output>(Output{name_of_storage(output),
                                               Version(output),
                                               Geometry::of(output),
                                               {},
                                               std::move(recipe.run),
                                               std::move(recipe.run_with),
                                               std::move(recipe.gradient),
                                               std::move(recipe.behind),
                                               /*chain_length=*/1,
                                               maker.sums,
                                               maker.is_of_pytorch,
                                               std::nullopt,
                                               output.device()});
  bool is_made = false;
  c10::SmallVector<std::optional<WeakNode>, 4> holders;
  for (const at::Tensor& tensor : recipe.inputs) {
    holders.push_back(maker.is_of_pytorch ? holder_of_leaf(tensor) : std::nullopt);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < recipe.inputs.size(); ++i) {
    const at::Tensor& tensor = recipe.inputs[i];
    if (holders[i].has_value()) held_.note(*holders[i], tensor);
    if (!tensor.defined()) {
      entry->inputs.emplace_back();
      continue;
    }
    if (!is_plain(tensor)) return;
    auto made_by = output_of(tensor);
    if (made_by != nullptr && made_by->chain_length >= kLongestChain) made_by = nullptr;
    if (made_by != nullptr) {
      entry->chain_length = std::max(entry->chain_length, 1 + made_by->chain_length);
      entry->sums = std::max(entry->sums, maker.sums + made_by->sums);
      is_made = true;
    }
    Input input{name_of_storage(tensor), Geometry::of(tensor), Version(tensor), std::move(made_by),
                std::nullopt};
    for (const at::Tensor& saved : recipe.saved) {
      if (saved.is_same(tensor)) input.saved = weak(tensor);
    }
    entry->inputs.push_back(std::move(input));
  }
  if (maker.needs_made_input && !is_made) return;
  if (maker.is_of_pytorch && entry->sums > kMostSums) return;
  sweep();
  outputs_.insert_or_assign(storage_of(output), std::move(entry));
}

void RecipeRegistry::place(const at::Tensor& output, const variable_list& saved) {
  const auto edge = torch::autograd::impl::gradient_edge(output);
  if (!edge.is_valid()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const at::Tensor& tensor : saved) {
    if (tensor.defined()) held_.note(weak(edge.function), tensor);
  }
  if (!is_plain(output)) return;
  const auto found = outputs_.find(storage_of(output));
  if (found == outputs_.end()) return;
  Output& entry = *found->second;
  entry.node = weak(edge.function);
  entry.node_address = edge.function.get();
  entry.output_nr = edge.input_nr;
  placed_.push_back(found->second);
}

c10::intrusive_ptr<Handle> RecipeRegistry::reader_of(const Input& input,
                                                     const std::optional<WeakNode>& node,
                                                     Alive& alive) {
  // Written in place since, it is nowhere; a recipe makes it as it was.
  if (input.version.moved()) return made_by(input, alive);
  if (input.saved.has_value() && node.has_value() && !node->expired()) {
    if (auto handle = keep_wanted(*input.saved, {input.storage, input.geometry}, alive);
        handle.defined())
      return handle;
  }
  auto handle = held_.reader_of({input.storage, input.geometry}, alive);
  return handle.defined() ? handle : made_by(input, alive);
}

c10::intrusive_ptr<Handle> RecipeRegistry::made_by(const Input& input, Alive& alive) {
  if (input.made_by == nullptr) return {};
  auto shared = recipe_of(*input.made_by, alive);
  if (!shared.defined()) return {};
  return c10::make_intrusive<Reader>(std::move(shared), input.geometry);
}

std::shared_ptr<RecipeRegistry::Output> RecipeRegistry::output_of(const at::Tensor& tensor) {
  const auto found = outputs_.find(storage_of(tensor));
  if (found == outputs_.end()) return nullptr;
  const Output& output = *found->second;
  if (output.version.moved() || output.geometry.dtype != tensor.scalar_type()) return nullptr;
  // tensor.data counts its writes apart.
  if (Version(tensor).then() != output.version.then()) return nullptr;
  return found->second;
}

c10::intrusive_ptr<SharedTensor> RecipeRegistry::recipe_of(Output& output, Alive& alive) {
  if (output.shared.has_value()) {
    if (auto shared = output.shared->lock(); shared.defined()) {
      alive.push_back(shared);
      if (shared->is_there()) return shared;
      return {};
    }
  }
  RecipeHandle::Inputs inputs;
  inputs.reserve(output.inputs.size());
  for (const std::optional<Input>& input : output.inputs) {
    inputs.push_back(input.has_value() ? reader_of(*input, output.node, alive) : nullptr);
    if (!inputs.back().defined() && input.has_value()) {
      for (auto& reader : inputs) alive.push_back(std::move(reader));
      return {};
    }
  }
  auto shared = c10::make_intrusive<SharedTensor>(
      c10::make_intrusive<RecipeHandle>(std::move(inputs), output.run, output.geometry,
                                        output.run_with, output.gradient, output.behind));
  alive.push_back(shared);
  if (shared->chain_length() > kLongestChain) return {};
  output.shared = c10::weak_intrusive_ptr<SharedTensor>(shared);
  return shared;
}

c10::intrusive_ptr<SharedTensor> RecipeRegistry::recipe_of_cast(const at::Tensor& tensor,
                                                                Alive& alive) {
  if (nodes_.empty() && placed_.empty()) return {};
  const auto cast = cast_of(tensor);
  if (!cast.has_value()) return {};
  for (auto& entry : placed_) nodes_.insert_or_assign(entry->node_address, std::move(entry));
  placed_.clear();
  const auto found = nodes_.find(cast->of.function.get());
  if (found == nodes_.end()) return {};
  Output& output = *found->second;
  const Geometry copy = Geometry::of(cast->copy);
  const bool same = output.node->lock() == cast->of.function &&
                    output.output_nr == cast->of.input_nr && !output.version.moved() &&
                    cast->copy.device() == output.device && copy.offset == 0;
  if (!same || !is_in_order_of(copy, output.geometry, cast->reshaped)) return {};

  auto& casts = output.casts;
  casts.erase(std::remove_if(casts.begin(), casts.end(),
                             [](const SharedCast& other) { return other.shared.expired(); }),
              casts.end());
  for (const SharedCast& other : casts) {
    if (other.dtype != copy.dtype) continue;
    if (auto shared = other.shared.lock(); shared.defined()) {
      alive.push_back(shared);
      return shared->is_there() ? shared : nullptr;
    }
  }
  auto source = recipe_of(output, alive);
  if (!source.defined()) return {};
  Geometry converted = output.geometry;
  converted.dtype = copy.dtype;
  RecipeHandle::Inputs inputs{c10::make_intrusive<Reader>(std::move(source), std::nullopt)};
  auto shared = c10::make_intrusive<SharedTensor>(c10::make_intrusive<RecipeHandle>(
      std::move(inputs),
      [dtype = copy.dtype](const std::vector<at::Tensor>& made) { return made[0].to(dtype); },
      std::move(converted)));
  alive.push_back(shared);
  if (shared->chain_length() > kLongestChain) return {};
  casts.push_back({copy.dtype, c10::weak_intrusive_ptr<SharedTensor>(shared)});
  return shared;
}

c10::intrusive_ptr<Handle> RecipeRegistry::take(const at::Tensor& tensor) {
  if (!is_plain(tensor)) return {};
  const auto branch = keep_branch_of(tensor);
  Alive alive;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto output = output_of(tensor);
  auto shared = output != nullptr ? recipe_of(*output, alive) : recipe_of_cast(tensor, alive);
  if (!shared.defined()) return {};
  const Geometry view = Geometry::of(tensor);
  sweep();
  held_.hold(tensor, shared, view);
  return c10::make_intrusive<Reader>(std::move(shared), view);
}

bool RecipeRegistry::keeps_anyway(const at::Tensor& tensor) {
  if (!is_plain(tensor)) return false;
  Alive alive;
  const std::lock_guard<std::mutex> lock(mutex_);
  const Input input{name_of_storage(tensor), Geometry::of(tensor), Version(tensor),
                    output_of(tensor), std::nullopt};
  auto reader = reader_of(input, std::nullopt, alive);
  alive.push_back(reader);
  return reader.defined();
}

c10::intrusive_ptr<Handle> RecipeRegistry::hold(const at::Tensor& tensor,
                                                c10::intrusive_ptr<Handle> handle) {
  if (!is_plain(tensor)) return handle;
  if (handle->is_at_hand()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sweep();
    held_.hold(tensor, handle, std::nullopt);
    return handle;
  }
  auto* reader = dynamic_cast<Reader*>(handle.get());
  if (reader == nullptr) {
    handle = c10::make_intrusive<Reader>(c10::make_intrusive<SharedTensor>(std::move(handle)),
                                         std::nullopt);
    reader = static_cast<Reader*>(handle.get());
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  sweep();
  held_.hold(tensor, reader->shared(), reader->view());
  return handle;
}

bool RecipeRegistry::needs_no_hooks(const variable_list& saved) {
  if (!is_alone()) return false;
  Alive alive;
  const std::lock_guard<std::mutex> lock(mutex_);
  // Most recipes are of use; of a sum, which every residual is, seldom all operands are there.
  const auto has_recipe = [&](const at::Tensor& tensor) {
    const auto output = output_of(tensor);
    if (output == nullptr) return cast_of(tensor).has_value();
    return !output->is_of_pytorch || recipe_of(*output, alive).defined();
  };
  return std::all_of(saved.begin(), saved.end(), [&](const at::Tensor& tensor) {
    return !tensor.defined() || (is_plain(tensor) && !has_recipe(tensor));
  });
}

at::Tensor RecipeRegistry::stand_in_for(const at::Tensor& tensor) {
  if (!first_ || !first_() || !is_plain(tensor)) return {};
  Alive alive;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto output = output_of(tensor);
  if (output == nullptr || !(output->geometry == Geometry::of(tensor)) ||
      !recipe_of(*output, alive).defined()) {
    return {};
  }
  at::Tensor stand_in = without_memory(tensor);
  torch::autograd::impl::set_gradient_edge(stand_in, torch::autograd::impl::gradient_edge(tensor));
  outputs_.erase(storage_of(tensor));
  output->storage = name_of_storage(stand_in);
  output->version = Version(stand_in);
  outputs_.insert_or_assign(storage_of(stand_in), output);
  return stand_in;
}

// Modes would see that a stand-in without memory is saved.
bool RecipeRegistry::sees_saved(const variable_list& saved) {
  return is_alone() && std::all_of(saved.begin(), saved.end(), [](const at::Tensor& tensor) {
           return !tensor.defined() || (is_plain(tensor) && has_memory(tensor));
         });
}

bool RecipeRegistry::see_saved(const autograd::NodePointer& node,
                               torch::autograd::SavedVariable& saved) {
  const auto tensor = tensor_for_hooks(saved);
  if (!tensor.defined()) return false;
  if (auto handle = take(tensor); handle.defined()) {
    put_in_place(saved, std::move(handle));
    return true;
  }
  if (!is_plain(tensor)) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  sweep();
  held_.note(weak(node), tensor);
  return false;
}

void RecipeRegistry::sweep() {
  const auto size = [&] { return outputs_.size() + nodes_.size() + placed_.size() + held_.size(); };
  if (size() < sweep_at_) return;
  for (auto entry = outputs_.begin(); entry != outputs_.end();) {
    entry = entry->second->storage.expired() ? outputs_.erase(entry) : std::next(entry);
  }
  const auto lost = [](const std::shared_ptr<Output>& entry) { return entry->node->expired(); };
  placed_.erase(std::remove_if(placed_.begin(), placed_.end(), lost), placed_.end());
  for (auto entry = nodes_.begin(); entry != nodes_.end();) {
    entry = lost(entry->second) ? nodes_.erase(entry) : std::next(entry);
  }
  held_.forget_what_is_gone();
  sweep_at_ = std::max<size_t>(256, 2 * size());
}

}  // namespace memopt::saved
