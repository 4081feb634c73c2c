// A slot stands in the autograd graph for a tensor that a region saved.
#pragma once

#include <c10/util/SmallVector.h>

#include <optional>

#include "handle.h"
#include "version.h"

namespace memopt::saved {

class Region;

class Slot : public Handle {
 public:
  Slot(c10::intrusive_ptr<Region> region, size_t index);
  ~Slot() override;

  at::Tensor restore() override;

  // Runs when the graph lets go of the slot; the object itself stays until its region goes.
  void release_resources() override;

  // A tensor belongs to the backward (graph task) that it was made again for, and leaves the slot
  // when that backward uses it. The region calls these, under its lock; what put() returns is for
  // the caller to drop after it.
  struct Rebuilt {
    int64_t task;
    at::Tensor tensor;
    Version version;
  };
  std::optional<Rebuilt> put(int64_t task, at::Tensor tensor);
  std::optional<Rebuilt> take(int64_t task);

  size_t index() const { return index_; }

 private:
  c10::intrusive_ptr<Region> region_;
  size_t index_;
  c10::SmallVector<Rebuilt, 1> rebuilt_;
};

}  // namespace memopt::saved
