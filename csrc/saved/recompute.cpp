#include "recompute.h"

#include <algorithm>
#include <utility>

#include "detached.h"
#include "handle_hooks.h"
#include "kept.h"

namespace memopt::saved {

Recompute::Recompute(Forward forward, std::vector<c10::intrusive_ptr<Slot>> wanted, Fill fill)
    : forward_(std::move(forward)),
      wanted_(std::move(wanted)),
      fill_(std::move(fill)),
      to_fill_(std::count_if(wanted_.begin(), wanted_.end(),
                             [](const auto& slot) { return slot.defined(); })) {}

bool Recompute::stops() const {
  return forward_.options.early_stop && to_fill_ == 0;
}

c10::intrusive_ptr<Handle> Recompute::pack(const at::Tensor& tensor) {
  // Not again: what the function does after the exception puts back what it had changed.
  if (!was_ended_) take(tensor);
  return is_complete() ? c10::intrusive_ptr<Handle>() : keep(tensor);
}

bool Recompute::pack_saved(const autograd::NodePointer&, torch::autograd::SavedVariable& saved) {
  const auto tensor = tensor_for_hooks(saved);
  if (!tensor.defined()) return false;
  if (!was_ended_) take(tensor);
  return true;
}

bool Recompute::is_complete() {
  return stops() && !std::exchange(was_ended_, true);
}

bool Recompute::pack_arguments(const void* op, OpArguments arguments) {
  const auto& last = forward_.last;
  const bool is_last = ++op_calls_ == last.call && forward_.ended && last.op == op &&
                       last.first == saved_ && saved_ + last.numbers.size() == wanted_.size();
  if (!is_last || !forward_.options.early_stop || stops()) return false;
  for (const auto number : last.numbers) {
    if (!stops()) take(*arguments[static_cast<size_t>(number)]);
  }
  return is_complete();
}

void Recompute::take(const at::Tensor& tensor) {
  const size_t index = saved_++;
  if (index >= wanted_.size()) {
    if (!forward_.ended) return;
    fail(c10::str("the ", wanted_.size(), " tensors that its forward saved"), "more");
  }
  if (forward_.options.check_metadata) {
    const auto got = Metadata::of(tensor);
    const auto& expected = forward_.metadata[index];
    if (!(got == expected)) {
      fail(c10::str("as tensor ", index, " what its forward saved, ", expected.text()), got.text());
    }
  }
  if (auto slot = std::move(wanted_[index]); slot.defined()) {
    fill_(*slot, detached(tensor));
    --to_fill_;
  }
}

void Recompute::check_ended() const {
  const bool fewer = saved_ < wanted_.size() && (to_fill_ > 0 || !forward_.options.early_stop);
  if (fewer) {
    fail(c10::str("the ", wanted_.size(), " tensors that its forward saved"), c10::str(saved_));
  }
}

void Recompute::fail(const std::string& expected, const std::string& got) const {
  TORCH_CHECK(false, "checkpoint: recompute of region ", forward_.function.name(), " must save ",
              expected, ", got ", got, forward_.function.diagnosis(),
              "; where something changes a module's weights or state between the two, ",
              "apply_activation_checkpointing(model, batch=batch) makes no region of it");
}

}  // namespace memopt::saved
