#include "partitioned.h"

#include <ATen/ops/full.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "current.h"
#include "kept.h"
#include "slab.h"
#include "untracked.h"

namespace memopt::saved {

namespace {

// A region's place in its thread's order. It outlives the region.
struct Turn {
  int64_t slab_bytes;
  c10::Device device;
  int64_t backwards = 0;  // that it has gone through
  // A Partitioned; set before a backward can come.
  std::optional<c10::weak_intrusive_ptr<ArgumentsHandle>> region = std::nullopt;
};

// A tensor that regions of the chain got.
struct Seen {
  StorageName storage;
  int64_t offset;
  std::vector<std::pair<std::shared_ptr<Verdict>, size_t>> by;  // whom, and as which tensor
};

// The order of the regions that one thread calls for one group.
struct Line {
  static constexpr size_t kMostSeen = 1024;  // before those that are gone are left out

  std::mutex mutex;  // nothing is called, and no tensor dropped, under it
  std::shared_ptr<Turn> last;
  std::shared_ptr<Turn> ahead;  // whose gather was begun before its backward asked
  int64_t length = 0;
  bool chain_ended = false;  // by a backward
  std::unordered_map<c10::StorageImpl*, Seen> seen;

  // To be called before each region of the thread; returns the length of the chain.
  int64_t begin_region() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (chain_ended) {
      last.reset();
      seen.clear();
      length = 0;
      chain_ended = false;
    }
    return length;
  }

  // Returns the turn before it.
  std::shared_ptr<Turn> add(std::shared_ptr<Turn> turn) {
    const std::lock_guard<std::mutex> lock(mutex);
    ++length;
    return std::exchange(last, std::move(turn));
  }

  // Whether so many regions of the chain get the tensor that it had better stay whole, which all
  // of them are told for their next calls.
  bool is_repeated(const at::Tensor& tensor, const std::shared_ptr<Verdict>& verdict, size_t number,
                   int64_t ranks) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (seen.size() >= kMostSeen) {
      std::erase_if(seen, [](const auto& entry) { return entry.second.storage.expired(); });
    }
    // An entry names its storage weakly, so that no other one can have its address.
    auto& found = seen.try_emplace(storage_of(tensor),
                                   Seen{name_of_storage(tensor), tensor.storage_offset(), {}})
                      .first->second;
    if (found.offset != tensor.storage_offset()) return false;
    found.by.emplace_back(verdict, number);
    if (static_cast<int64_t>(found.by.size()) < ranks) return false;
    for (const auto& [of, as] : found.by) of->keep_whole(as);
    return true;
  }
};

std::shared_ptr<Line> line_of_thread(const std::shared_ptr<Ranks>& ranks) {
  struct Entry {
    std::weak_ptr<Ranks> ranks;
    std::shared_ptr<Line> line;
  };
  // With the thread it ends, and not before: whether its regions live differs between ranks.
  thread_local std::vector<Entry> lines;
  std::erase_if(lines, [](const Entry& entry) { return entry.ranks.expired(); });
  for (const auto& entry : lines) {
    if (entry.ranks.lock() == ranks) return entry.line;
  }
  lines.push_back({ranks, std::make_shared<Line>()});
  return lines.back().line;
}

class Partitioned : public ArgumentsHandle {
 public:
  struct Held {
    std::vector<size_t> places;  // by number: which of the geometries; kNone: not taken
    std::vector<Geometry> geometries;
    SlabLayout layout;
    c10::intrusive_ptr<Handle> slab;
  };
  static constexpr size_t kNone = static_cast<size_t>(-1);

  Partitioned(std::shared_ptr<Ranks> ranks, std::shared_ptr<Line> line, std::shared_ptr<Turn> turn,
              std::shared_ptr<Turn> before, Held held)
      : ranks_(std::move(ranks)),
        line_(std::move(line)),
        turn_(std::move(turn)),
        before_(std::move(before)),
        held_(std::move(held)) {}

  // Runs when the region goes; turns may know it longer.
  void release_resources() override {
    const auto dropped = take_ahead();
    held_.slab.reset();
    before_.reset();
    turn_.reset();
    line_.reset();
    ranks_.reset();
  }

  bool has(size_t number) const override { return held_.places[number] != kNone; }

  std::vector<at::Tensor> restore() override {
    const Unseen unseen;
    auto parts = from_slabs(held_.layout, begin()->wait(), held_.geometries);
    std::vector<at::Tensor> tensors(held_.places.size());
    for (size_t number = 0; number < tensors.size(); ++number) {
      if (has(number)) tensors[number] = std::move(parts[held_.places[number]]);
    }
    return tensors;
  }

 private:
  struct Ahead {
    int64_t backward;
    std::unique_ptr<Gather> gather;
  };

  static c10::intrusive_ptr<Partitioned> region_of(const std::shared_ptr<Turn>& turn) {
    if (turn == nullptr) return {};
    return c10::dynamic_intrusive_pointer_cast<Partitioned>(turn->region->lock());
  }

  std::optional<Ahead> take_ahead() {
    const std::lock_guard<std::mutex> lock(line_->mutex);
    return std::exchange(ahead_, std::nullopt);
  }

  // This region's gather, which may have begun before, and the start of the next.
  std::unique_ptr<Gather> begin() {
    const int64_t backward = torch::autograd::get_current_graph_task_id();
    std::shared_ptr<Turn> unused;
    bool looks_ahead = false;
    {
      const std::lock_guard<std::mutex> lock(line_->mutex);
      line_->chain_ended = true;
      if (line_->ahead != turn_) unused = line_->ahead;
      line_->ahead.reset();
      ++turn_->backwards;
      looks_ahead =
          backward != kNoBackward && before_ != nullptr && before_->backwards < turn_->backwards;
      if (looks_ahead) line_->ahead = before_;
    }
    drop_ahead_of(unused);
    auto ahead = take_ahead();
    std::unique_ptr<Gather> gather;
    // One of another backward may have failed with it, one of another stream is that one's memory.
    if (ahead.has_value() && ahead->backward == backward &&
        ahead->gather->stream() == current_stream(turn_->device)) {
      gather = std::move(ahead->gather);
    } else {
      gather = ranks_->gather(held_.slab->restore());
    }
    if (looks_ahead) begin_before(backward);
    return gather;
  }

  void begin_before(int64_t backward) {
    const auto region = region_of(before_);
    // In place of a region that is gone NaN of every type, which a rank that has it cannot use.
    auto slab = region.defined() ? region->held_.slab->restore()
                                 : at::full({before_->slab_bytes}, 0xFF,
                                            at::TensorOptions(before_->device).dtype(at::kByte));
    auto gather = ranks_->gather(std::move(slab));
    if (!region.defined()) return;
    {
      const std::lock_guard<std::mutex> lock(line_->mutex);
      std::optional<Ahead> made(Ahead{backward, std::move(gather)});
      region->ahead_.swap(made);
    }
    // Backward may end without asking for it (inputs=), and the graph may live on.
    torch::autograd::Engine::get_default_engine().queue_callback([line = line_, turn = before_]() {
      {
        const std::lock_guard<std::mutex> lock(line->mutex);
        if (line->ahead != turn) return;
        line->ahead.reset();
      }
      drop_ahead_of(turn);
    });
  }

  static void drop_ahead_of(const std::shared_ptr<Turn>& turn) {
    const auto region = region_of(turn);
    if (region.defined()) const auto dropped = region->take_ahead();
  }

  std::shared_ptr<Ranks> ranks_;
  std::shared_ptr<Line> line_;
  std::shared_ptr<Turn> turn_;
  std::shared_ptr<Turn> before_;  // the turn before it in the chain
  Held held_;
  std::optional<Ahead> ahead_;  // under the line's mutex
};

class PartitionArguments : public FateOfArguments {
 public:
  explicit PartitionArguments(PartitionOfCall call) : call_(std::move(call)) {}

  c10::intrusive_ptr<ArgumentsHandle> take(const std::vector<ArgumentTensor>& tensors) override {
    const Unseen unseen;
    const auto line = line_of_thread(call_.ranks);
    const int64_t place = line->begin_region();
    auto candidates = candidates_among(tensors);
    const auto verdict = verdict_on(candidates, place);
    Partitioned::Held held{{}, {}, SlabLayout(call_.ranks->count()), {}};
    std::vector<at::Tensor> taken;
    for (size_t number = 0; number < candidates.size(); ++number) {
      const auto& tensor = candidates[number];
      held.places.push_back(Partitioned::kNone);
      if (!tensor.defined() || verdict->is_whole(number)) continue;
      if (!taken.empty() && taken[0].device() != tensor.device()) continue;
      if (line->is_repeated(tensor, verdict, number, call_.ranks->count())) continue;
      held.places.back() = taken.size();
      held.layout.add(static_cast<int64_t>(tensor.nbytes()));
      held.geometries.push_back(Geometry::of(tensor));
      taken.push_back(tensor);
    }
    if (taken.empty()) return {};
    const auto slab = make_slab(held.layout, call_.ranks->rank(), taken);
    if (call_.of_slab.defined()) held.slab = call_.of_slab->take(slab);
    if (!held.slab.defined()) held.slab = keep(slab);
    auto turn = std::make_shared<Turn>(Turn{held.layout.bytes, slab.device()});
    auto before = line->add(turn);
    auto region = c10::make_intrusive<Partitioned>(call_.ranks, line, turn, std::move(before),
                                                   std::move(held));
    turn->region.emplace(region);
    return region;
  }

 private:
  // Those that could be partitioned, in their places.
  std::vector<at::Tensor> candidates_among(const std::vector<ArgumentTensor>& tensors) const {
    std::vector<at::Tensor> candidates;
    candidates.reserve(tensors.size());
    for (const auto& argument : tensors) {
      const auto& tensor = argument.values;
      const bool takes = argument.may_leave_device && !tensor.is_inference() && is_plain(tensor) &&
                         has_memory(tensor) && is_one_range(tensor) &&
                         call_.ranks->takes(tensor.device()) && !is_held_by_its_graph(tensor) &&
                         !call_.is_held(tensor) && is_worth_it(tensor);
      candidates.push_back(takes ? tensor : at::Tensor());
    }
    return candidates;
  }

  bool is_worth_it(const at::Tensor& tensor) const {
    return static_cast<int64_t>(tensor.nbytes()) >= call_.ranks->count() * SlabLayout::kAlignment;
  }

  std::shared_ptr<Verdict> verdict_on(const std::vector<at::Tensor>& candidates, int64_t place) {
    auto verdict = call_.agreement->find(call_.structure);
    if (verdict != nullptr && !verdict->is_due() && !call_.compares_every_call) return verdict;
    const auto whole = compare(*call_.ranks, candidates, place);
    const bool is_first = verdict == nullptr;
    if (is_first) verdict = std::make_shared<Verdict>(std::vector<bool>(candidates.size()));
    double bytes = 0;
    for (const auto& tensor : candidates) {
      if (tensor.defined()) bytes += static_cast<double>(tensor.nbytes());
    }
    PartitionOfCall::Differing differing;
    for (size_t number = 0; number < candidates.size(); ++number) {
      const auto& tensor = candidates[number];
      if (!whole[number] || !verdict->keep_whole(number) || !tensor.defined()) continue;
      differing.emplace_back(number, static_cast<double>(tensor.nbytes()) / bytes);
    }
    if (is_first) call_.agreement->add(call_.structure, verdict);
    if (!differing.empty()) call_.report(differing);
    return verdict;
  }

  PartitionOfCall call_;
};

}  // namespace

c10::intrusive_ptr<FateOfArguments> partition(PartitionOfCall call) {
  return c10::make_intrusive<PartitionArguments>(std::move(call));
}

}  // namespace memopt::saved
