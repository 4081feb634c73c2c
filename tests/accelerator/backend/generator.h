// A counter-based generator, as accelerators have them: a seed and an offset, on the host.
#pragma once

#include <ATen/core/Generator.h>

#include "streams.h"

namespace sim {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device);

  static c10::DeviceType device_type() { return kType; }  // for at::check_generator

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  Generator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

at::Generator default_generator(c10::DeviceIndex device);

// The state of one kernel's numbers. The host moves the offset on when it queues the kernel.
struct Draw {
  uint64_t seed;
  uint64_t offset;
};
Draw draw(const at::Generator& generator);

}  // namespace sim
