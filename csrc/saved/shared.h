// A decorator of handles: has a tensor restored once per backward for all its readers.
//
// Each consumer's handle, and each recipe that reads the tensor, is a Reader. The first one that
// asks in a backward restores the tensor; it stays until every other reader has asked as well or is
// gone, and at most until that backward ends. So it is made once per backward, and lives no longer
// than its consumers need.
//
// Tensors are restored outside the lock: that may run Python (a user's hooks) or a whole region,
// and nothing must wait for those. Two threads that come at the same time each restore it, in the
// same bits.
#pragma once

#include <c10/core/Stream.h>

#include <mutex>
#include <optional>

#include "geometry.h"
#include "handle.h"

namespace memopt::saved {

class Reader;

class SharedTensor : public Handle {
 public:
  explicit SharedTensor(c10::intrusive_ptr<Handle> source) : source_(std::move(source)) {}

  // Runs when the last reader goes; weak references may stay longer.
  void release_resources() override;

  // For a reader that shares with no other.
  at::Tensor restore() override { return source_->restore(); }
  bool is_there() const override { return source_->is_there(); }
  int64_t chain_length() const override { return source_->chain_length(); }
  const c10::intrusive_ptr<Handle>& source() const { return source_; }

 private:
  friend class Reader;

  // What this backward has restored, for the readers that have not asked yet. On an accelerator it
  // belongs to the stream that it was restored on; a reader on another one has its own.
  struct Restored {
    int64_t task;
    std::optional<c10::Stream> stream;
    at::Tensor tensor;
  };

  at::Tensor restore_for(Reader& reader);
  bool pass_by(Reader& reader);
  // Of the readers, in this backward.
  int64_t passed_by(int64_t task) const { return passed_in_ == task ? passed_by_ : 0; }
  void add_reader();
  void remove_reader(const Reader& reader);
  void forget(int64_t task);
  // The tensor to drop after the lock, if no reader is left to ask for it.
  at::Tensor drop_if_read_by_all();

  c10::intrusive_ptr<Handle> source_;
  std::mutex mutex_;
  int64_t readers_ = 0;
  int64_t have_read_ = 0;  // how many of them have read what restored_ holds, or need not
  int64_t passed_by_ = 0;  // how many need not, in the backward passed_in_
  int64_t passed_in_ = -1;
  std::optional<Restored> restored_;
};

// Reads a shared tensor, as it is or as a view of its storage. Like autograd's nodes, not for two
// threads at once.
class Reader : public Handle {
 public:
  Reader(c10::intrusive_ptr<SharedTensor> shared, std::optional<Geometry> view)
      : shared_(std::move(shared)), view_(std::move(view)) {
    shared_->add_reader();
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  ~Reader() override { release_resources(); }

  void release_resources() override;
  at::Tensor restore() override;
  at::Tensor gradient(const autograd::Behind& behind, const at::Tensor& grad) override;
  bool is_there() const override { return shared_->is_there(); }
  int64_t chain_length() const override { return shared_->chain_length(); }

  // The reader does without the tensor in this backward, for which nobody need wait for it; false
  // if the tensor is there already.
  bool pass_by() { return shared_->pass_by(*this); }

  const c10::intrusive_ptr<SharedTensor>& shared() const { return shared_; }
  const std::optional<Geometry>& view() const { return view_; }

 private:
  friend class SharedTensor;
  c10::intrusive_ptr<SharedTensor> shared_;
  std::optional<Geometry> view_;
  int64_t read_in_ = -1;    // the backward in which it has read the shared tensor
  int64_t passed_in_ = -1;  // and in which it has passed it by
};

}  // namespace memopt::saved
