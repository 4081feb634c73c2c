// The functions of control.h for ctypes, which lets go of the interpreter's lock while they run.
#include "control.h"

#include <atomic>
#include <map>
#include <mutex>
#include <sstream>

#include "fallback.h"
#include "generator.h"

namespace sim {

namespace {

struct Trace {
  std::mutex mutex;
  bool on = false;
  std::ostringstream lines;
};

Trace& tracing() {
  static auto* it = new Trace;
  return *it;
}

c10::Stream stream(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<int8_t>(device)), id);
}

// Text for Python: valid until the thread's next call.
const char* keep(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace

void trace(const c10::Stream& stream, const Task& task) {
  const std::lock_guard<std::mutex> lock(tracing().mutex);
  if (!tracing().on) return;
  tracing().lines << int(stream.device_index()) << ' ' << stream.id() << ' '
                  << static_cast<int>(task.kind) << ' ' << task.name << '\n';
}

namespace {

std::atomic<Fault> planted = Fault::none;

}  // namespace

void set_fault(Fault fault) {
  planted = fault;
}

Fault fault() {
  return planted;
}

}  // namespace sim

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))

SIM_EXPORT void sim_pause(int device, int64_t id, bool paused) {
  sim::pause_stream(sim::stream(device, id), paused);
}
SIM_EXPORT void sim_resume_all() {
  sim::resume_streams();
}
SIM_EXPORT void sim_delay(int device, int64_t id, int kind, double seconds) {
  sim::delay_stream(sim::stream(device, id), static_cast<sim::Kind>(kind), seconds);
}
SIM_EXPORT void sim_delay_all(int kind, double seconds) {
  sim::delay_all(static_cast<sim::Kind>(kind), seconds);
}
SIM_EXPORT void sim_random_delays(uint64_t seed, double most_seconds) {
  sim::random_delays(seed, most_seconds);
}
SIM_EXPORT void sim_patience(double seconds) {
  sim::set_patience(seconds);
}
SIM_EXPORT void sim_set_fault(int fault) {
  sim::set_fault(static_cast<sim::Fault>(fault));
}
SIM_EXPORT void sim_cover_operators() {
  sim::cover_operators();
}

SIM_EXPORT void sim_memory_counts(int device, int64_t* four) {
  const auto counts = sim::memory_counts(static_cast<int8_t>(device));
  four[0] = counts.allocated;
  four[1] = counts.peak;
  four[2] = counts.reservations;
  four[3] = counts.recorded;
}
SIM_EXPORT void sim_reset_peak(int device) {
  sim::reset_peak(static_cast<int8_t>(device));
}
SIM_EXPORT void sim_capacity(int device, int64_t bytes) {
  sim::set_capacity(static_cast<int8_t>(device), bytes);
}
SIM_EXPORT void sim_pinned_counts(int64_t* two) {
  const auto counts = sim::pinned_counts();
  two[0] = counts.allocated;
  two[1] = counts.reservations;
}
SIM_EXPORT void sim_pinning_works(bool works) {
  sim::set_pinning_works(works);
}
SIM_EXPORT void sim_pinned_strict(bool strict) {
  sim::set_pinned_strict(strict);
}

// seed and offset of a device's default generator
SIM_EXPORT void sim_generator_state(int device, uint64_t* two) {
  const auto generator = sim::default_generator(static_cast<int8_t>(device));
  two[0] = generator.current_seed();
  two[1] = generator.get_offset();
}
SIM_EXPORT void sim_set_generator_state(int device, uint64_t seed, uint64_t offset) {
  auto generator = sim::default_generator(static_cast<int8_t>(device));
  generator.set_current_seed(seed);
  generator.set_offset(offset);
}

SIM_EXPORT void sim_trace(bool on) {
  const std::lock_guard<std::mutex> lock(sim::tracing().mutex);
  sim::tracing().on = on;
  if (on) sim::tracing().lines.str("");
}
SIM_EXPORT const char* sim_trace_lines() {
  const std::lock_guard<std::mutex> lock(sim::tracing().mutex);
  return sim::keep(sim::tracing().lines.str());
}
SIM_EXPORT const char* sim_synchronised_calls() {
  std::ostringstream lines;
  for (const auto& [name, calls] : sim::synchronised_calls()) lines << name << ' ' << calls << '\n';
  return sim::keep(lines.str());
}
