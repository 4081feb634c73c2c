// The third fate, checkpointed: a call whose saved tensors are dropped and made again in backward
// (Chen et al., "Training deep nets with sublinear memory cost", 2016).
//
// While the region's forward runs, each tensor that autograd saves is exchanged for an empty slot.
// The first slot that backward opens runs the function again on the arguments that the region kept;
// the tensors that this second forward saves, in the same order, fill all slots that are still
// wanted, and it stops as soon as the last one is filled. Nothing is differentiated twice and
// backward is not re-entered, so torch.autograd.grad, double backward, nesting and hooks work as
// without a region.
//
// References point one way, from the autograd graph to slots to their region, which knows its slots
// weakly. So the graph dies by reference counting, and with it everything here.
//
// A region costs what its arguments keep alive, about 0.5 KB, and about 200 bytes per saved tensor.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "ambient.h"
#include "arguments.h"
#include "metadata.h"
#include "slot.h"

namespace memopt::saved {

// What the engine needs of the user's function and of everything it was called with but the
// tensors.
class Function {
 public:
  virtual ~Function() = default;

  // Calls the function again with `tensors` in the places of those it was called with, while what
  // autograd saves goes to `packer`. Returns when the function ends or an empty handle ends it.
  virtual void run(const std::vector<at::Tensor>& tensors, c10::intrusive_ptr<Packer> packer) = 0;

  // For error messages.
  virtual std::string name() const = 0;
  virtual std::string argument_name(size_t tensor) const = 0;
  virtual std::string diagnosis() const = 0;
};

struct RegionOptions {
  bool preserve_rng_state = true;
  bool check_metadata = true;
  bool early_stop = true;
  bool offload_to_cpu = false;
};

class Region : public Packer {
 public:
  Region(std::unique_ptr<Function> function, const std::vector<ArgumentTensor>& tensors,
         RegionOptions options);

  ~Region() override;

  // Runs when the last slot goes and a running backward may still look for the region: the object
  // itself stays until that has ended.
  void release_resources() override;

  // How many there are, to see that they die with their graph.
  static int64_t live();

  // Called with what the first forward saves.
  c10::intrusive_ptr<Handle> pack(const at::Tensor& tensor) override;

  // To be called when the first forward has ended, unless by an exception.
  void forward_ended();

  // The tensor that belongs into `slot`, from the recompute that the running backward has made of
  // this region, or from a new one. For the caller to keep: a second call recomputes.
  at::Tensor fill(Slot& slot);

 private:
  friend class Recompute;

  std::vector<c10::intrusive_ptr<Slot>> wanted(int64_t task, Slot& slot);
  void recompute(int64_t task, std::vector<c10::intrusive_ptr<Slot>> wanted);
  void check_arguments_unwritten() const;
  std::vector<c10::intrusive_ptr<Slot>> live_slots();
  void forget(int64_t task);

  const RegionOptions options_;
  std::unique_ptr<Function> function_;
  Arguments arguments_;
  Ambient ambient_;

  std::mutex slots_mutex_;  // of the two vectors; never held while anything else is called
  std::vector<c10::weak_intrusive_ptr<Slot>> slots_;
  std::vector<Metadata> metadata_;
  bool forward_ended_ = false;

  // Backward may reach one region from several threads: one recomputes, the others wait.
  std::recursive_mutex recompute_mutex_;
  std::unordered_set<int64_t> recomputed_in_;
};

}  // namespace memopt::saved
