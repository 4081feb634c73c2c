#include "offloaded.h"

#include <torch/csrc/autograd/engine.h>

#include "current.h"
#include "tensor_device.h"

namespace memopt::saved {

namespace {

using offload::Ticket;

// -1: none pretended.
std::atomic<int> pretended{-1};

// How much of what one scope was offered is away.
struct Account {
  std::atomic<size_t> away = 0;  // now, in bytes
  std::atomic<bool> has_warned = false;
  // Of a scope with limits:
  std::mutex mutex;
  double offered = 0;  // bytes of all storages so far
  double taken = 0;    // of them: bytes that went
  std::unordered_map<c10::StorageImpl*, StorageName> staying;
};

class Offloaded : public Handle {
 public:
  Offloaded(const at::Tensor& bytes, std::shared_ptr<OffloadTarget> target,
            std::shared_ptr<OffloadDevice> device, std::shared_ptr<Account> account,
            const std::shared_ptr<offload::Sequence>& sequence)
      : target_(std::move(target)),
        account_(std::move(account)),
        device_(std::move(device)),
        storage_(name_of_storage(bytes)),
        keys_(bytes.key_set()),
        size_(bytes.numel()),
        ticket_(device_->engine->offload(memory_of(bytes), sequence)) {
    account_->away += size_;
    device_->watch_peak();
    give_pages_back_when_freed(bytes);
  }

  ~Offloaded() override { release_resources(); }

  void release_resources() override {
    if (ticket_ == nullptr) return;
    account_->away -= size_;
    ticket_.reset();
    target_->taken()->forget(storage_);
  }

  at::Tensor restore() override {
    const int64_t backward = torch::autograd::get_current_graph_task_id();
    device_->watch_peak();
    if (auto found = still_alive(); found.defined()) {
      device_->engine->found_elsewhere(*ticket_, backward);
      target_->taken()->remember_held(storage_);
      return found;
    }
    const auto restored = device_->engine->restore(*ticket_, backward);
    if (restored.is_first) end_with_backward(backward);
    return tensor_of(restored.memory);
  }

 private:
  // All bytes of the storage, if it has left and something else has held it all the same.
  at::Tensor still_alive() const {
    if (!device_->engine->is_away(*ticket_)) return {};
    auto storage = storage_.lock();
    if (!storage.defined() || storage->nbytes() != static_cast<size_t>(size_)) return {};
    auto bytes = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), keys_,
                                                          caffe2::TypeMeta::Make<uint8_t>());
    bytes.unsafeGetTensorImpl()->set_sizes_contiguous({size_});
    return bytes;
  }

  // Backward may end without asking for everything that was prefetched for it (inputs=).
  void end_with_backward(int64_t backward) const {
    if (backward == kNoBackward) return;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [engine = device_->engine, backward]() { engine->backward_ended(backward); });
  }

  std::shared_ptr<OffloadTarget> target_;
  std::shared_ptr<Account> account_;
  std::shared_ptr<OffloadDevice> device_;
  StorageName storage_;
  c10::DispatchKeySet keys_;
  int64_t size_;
  std::shared_ptr<Ticket> ticket_;
};

// Offers whole storages, as bytes.
class Offload : public Fate {
 public:
  // In the order of each thread, or of the one scope.
  enum class Order { thread, scope };
  Offload(const OffloadOptions& options, Order order)
      : options_(options), target_(OffloadTarget::get(options.directory)), order_(order) {}

  c10::intrusive_ptr<Handle> take(const at::Tensor& bytes) override {
    if (!can_leave(bytes)) return {};
    const auto size = static_cast<size_t>(bytes.numel());
    if (is_limited() && !has_room(bytes, size)) return {};
    auto device = target_->device(bytes.device());
    const auto sequence =
        order_ == Order::thread ? device->sequence_of_thread() : sequence_of_scope(bytes.device());
    return c10::make_intrusive<Offloaded>(bytes, target_, std::move(device), account_, sequence);
  }

 private:
  bool can_leave(const at::Tensor& bytes) const {
    if (bytes.is_meta() || bytes.numel() == 0) return false;
    return is_on_accelerator(bytes) || (target_->is_disk() && bytes.is_cpu());
  }

  bool is_limited() const { return options_.fraction < 1 || options_.max_bytes != SIZE_MAX; }

  bool has_room(const at::Tensor& bytes, size_t size) {
    const auto name = name_of_storage(bytes);
    // What stays for one op that saves it stays for all: else a copy would free nothing.
    const std::lock_guard<std::mutex> lock(account_->mutex);
    if (account_->staying.count(name._unsafe_get_target()) != 0) return false;
    account_->offered += static_cast<double>(size);
    const bool is_share =
        account_->taken + static_cast<double>(size) <= options_.fraction * account_->offered;
    if (is_share && account_->away + size <= options_.max_bytes) {
      account_->taken += static_cast<double>(size);
      return true;
    }
    if (size > options_.max_bytes) warn_of_cap(size);
    account_->staying.emplace(name._unsafe_get_target(), name);
    return false;
  }

  // Of each device, as each has its engine.
  std::shared_ptr<offload::Sequence> sequence_of_scope(c10::Device device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& sequence = sequences_[device];
    if (sequence == nullptr) {
      sequence = std::make_shared<offload::Sequence>();
      sequence->keep_last = options_.keep_last;
    }
    return sequence;
  }

  void warn_of_cap(size_t size) {
    if (account_->has_warned.exchange(true)) return;
    TORCH_WARN("offload: max_bytes must be at least the size of a tensor for it to be ",
               "offloaded, got max_bytes=", options_.max_bytes, " for a tensor of ", size,
               " bytes, which stays where it is");
  }

  const OffloadOptions options_;
  std::shared_ptr<OffloadTarget> target_;
  const Order order_;
  std::mutex mutex_;
  std::unordered_map<c10::Device, std::shared_ptr<offload::Sequence>> sequences_;
  std::shared_ptr<Account> account_ = std::make_shared<Account>();
};

}  // namespace

c10::intrusive_ptr<Fate> offload_in_scope(const OffloadOptions& options,
                                          OncePerStorage::IsHeld is_held) {
  return c10::make_intrusive<OncePerStorage>(
      c10::make_intrusive<Offload>(options, Offload::Order::scope), is_held, options.min_bytes,
      OffloadTarget::get(options.directory)->taken());
}

c10::intrusive_ptr<Fate> offload_of_region(const std::string& directory,
                                           OncePerStorage::IsHeld is_held) {
  OffloadOptions options;
  options.directory = directory;
  return c10::make_intrusive<OncePerStorage>(
      c10::make_intrusive<Offload>(options, Offload::Order::thread), is_held, /*min_bytes=*/1,
      OffloadTarget::get(directory)->taken());
}

bool is_on_accelerator(const at::Tensor& tensor) {
  const int pretend = pretended.load();
  if (pretend >= 0) return static_cast<int>(tensor.device().type()) == pretend;
  return !tensor.is_cpu() && !tensor.is_meta();
}

void pretend_accelerator(std::optional<c10::DeviceType> type) {
  pretended = type.has_value() ? static_cast<int>(*type) : -1;
}

}  // namespace memopt::saved
