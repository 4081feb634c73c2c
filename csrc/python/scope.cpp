#include "scope.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "../saved/scope.h"
#include "fates.h"
#include "hooks.h"

namespace memopt::python {

namespace {

namespace py = pybind11;
using c10::intrusive_ptr;

// One entered scope: its hooks and its registry of recipes, in the thread that entered it.
class OpenScope {
 public:
  explicit OpenScope(const intrusive_ptr<saved::Scope>& scope)
      : hooks_(scope, py::none()), scope_(scope) {
    if (scope_->registry() == nullptr) return;
    registries().push_back(scope_->registry());
    autograd::recipe_book() = scope_->registry();
  }
  // Scopes may be left in another order than they were entered, by generators for instance.
  ~OpenScope() {
    if (scope_->registry() == nullptr) return;
    auto& all = registries();
    all.erase(std::find(all.begin(), all.end(), scope_->registry()));
    autograd::recipe_book() = all.empty() ? nullptr : all.back();
  }
  OpenScope(const OpenScope&) = delete;
  OpenScope& operator=(const OpenScope&) = delete;

 private:
  // This thread's, in the order of entering.
  static std::vector<saved::RecipeRegistry*>& registries() {
    thread_local std::vector<saved::RecipeRegistry*> open;
    return open;
  }

  HooksGuard hooks_;
  intrusive_ptr<saved::Scope> scope_;
};

// It may be entered again, inside itself, and by several threads.
class SavedTensors {
 public:
  explicit SavedTensors(py::object policy) : policy_(std::move(policy)) { check_policy(policy_); }
  ~SavedTensors() {
    // Hooks belong to a thread: what another thread has entered and not left stays there.
    for (Entered& entered : entered_) {
      if (entered.thread != std::this_thread::get_id()) static_cast<void>(entered.scope.release());
    }
  }
  SavedTensors(const SavedTensors&) = delete;
  SavedTensors& operator=(const SavedTensors&) = delete;

  void enter() {
    std::unique_ptr<OpenScope> scope;
    // What is saved cannot be exchanged in transforms of torch.func, which forbid saved-tensor
    // hooks, nor in a traced graph, which would hold the handles.
    if (at::SavedTensorDefaultHooks::is_enabled() && !torch::jit::tracer::isTracing()) {
      auto policy = policy_of(policy_);
      auto outer = active_hooks();
      const auto* around = dynamic_cast<saved::Scope*>(outer.get());
      const bool is_repeated = policy.registry.get() == policy.fate.get() && around != nullptr &&
                               around->is_recipe_scope() &&
                               around->registry() == autograd::recipe_book();
      if (!is_repeated) {
        scope = std::make_unique<OpenScope>(c10::make_intrusive<saved::Scope>(
            std::move(policy.fate), std::move(policy.registry), std::move(outer)));
      }
    }
    entered_.push_back({std::this_thread::get_id(), std::move(scope)});
  }

  void exit(const py::args&) {
    const auto last = std::find_if(entered_.rbegin(), entered_.rend(), [](const Entered& entered) {
      return entered.thread == std::this_thread::get_id();
    });
    TORCH_CHECK(last != entered_.rend(),
                "memopt.saved_tensors(): a scope must be left once, by the thread that entered it, "
                "got an exit in a thread that has not entered it");
    entered_.erase(std::next(last).base());
  }

 private:
  struct Entered {
    std::thread::id thread;
    std::unique_ptr<OpenScope> scope;  // null where there was nothing to open
  };
  py::object policy_;
  std::vector<Entered> entered_;
};

}  // namespace

void register_scope(py::module_& m) {
  py::class_<SavedTensors>(m, "SavedTensors", "The scope of memopt.saved_tensors().")
      .def(py::init<py::object>())
      .def("__enter__", &SavedTensors::enter)
      .def("__exit__", &SavedTensors::exit);
  m.def("live_handles", &saved::Handle::live,
        "How many handles stand in for saved tensors, or are read by those that do.");
}

}  // namespace memopt::python
