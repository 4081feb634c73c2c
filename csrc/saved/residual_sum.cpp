// A recipe for one kind of sum: of a float32 residual and a branch's result in 16 bits, as models
// add them under autocast. The branch's result is kept, 2 bytes an element, and not the sum, 4
// bytes. The residual must be held anyway, and not be such a sum itself, so that no chain of them
// grows. And the registry must be the last that holds the branch's result when the sum is saved,
// since elsewhere it may be written in place: nothing that PyTorch saves would notice.
//
// intercept/elementwise.cpp sees the sums. Only the latest is remembered: a block's next op saves
// it.
#include <ATen/ops/add.h>

#include <utility>

#include "detached.h"
#include "kept.h"
#include "recipe_registry.h"

namespace memopt::saved {

bool is_residual_sum(const at::Tensor& residual, const at::Tensor& branch) {
  return residual.scalar_type() == at::kFloat && c10::elementSize(branch.scalar_type()) == 2 &&
         residual.sym_sizes().equals(branch.sym_sizes());
}

void RecipeRegistry::keep_branches(c10::intrusive_ptr<Packer> outer) {
  sum_.keeper = [outer = std::move(outer)](const at::Tensor& tensor) {
    return outer.defined() ? outer->pack(tensor) : keep(tensor);
  };
}

void RecipeRegistry::add_sum(const at::Tensor& sum, const at::Tensor& residual,
                             const at::Tensor& branch) {
  at::Tensor before;  // dropped after the lock
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    before = std::exchange(sum_.branch, at::Tensor());
    sum_.output = nullptr;
  }
  if (!sum_.keeper || !is_plain(residual) || !is_plain(branch)) return;
  add(sum, {{residual, branch},
            [](const std::vector<at::Tensor>& read) { return at::add(read[0], read[1]); }});
  at::Tensor kept = detached(branch);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto added = output_of(sum);
  if (added == nullptr) return;
  if (added->sums > 0) {
    outputs_.erase(storage_of(sum));
    return;
  }
  added->sums = 1;
  sum_.output = std::move(added);
  sum_.branch = std::move(kept);
}

c10::intrusive_ptr<Handle> RecipeRegistry::keep_branch_of(const at::Tensor& sum) {
  at::Tensor branch;
  {
    Alive alive;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (sum_.output == nullptr || output_of(sum) != sum_.output) return {};
    const auto output = std::exchange(sum_.output, nullptr);
    branch = std::exchange(sum_.branch, at::Tensor());
    auto residual = reader_of(*output->inputs[0], output->node, alive);
    auto made = reader_of(*output->inputs[1], output->node, alive);
    const bool has_residual = residual.defined(), is_held = made.defined();
    alive.push_back(std::move(residual));
    alive.push_back(std::move(made));
    const bool is_ours = branch.use_count() == 1 && branch.storage().use_count() == 1;
    if (is_held) return {};
    if (!has_residual || !is_ours) {
      outputs_.erase(storage_of(sum));
      return {};
    }
  }
  auto handle = sum_.keeper(branch);
  return handle.defined() ? hold(branch, std::move(handle)) : handle;
}

}  // namespace memopt::saved
