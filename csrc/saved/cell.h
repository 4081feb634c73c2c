// A saved tensor that several handles share: what one consumer of it makes again in backward, the
// others find.
//
// Each consumer's handle, and each recipe that reads the tensor, has a Use of the cell. The first
// Use that takes the tensor in a backward has it made; it stays until every other Use has taken it
// as well or is gone, and at most until that backward ends. So it is made once per backward, and
// lives no longer than its consumers need.
//
// Tensors are made outside the lock: making one may run Python (a user's hooks) or a whole region,
// and nothing must wait for those. Two threads that come at the same time each make it, in the same
// bits.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <mutex>
#include <optional>

#include "handle.h"

namespace memopt::saved {

class Use;

// Which elements of its storage a tensor is, and of what.
struct Geometry {
  at::ScalarType dtype = at::kFloat;
  c10::SmallVector<int64_t, 4> sizes;
  c10::SmallVector<int64_t, 4> strides;
  int64_t offset = 0;

  static Geometry of(const at::Tensor& tensor);
  bool operator==(const Geometry& other) const;
};

class Cell : public c10::intrusive_ptr_target {
 public:
  Cell();
  ~Cell() override;

  // Runs when the last reference goes, though a scope may know the cell weakly for longer.
  void release_resources() override;

  // Whether what it is made of is still in memory. Sharded parameters leave it after their module's
  // forward and are back only for that module's backward, so that another module's must not need
  // them.
  virtual bool is_there() const { return true; }

  // Of recipes: how many a tensor is made through.
  virtual int64_t chain_length() const { return 0; }

  // How many there are, to see that they die with their graph.
  static int64_t live();

 protected:
  // Whether make() costs nothing, so that there is nothing to share.
  virtual bool is_at_hand() const { return false; }
  virtual at::Tensor make() = 0;

 private:
  friend class Use;

  // What this backward has made, for the Uses that have not taken it yet. On an accelerator it
  // belongs to the stream that it was made on; a Use on another one makes its own.
  struct Made {
    int64_t task;
    std::optional<c10::Stream> stream;
    at::Tensor tensor;
  };

  at::Tensor take(Use& use);
  void add_use();
  void remove_use(const Use& use);
  void forget(int64_t task);
  // The tensor to drop after the lock, if no Use is left to take it.
  at::Tensor drop_if_taken_by_all();

  std::mutex mutex_;
  int64_t uses_ = 0;
  int64_t taken_ = 0;  // of the Uses that there are, in made_'s task
  std::optional<Made> made_;
  bool released_ = false;
};

// One reader of a cell, of the tensor as it is or of a view of its storage. Not for two threads at
// once, as autograd's nodes are not.
class Use {
 public:
  Use(c10::intrusive_ptr<Cell> cell, std::optional<Geometry> view)
      : cell_(std::move(cell)), view_(std::move(view)) {
    cell_->add_use();
  }
  Use(Use&& other) noexcept = default;
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  Use& operator=(Use&&) = delete;
  ~Use() { release(); }

  at::Tensor take();
  void release();
  const Cell& cell() const { return *cell_; }

 private:
  friend class Cell;
  c10::intrusive_ptr<Cell> cell_;
  std::optional<Geometry> view_;
  int64_t taken_in_ = -1;  // the backward in which it has taken the cell's made_ tensor
};

}  // namespace memopt::saved
