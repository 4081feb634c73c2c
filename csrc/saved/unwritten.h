// A decorator of handles: raises in backward if the tensor was written in place since it was saved,
// as autograd does without hooks. For fates that hold something other than the tensor.
#pragma once

#include "handle.h"
#include "version.h"

namespace memopt::saved {

class Unwritten : public Handle {
 public:
  Unwritten(const at::Tensor& tensor, c10::intrusive_ptr<Handle> handle)
      : version_(tensor), handle_(std::move(handle)) {}

  void release_resources() override { handle_.reset(); }

  at::Tensor restore() override {
    version_.check_unwritten();
    return handle_->restore();
  }

  bool is_at_hand() const override { return handle_->is_at_hand(); }
  bool is_there() const override { return handle_->is_there(); }
  int64_t chain_length() const override { return handle_->chain_length(); }

 private:
  Version version_;
  c10::intrusive_ptr<Handle> handle_;
};

}  // namespace memopt::saved
