#include "allocations.h"

#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace memopt::python {

namespace {

namespace py = pybind11;
namespace profiler = torch::profiler::impl;

int64_t now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

// The outermost operator that runs in this thread, by a number of its own; 0: none. What an
// operator allocates and frees inside itself has the same one at both ends.
thread_local uint64_t t_operator = 0;
thread_local int t_depth = 0;
std::atomic<uint64_t> operators{0};

bool is_operator(const at::RecordFunction& function) {
  const char* name = function.name();
  return std::strncmp(name, "aten::", 6) == 0 || std::strncmp(name, "memopt::_", 9) == 0;
}

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function) {
  if (is_operator(function) && t_depth++ == 0) t_operator = ++operators;
  return nullptr;
}

void end_operator(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  // None is left where the listener was taken away inside the operator.
  if (t_depth > 0 && is_operator(function) && --t_depth == 0) t_operator = 0;
}

// (nanoseconds, address, bytes or minus bytes where it ends, operator)
using Event = std::tuple<int64_t, uintptr_t, int64_t, uint64_t>;

// A profiler to PyTorch, whose allocators tell the profiler of a thread. A profiler's type, since
// PyTorch takes whatever is in this place for one.
class Listener : public profiler::ProfilerStateBase {
 public:
  Listener()
      : ProfilerStateBase(profiler::ProfilerConfig(
            profiler::ProfilerState::CPU, /*report_input_shapes=*/false, /*profile_memory=*/true)) {
  }

  profiler::ActiveProfilerType profilerType() override {
    return profiler::ActiveProfilerType::LEGACY;
  }

  void reportMemoryUsage(void* address, int64_t nbytes, size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device device) override {
    if (!device.is_cpu()) return;
    const std::lock_guard<std::mutex> lock(state_mutex_);
    events_.emplace_back(now(), reinterpret_cast<uintptr_t>(address), nbytes, t_operator);
  }

  std::vector<Event> take() {
    const std::lock_guard<std::mutex> lock(state_mutex_);
    return std::move(events_);
  }

 private:
  std::vector<Event> events_;
};

class Allocations {
 public:
  void start() {
    TORCH_CHECK(!profiler::profilerEnabled(),
                "memopt: bytes on the CPU can be counted where no profiler is on, got one");
    listener_ = std::make_shared<Listener>();
    profiler::ProfilerStateBase::push(listener_);
    callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(begin_operator, end_operator)
                                               .scopes({at::RecordScope::FUNCTION}));
    marks_ = {now()};
  }

  void mark() { marks_.push_back(now()); }

  std::pair<std::vector<Event>, std::vector<int64_t>> stop() {
    at::removeCallback(callback_);
    profiler::ProfilerStateBase::pop(/*global=*/false);
    t_depth = 0;
    t_operator = 0;
    return {listener_->take(), std::move(marks_)};
  }

 private:
  std::shared_ptr<Listener> listener_;
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
  std::vector<int64_t> marks_;
};

}  // namespace

void register_allocations(py::module_& m) {
  py::class_<Allocations>(m, "Allocations", "What the CPU's allocator does in one thread.")
      .def(py::init())
      .def("start", &Allocations::start)
      .def("mark", &Allocations::mark, "Notes this moment.")
      .def("stop", &Allocations::stop,
           "Returns the events, each as (nanoseconds, address, bytes or minus bytes where it ends, "
           "the outermost operator that ran or 0), and the moments: the beginning, and the marks.");
}

}  // namespace memopt::python
