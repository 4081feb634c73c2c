// What ATen asks of an accelerator: random generators, pinned memory, storages that grow.
#include <ATen/Utils.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <cstring>

#include "generator.h"

namespace sim {

Generator::Generator(c10::DeviceIndex device)
    : c10::GeneratorImpl(c10::Device(kType, device),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void Generator::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  TORCH_CHECK(state.numel() == sizeof(uint64_t[2]), "sim: a generator's state is 16 bytes, got ",
              state.numel());
  const auto* bytes = static_cast<const char*>(state.data());
  std::memcpy(&seed_, bytes, sizeof(seed_));
  std::memcpy(&offset_, bytes + sizeof(seed_), sizeof(offset_));
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  at::Tensor state = at::detail::empty_cpu({sizeof(uint64_t[2])}, at::kByte);
  auto* bytes = static_cast<char*>(state.data_ptr());
  std::memcpy(bytes, &seed_, sizeof(seed_));
  std::memcpy(bytes + sizeof(seed_), &offset_, sizeof(offset_));
  return state.getIntrusivePtr();
}

Generator* Generator::clone_impl() const {
  auto* copy = new Generator(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

at::Generator default_generator(c10::DeviceIndex device) {
  static const auto* all = new std::vector<at::Generator>{at::make_generator<Generator>(0),
                                                          at::make_generator<Generator>(1)};
  return all->at(static_cast<size_t>(device < 0 ? current_device() : device));
}

Draw draw(const at::Generator& generator) {
  constexpr uint64_t kStep = 4;  // the numbers of one Philox call, as PyTorch's kernels move on
  auto* own = at::check_generator<Generator>(generator);
  const std::lock_guard<std::mutex> lock(own->mutex_);
  const Draw drawn{own->current_seed(), own->get_offset()};
  own->set_offset(drawn.offset + kStep);
  return drawn;
}

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex to) const override { exchange_device(to); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    return exchange_device(to);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return to < 0 ? current_device() : exchange_device(to);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kType); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static const auto* all =
        new std::vector<at::Generator>{default_generator(0), default_generator(1)};
    return all->at(static_cast<size_t>(device < 0 ? current_device() : device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const auto device = storage.device().index();
    const auto before = exchange_device(device);
    c10::DataPtr grown = storage.allocator()->allocate(bytes);
    exchange_device(before);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) {
      char* to = hidden(grown.get());
      const char* from = hidden(storage.data());
      enqueue(current_stream(device),
              {Kind::kDeviceToDevice, "resize", [=] { std::memcpy(to, from, kept); }});
    }
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace sim
