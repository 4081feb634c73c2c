// Random generators: what they were when a region's forward began, to draw the same numbers again.
//
// A generator of an accelerator is 16 bytes, seed and offset (Philox; Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", 2011). The CPU's is a Mersenne Twister of 2.5 KB. A
// generator that forward did not use is forgotten and left alone by the recompute: besides the
// time, that keeps recomputes that draw nothing out of each other's way when several threads run
// backward at once.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace memopt::saved {

using Devices = c10::SmallVector<c10::Device, 2>;

struct CpuGeneratorState {
  at::mt19937_data_pod engine;
  // Box-Muller makes normal numbers in pairs; the second one waits here.
  std::optional<float> next_float_normal;
  std::optional<double> next_double_normal;

  static CpuGeneratorState now();
  void set() const;
  bool operator==(const CpuGeneratorState& other) const;
};

struct DeviceGeneratorState {
  c10::Device device;
  uint64_t seed;
  uint64_t offset;

  static DeviceGeneratorState now(c10::Device device);
  void set() const;
  bool operator==(const DeviceGeneratorState& other) const;
};

class Generators {
 public:
  // The generators of the CPU, of `devices`, and of the accelerator device in use.
  static Generators capture(const Devices& devices);

  // Keep only those that have moved since.
  void forget_unmoved();
  bool is_empty() const { return cpu_ == nullptr && devices_.empty(); }

 private:
  friend class GeneratorsGuard;
  std::unique_ptr<CpuGeneratorState> cpu_;
  std::vector<DeviceGeneratorState> devices_;
};

// Sets generators to what they were, and at the end of the scope back to what they are now. A
// generator is shared by the process: two threads that replayed one at once would draw each other's
// numbers, so they take turns. One turn serves all generators, so that there is no order of taking
// them to be got wrong. Not to be entered while holding a lock that such a thread may want.
class GeneratorsGuard {
 public:
  explicit GeneratorsGuard(const Generators& then);
  ~GeneratorsGuard();
  GeneratorsGuard(const GeneratorsGuard&) = delete;
  GeneratorsGuard& operator=(const GeneratorsGuard&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> turn_;
  std::unique_ptr<CpuGeneratorState> cpu_before_;
  std::vector<DeviceGeneratorState> devices_before_;
};

}  // namespace memopt::saved
