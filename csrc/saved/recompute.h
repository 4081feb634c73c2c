// One recompute of a region in backward: counts what it saves, and fills the slots wanted.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "handle.h"
#include "region.h"
#include "slot.h"

namespace memopt::saved {

class Recompute : public Packer {
 public:
  // What it has to agree with. The region outlives its recompute.
  struct Forward {
    const RegionOptions& options;
    const Function& function;
    std::vector<Metadata> metadata;  // of what forward has saved so far
    LastOp last;
    bool ended;
  };
  using Fill = std::function<void(Slot& slot, at::Tensor tensor)>;

  // `wanted` has a place for each slot of the region, empty for those not wanted.
  Recompute(Forward forward, std::vector<c10::intrusive_ptr<Slot>> wanted, Fill fill);

  // Empty when every wanted slot is filled, to end the function: once, so that its `finally` and
  // `__exit__`, which may compute as well, run to their end.
  c10::intrusive_ptr<Handle> pack(const at::Tensor& tensor) override;
  bool is_of_region() const override { return true; }
  // An op that saves the last wanted tensor before its kernel runs meets hooks, which end it there.
  bool packs_afterwards(size_t most) const override {
    const bool is_before_last = forward_.last.op != nullptr && op_calls_ < forward_.last.call;
    return !forward_.options.early_stop || was_ended_ || to_fill_ > most ||
           (is_before_last && !stops());
  }

  // The recompute's graph goes when the function has ended.
  bool leaves_saved() const override { return true; }
  bool pack_saved(const autograd::NodePointer& node,
                  torch::autograd::SavedVariable& saved) override;

  bool is_complete() override;
  bool was_ended() const { return was_ended_; }
  bool pack_arguments(const void* op, OpArguments arguments) override;

  // Raises unless the function has saved what forward saved. To be called when it has ended.
  void check_ended() const;

 private:
  bool stops() const;
  // Takes the next of the tensors that forward saved.
  void take(const at::Tensor& tensor);
  [[noreturn]] void fail(const std::string& expected, const std::string& got) const;

  const Forward forward_;
  std::vector<c10::intrusive_ptr<Slot>> wanted_;
  const Fill fill_;
  size_t to_fill_;
  bool was_ended_ = false;
  size_t saved_ = 0;
  size_t op_calls_ = 0;
};

}  // namespace memopt::saved
