#include "recompute.h"

#include <algorithm>

#include "detached.h"
#include "kept.h"

namespace memopt::saved {

Recompute::Recompute(Region& region, int64_t task, std::vector<c10::intrusive_ptr<Slot>> wanted)
    : region_(region),
      task_(task),
      forward_ended_(region.forward_ended_),
      metadata_(region.metadata()),
      wanted_(std::move(wanted)),
      to_fill_(std::count_if(wanted_.begin(), wanted_.end(),
                             [](const auto& slot) { return slot.defined(); })) {}

bool Recompute::stops() const {
  return region_.options_.early_stop && to_fill_ == 0;
}

c10::intrusive_ptr<Handle> Recompute::pack(const at::Tensor& tensor) {
  if (stops()) return {};  // again: the function caught the exception and went on
  const size_t index = saved_++;
  auto kept = detached(tensor);
  if (index < wanted_.size()) {
    if (region_.options_.check_metadata) {
      const auto got = Metadata::of(tensor);
      const auto& expected = metadata_[index];
      if (!(got == expected)) {
        fail(c10::str("as tensor ", index, " what its forward saved, ", expected.text()),
             got.text());
      }
    }
    if (auto slot = std::move(wanted_[index]); slot.defined()) {
      region_.put(*slot, task_, kept);
      --to_fill_;
      if (stops()) return {};
    }
  } else if (forward_ended_) {
    fail(c10::str("the ", wanted_.size(), " tensors that its forward saved"), "more");
  }
  return c10::make_intrusive<Kept>(std::move(kept));
}

void Recompute::check_ended() const {
  const bool fewer = saved_ < wanted_.size() && (to_fill_ > 0 || !region_.options_.early_stop);
  if (fewer) {
    fail(c10::str("the ", wanted_.size(), " tensors that its forward saved"), c10::str(saved_));
  }
}

void Recompute::fail(const std::string& expected, const std::string& got) const {
  TORCH_CHECK(false, "checkpoint: recompute of region ", region_.function_->name(), " must save ",
              expected, ", got ", got, region_.function_->diagnosis());
}

}  // namespace memopt::saved
