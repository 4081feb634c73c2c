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
    bool ended;
  };
  using Fill = std::function<void(Slot& slot, at::Tensor tensor)>;

  // `wanted` has a place for each slot of the region, empty for those not wanted.
  Recompute(Forward forward, std::vector<c10::intrusive_ptr<Slot>> wanted, Fill fill);

  // Empty when every wanted slot is filled, to end the function: once, so that its `finally` and
  // `__exit__`, which may compute as well, run to their end.
  c10::intrusive_ptr<Handle> pack(const at::Tensor& tensor) override;
  bool is_of_region() const override { return true; }
  // The op that saves the last wanted tensor meets hooks: these end it before its kernel runs.
  bool packs_afterwards(size_t most) const override {
    return !forward_.options.early_stop || to_fill_ > most;
  }

  // Raises unless the function has saved what forward saved. To be called when it has ended.
  void check_ended() const;

 private:
  bool stops() const;
  [[noreturn]] void fail(const std::string& expected, const std::string& got) const;

  const Forward forward_;
  std::vector<c10::intrusive_ptr<Slot>> wanted_;
  const Fill fill_;
  size_t to_fill_;
  bool was_ended_ = false;
  size_t saved_ = 0;
};

}  // namespace memopt::saved
