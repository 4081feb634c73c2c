#include "recompute.h"

#include <algorithm>

#include "detached.h"
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
  if (was_ended_) return c10::make_intrusive<Kept>(detached(tensor));
  const size_t index = saved_++;
  auto kept = detached(tensor);
  if (index < wanted_.size()) {
    if (forward_.options.check_metadata) {
      const auto got = Metadata::of(tensor);
      const auto& expected = forward_.metadata[index];
      if (!(got == expected)) {
        fail(c10::str("as tensor ", index, " what its forward saved, ", expected.text()),
             got.text());
      }
    }
    if (auto slot = std::move(wanted_[index]); slot.defined()) {
      fill_(*slot, kept);
      --to_fill_;
      if (stops()) {
        was_ended_ = true;
        return {};
      }
    }
  } else if (forward_.ended) {
    fail(c10::str("the ", wanted_.size(), " tensors that its forward saved"), "more");
  }
  return c10::make_intrusive<Kept>(std::move(kept));
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
