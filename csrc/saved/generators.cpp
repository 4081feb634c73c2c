#include "generators.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <cstring>

namespace memopt::saved {

namespace {

at::CPUGeneratorImpl& cpu_generator() {
  return *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
}

// Devices that hold no data, such as meta, draw no numbers.
bool has_generator(c10::Device device) {
  return device.is_cuda() || device.is_xpu() || device.is_mps() || device.is_mtia() ||
         device.is_hpu() || device.is_privateuseone();
}

// The current accelerator device, unless asking would start an accelerator that is not in use.
std::optional<c10::Device> accelerator_in_use() {
  // Asked once: to ask costs more than the rest of a snapshot, and a process has one kind.
  static const auto type = at::getAccelerator(/*checked=*/false);
  if (!type.has_value()) return std::nullopt;
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
  if (!hooks.isAvailable()) return std::nullopt;
  const auto index = hooks.getCurrentDevice();
  if (index < 0 || !hooks.hasPrimaryContext(index)) return std::nullopt;
  return c10::Device(*type, index);
}

std::recursive_mutex& turn() {
  static std::recursive_mutex mutex;
  return mutex;
}

}  // namespace

CpuGeneratorState CpuGeneratorState::now() {
  auto& generator = cpu_generator();
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  return {generator.engine().data(), generator.next_float_normal_sample(),
          generator.next_double_normal_sample()};
}

void CpuGeneratorState::set() const {
  auto& generator = cpu_generator();
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  at::mt19937 engine;
  engine.set_data(this->engine);
  generator.set_engine(engine);
  generator.set_next_float_normal_sample(next_float_normal);
  generator.set_next_double_normal_sample(next_double_normal);
}

bool CpuGeneratorState::operator==(const CpuGeneratorState& other) const {
  return engine.left_ == other.engine.left_ && engine.next_ == other.engine.next_ &&
         engine.seed_ == other.engine.seed_ &&
         std::memcmp(engine.state_.data(), other.engine.state_.data(), sizeof(engine.state_)) ==
             0 &&
         next_float_normal == other.next_float_normal &&
         next_double_normal == other.next_double_normal;
}

DeviceGeneratorState DeviceGeneratorState::now(c10::Device device) {
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  try {
    return {device, generator.current_seed(), generator.get_offset()};
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "checkpoint: the state of the random numbers of ", device,
                " cannot be read, as it is while a CUDA graph is captured. Where the region draws "
                "none (no dropout), pass preserve_rng_state=False. PyTorch says: ",
                error.what_without_backtrace());
  }
}

void DeviceGeneratorState::set() const {
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);  // sets the offset to 0
  generator.set_offset(offset);
}

bool DeviceGeneratorState::operator==(const DeviceGeneratorState& other) const {
  return device == other.device && seed == other.seed && offset == other.offset;
}

Generators Generators::capture(const Devices& devices) {
  Generators generators;
  generators.cpu_ = std::make_unique<CpuGeneratorState>(CpuGeneratorState::now());
  Devices involved;
  std::copy_if(devices.begin(), devices.end(), std::back_inserter(involved), has_generator);
  if (const auto current = accelerator_in_use()) involved.push_back(*current);
  std::sort(involved.begin(), involved.end(), [](c10::Device a, c10::Device b) {
    return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
  });
  const auto end = std::unique(involved.begin(), involved.end());
  for (auto device = involved.begin(); device != end; ++device) {
    generators.devices_.push_back(DeviceGeneratorState::now(*device));
  }
  return generators;
}

void Generators::forget_unmoved() {
  if (cpu_ != nullptr && *cpu_ == CpuGeneratorState::now()) cpu_.reset();
  const auto unmoved = [](const DeviceGeneratorState& then) {
    return then == DeviceGeneratorState::now(then.device);
  };
  devices_.erase(std::remove_if(devices_.begin(), devices_.end(), unmoved), devices_.end());
}

GeneratorsGuard::GeneratorsGuard(const Generators& then) {
  if (then.cpu_ == nullptr && then.devices_.empty()) return;
  turn_ = std::unique_lock<std::recursive_mutex>(turn());
  if (then.cpu_ != nullptr) {
    cpu_before_ = std::make_unique<CpuGeneratorState>(CpuGeneratorState::now());
  }
  for (const auto& state : then.devices_) {
    devices_before_.push_back(DeviceGeneratorState::now(state.device));
  }
  if (then.cpu_ != nullptr) then.cpu_->set();
  for (const auto& state : then.devices_) state.set();
}

GeneratorsGuard::~GeneratorsGuard() {
  if (cpu_before_ != nullptr) cpu_before_->set();
  for (const auto& state : devices_before_) state.set();
}

}  // namespace memopt::saved
