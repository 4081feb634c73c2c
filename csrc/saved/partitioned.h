// The fate of a region's arguments that are identical on a group of ranks (tensor parallelism):
// each rank keeps its part of them, and backward gathers the parts.
//
// The parts of one region's tensors lie in one slab (slab.h), whatever their dtypes, so that a
// region needs one all-gather. The slab itself is a tensor that another fate may take (the host, a
// file), and is kept otherwise.
//
// The tensors are chosen by facts that are the same on all ranks, and were found equal
// (agreement.h). It never depends on whether something is still alive, nor on any moment of time:
// ranks differ in these, and would then wait for each other for good. A tensor that as many regions
// of one forward get as there are ranks (a mask) is kept whole, for all of their calls to come: as
// many parts are no less.
//
// When: all regions that one thread calls for a group, from one backward to the next, are a chain.
// A region's backward gathers, and begins the gather of the region called before it in the chain
// (if that has gone through fewer backwards), so that the next transfer overlaps this recompute.
// So the starts follow from the orders of calls and of backwards, which are the same on all ranks.
// A region that is gone by then is gathered all the same, with nothing in it: it may live on
// another rank. At most one gather of a thread is ahead, and costs the memory of one region's
// tensors.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agreement.h"
#include "arguments.h"
#include "once_per_storage.h"
#include "ranks.h"

namespace memopt::saved {

// How the arguments of one call are partitioned.
struct PartitionOfCall {
  std::shared_ptr<Ranks> ranks;
  std::shared_ptr<Agreement> agreement;  // of the module or function that is called
  std::string structure;                 // of the arguments
  bool compares_every_call = false;
  c10::intrusive_ptr<Fate> of_slab;  // may be empty
  OncePerStorage::IsHeld is_held;

  // A tensor, by number, that turned out to differ between ranks, and its share of the bytes.
  using Differing = std::vector<std::pair<size_t, double>>;
  // Called when tensors turn out so.
  std::function<void(const Differing&)> report;
};

c10::intrusive_ptr<FateOfArguments> partition(PartitionOfCall call);

}  // namespace memopt::saved
