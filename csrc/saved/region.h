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
// Backward may reach a region from several threads. Those of one backward wait for the recompute
// that one of them runs. But a thread that is inside a recompute itself never waits, since others
// may wait for it: it recomputes what it needs.
//
// A region costs what its arguments keep alive, about 0.5 KB, and about 200 bytes per saved tensor.
#pragma once

#include <c10/core/SafePyObject.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "arguments.h"
#include "context_state.h"
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

  // Whether PyTorch's hooks that copy what is written (allow_mutation_on_saved_tensors) are active.
  virtual bool hooks_copy_on_write() const = 0;

  // For error messages.
  virtual std::string name() const = 0;
  virtual std::string argument_name(size_t tensor) const = 0;
  virtual std::string diagnosis() const = 0;
};

struct RegionOptions {
  bool preserve_rng_state = true;
  bool check_metadata = true;
  bool early_stop = true;
};

// The op of known name whose arguments were packed last, from the tensor `first` on, and how many
// calls of such ops there had been with it.
struct LastOp {
  const void* op = nullptr;
  size_t call = 0;
  size_t first = 0;
  std::vector<int8_t> numbers;
};

class Region : public Packer {
 public:
  // `fate_of_arguments` may be null: the tensors are saved for backward as usual.
  Region(std::unique_ptr<Function> function, const std::vector<ArgumentTensor>& tensors,
         FateOfArguments* fate_of_arguments, RegionOptions options);

  ~Region() override;

  // Runs when the last slot goes and a running backward may still look for the region: the object
  // itself stays until that has ended.
  void release_resources() override;

  // How many there are, to see that they die with their graph.
  static int64_t live();

  // Called with what the first forward saves.
  c10::intrusive_ptr<Handle> pack(const at::Tensor& tensor) override;
  bool is_of_region() const override { return true; }
  bool packs_afterwards(size_t) const override { return true; }
  void note_arguments(const void* op, Numbers numbers) override;
  bool pack_arguments(const void* op, OpArguments arguments) override;

  // To be called when the first forward has ended, unless by an exception.
  void forward_ended();

  // The tensor that belongs into `slot`, from the recompute that the running backward has made of
  // this region, or from a new one. For the caller to keep: a second call recomputes.
  at::Tensor fill(Slot& slot);

 private:
  // The running backward, or the torch.utils.checkpoint.GraphExecGroup that several share.
  struct Task {
    int64_t id;
    std::optional<c10::SafePyObject> group;

    static Task current();
  };
  using Slots = std::vector<c10::intrusive_ptr<Slot>>;

  // All slots that live, by index, with an empty place for each that does not.
  Slots live_slots();
  // Those to fill in the recompute that `slot` asks for.
  Slots wanted(const Task& task, const Slot& slot);
  void recompute(const Task& task, Slots wanted);
  void put(Slot& slot, int64_t task, at::Tensor tensor);
  void forget(int64_t task);
  void check_arguments_unwritten() const;

  const RegionOptions options_;
  std::unique_ptr<Function> function_;
  Arguments arguments_;
  ContextState context_state_;

  // Guards what follows and the slots' tensors. Nothing is called, and no tensor dropped, under it.
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<Slot>> slots_;
  std::vector<Metadata> metadata_;
  size_t op_calls_ = 0;
  LastOp last_;
  bool forward_ended_ = false;
  // Tasks for which every wanted slot was filled once. A group is kept alive, so that its id stays
  // its own.
  std::unordered_map<int64_t, std::optional<c10::SafePyObject>> recomputed_in_;
  // Recomputes that are running, by task, and the news that one has ended.
  std::unordered_map<int64_t, int> running_;
  std::condition_variable ended_;
};

}  // namespace memopt::saved
