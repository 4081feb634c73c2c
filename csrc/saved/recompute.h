// One run of a region's function in backward: counts what it saves and fills the slots wanted.
#pragma once

#include <string>
#include <vector>

#include "handle.h"
#include "region.h"
#include "slot.h"

namespace memopt::saved {

class Recompute : public Packer {
 public:
  // `wanted` has a place for each slot of the region, empty for those not wanted.
  Recompute(Region& region, int64_t task, std::vector<c10::intrusive_ptr<Slot>> wanted);

  // Empty when every wanted slot is filled, to end the function.
  c10::intrusive_ptr<Handle> pack(const at::Tensor& tensor) override;

  // Raises unless the function has saved what forward saved. To be called when it has ended.
  void check_ended() const;

 private:
  bool stops() const;
  [[noreturn]] void fail(const std::string& expected, const std::string& got) const;

  Region& region_;
  const int64_t task_;
  const bool forward_ended_;
  const std::vector<Metadata> metadata_;  // of what forward has saved so far
  std::vector<c10::intrusive_ptr<Slot>> wanted_;
  size_t to_fill_;
  size_t saved_ = 0;
};

}  // namespace memopt::saved
