#include "buffered.h"

#include <unordered_set>

#include "device_buffers.h"

namespace memopt::saved {

namespace {

// Its tensor of bytes is the copy in the slab, or, where that had no room, the storage itself.
class Buffered : public Handle {
 public:
  Buffered(const at::Tensor& bytes, std::shared_ptr<DeviceBuffers> device)
      : device_(std::move(device)),
        storage_(name_of_storage(bytes)),
        claim_(device_->begin(bytes)) {
    if (claim_.lease == nullptr) kept_ = bytes;
  }

  ~Buffered() override { release_resources(); }

  void release_resources() override {
    if (device_ == nullptr) return;
    kept_.reset();
    device_->taken()->forget(storage_);
    const bool has_lease = std::exchange(claim_.lease, nullptr) != nullptr;
    device_->end(claim_, has_lease);
    device_.reset();
  }

  at::Tensor restore() override {
    if (kept_.defined()) return kept_;
    TORCH_CHECK(written_.current_version() == 0, "memopt: what a region was given for its ",
                "recompute must not be written in place while its graph is alive, got version ",
                written_.current_version(), " of a tensor of ", claim_.bytes, " bytes");
    if (!storage_.expired()) device_->found_elsewhere(storage_, claim_.bytes);
    auto tensor = claim_.lease->tensor();
    tensor.unsafeGetTensorImpl()->set_version_counter(written_);
    return tensor;
  }

 private:
  std::shared_ptr<DeviceBuffers> device_;
  StorageName storage_;
  DeviceBuffers::Claim claim_;
  at::Tensor kept_;
  // Of every tensor that is restored: they are one memory.
  c10::VariableVersion written_{/*version=*/0};
};

}  // namespace

// Is offered whole storages, as bytes.
class CopyToSlab : public Fate {
 public:
  explicit CopyToSlab(std::shared_ptr<Buffers> buffers) : buffers_(std::move(buffers)) {}

  c10::intrusive_ptr<Handle> take(const at::Tensor& bytes) override {
    if (bytes.is_meta() || bytes.numel() == 0) return {};
    auto device = buffers_->of(bytes.device());
    if (device == nullptr) return {};
    device->settle(nullptr);
    if (device->taken()->is_held(bytes)) return {};  // as was found out just now
    return c10::make_intrusive<Buffered>(bytes, std::move(device));
  }

 private:
  const std::shared_ptr<Buffers> buffers_;
};

c10::intrusive_ptr<Fate> Buffers::fate(OncePerStorage::IsHeld is_held) {
  return c10::make_intrusive<OncePerStorage>(c10::make_intrusive<CopyToSlab>(shared_from_this()),
                                             is_held, /*min_bytes=*/1, taken_);
}

std::shared_ptr<DeviceBuffers> Buffers::of(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_removed_) return nullptr;
  auto& buffers = devices_[device];
  if (buffers == nullptr) buffers = std::make_shared<DeviceBuffers>(device, taken_);
  return buffers;
}

std::vector<std::pair<c10::Device, std::shared_ptr<DeviceBuffers>>> Buffers::all() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {devices_.begin(), devices_.end()};
}

std::vector<std::pair<c10::Device, BufferStats>> Buffers::stats() const {
  std::vector<std::pair<c10::Device, BufferStats>> found;
  for (const auto& [device, buffers] : all()) found.emplace_back(device, buffers->stats());
  return found;
}

void Buffers::settle(const std::vector<at::Tensor>& constant) {
  std::unordered_set<c10::StorageImpl*> storages;
  for (const auto& tensor : constant) {
    if (is_plain(tensor)) storages.insert(storage_of(tensor));
  }
  for (const auto& [_, buffers] : all()) buffers->settle(&storages);
}

void Buffers::remove() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_removed_ = true;
  }
  for (const auto& [_, buffers] : all()) buffers->remove();
}

}  // namespace memopt::saved
