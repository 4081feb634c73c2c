#include "scope.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "../autograd/made_again.h"
#include "../intercept/functions.h"
#include "../intercept/here.h"
#include "../intercept/key.h"
#include "../saved/flags.h"
#include "../saved/scope.h"
#include "compat.h"
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
      : hooks_(scope, py::none()), scope_(scope), grad_mode_(at::GradMode::is_enabled()) {
    if (scope_->registry() == nullptr) return;
    with_recipes().push_back(this);
    autograd::recipe_recorder() = scope_->registry();
    const auto are_innermost = [this] { return hooks_.are_innermost(); };
    if (scope_->is_alone()) registry().set_alone(are_innermost);
    if (scope_->is_recipe_scope()) registry().set_first(are_innermost);
  }
  // Scopes may be left in another order than they were entered, by generators for instance.
  ~OpenScope() {
    if (scope_->registry() == nullptr) return;
    registry().set_alone(nullptr);
    registry().set_first(nullptr);
    auto& all = with_recipes();
    all.erase(std::find(all.begin(), all.end(), this));
    autograd::recipe_recorder() = all.empty() ? nullptr : all.back()->scope_->registry();
  }
  OpenScope(const OpenScope&) = delete;
  OpenScope& operator=(const OpenScope&) = delete;

  // The one that makes recipes of what this thread saves now, or null.
  static OpenScope* making_recipes() {
    auto& all = with_recipes();
    return all.empty() || !all.back()->hooks_.are_innermost() ? nullptr : all.back();
  }

  // Whether making recipes is all it does.
  bool is_recipe_scope() const { return scope_->is_recipe_scope(); }
  bool has_grad_mode_of_now() const { return grad_mode_ == at::GradMode::is_enabled(); }

  saved::RecipeRegistry& registry() const { return *scope_->registry(); }

  bool functions_are_ours = false;
  bool is_of_model = false;

 private:
  // This thread's, in the order of entering.
  static std::vector<OpenScope*>& with_recipes() {
    thread_local std::vector<OpenScope*> open;
    return open;
  }

  HooksGuard hooks_;
  intrusive_ptr<saved::Scope> scope_;
  const bool grad_mode_;
};

// Whether saved tensors can be exchanged at all. Transforms of torch.func forbid saved-tensor
// hooks, and a traced graph would hold the handles.
bool can_open() {
  return at::SavedTensorDefaultHooks::is_enabled() &&
         !at::SavedTensorDefaultHooks::get_tls_state().is_tracing &&
         !torch::jit::tracer::isTracing();
}

std::unique_ptr<OpenScope> open_scope(Policy policy) {
  return std::make_unique<OpenScope>(c10::make_intrusive<saved::Scope>(
      std::move(policy.fate), std::move(policy.registry), active_hooks()));
}

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
    if (can_open()) {
      const auto outer = active_hooks();
      auto policy = policy_of(policy_, outer.defined() && outer->is_of_region());
      const auto* around = OpenScope::making_recipes();
      const bool is_repeated = policy.registry.get() == policy.fate.get() && around != nullptr &&
                               around->is_recipe_scope();
      if (!is_repeated) scope = open_scope(std::move(policy));
    }
    entered_.push_back({std::this_thread::get_id(), std::move(scope)});
  }

  void exit(const py::args& raised) {
    const auto last = std::find_if(entered_.rbegin(), entered_.rend(), [](const Entered& entered) {
      return entered.thread == std::this_thread::get_id();
    });
    TORCH_CHECK(last != entered_.rend(),
                "saved_tensors: a scope must be left once, by the thread that entered it, "
                "got an exit in a thread that has not entered it");
    const bool had_hooks = last->scope != nullptr;
    entered_.erase(std::next(last).base());
    if (had_hooks && raised.size() == 3 && compat::refuses_hooks(raised[1])) {
      TORCH_CHECK(
          false,
          "saved_tensors: torch.func.grad, vjp, jacrev and hessian must not "
          "be called inside this scope, memopt.recipes() or memopt.offload(), since PyTorch "
          "allows no saved tensor hooks around them");
    }
  }

 private:
  struct Entered {
    std::thread::id thread;
    std::unique_ptr<OpenScope> scope;  // null where there was nothing to open
  };
  py::object policy_;
  std::vector<Entered> entered_;
};

// In a scope that is open, PyTorch's functions are memopt's while this lives.
class FunctionsGuard {
 public:
  explicit FunctionsGuard(OpenScope* scope) : scope_(scope) {
    scope_->functions_are_ours = true;
    functions_.emplace();
  }
  ~FunctionsGuard() { scope_->functions_are_ours = false; }
  FunctionsGuard(const FunctionsGuard&) = delete;
  FunctionsGuard& operator=(const FunctionsGuard&) = delete;

 private:
  OpenScope* scope_;
  std::optional<intercept::Intercept> functions_;
};

// Makes is_in_model_scope() true while it lives. To be made where it is not.
class Inside {
 public:
  explicit Inside(bool functions) {
    auto* scope = OpenScope::making_recipes();
    if (scope == nullptr || !scope->is_recipe_scope() || !scope->has_grad_mode_of_now()) {
      auto registry = c10::make_intrusive<saved::RecipeRegistry>();
      opened_ = open_scope({registry, registry});
      opened_->is_of_model = true;
      scope = opened_.get();
    }
    if (functions) functions_.emplace(scope);
  }
  ~Inside() {
    const py::error_scope pending;  // what the scope frees may run Python
    functions_.reset();
    opened_.reset();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  std::unique_ptr<OpenScope> opened_;
  std::optional<FunctionsGuard> functions_;
};

// Whether what this thread saves now may have a recipe. Not where the grad mode is another than the
// scope began with: a reentrant checkpoint may be running its forward, whose recompute is in no
// scope, and both must compute the same.
bool recipes_are_on() {
  const auto* scope = OpenScope::making_recipes();
  return scope != nullptr && scope->has_grad_mode_of_now();
}

intercept::Here here() {
  if (!recipes_are_on()) return {};
  const auto* scope = OpenScope::making_recipes();
  return {&scope->registry(), scope->functions_are_ours};
}

// is_kept_anyway(tensor)
PyObject* kept_anyway(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  // A call with another argument is for the module's own forward to refuse.
  if (!THPVariable_Check(tensor)) Py_RETURN_FALSE;
  return PyBool_FromLong(intercept::is_kept_anyway(THPVariable_Unpack(tensor)) ? 1 : 0);
  END_HANDLE_TH_ERRORS
}

// functions_take(tensor)
PyObject* functions_take(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(tensor) || !here().functions || intercept::functions_are_paused())
    Py_RETURN_FALSE;
  // Under autocast modules and functions differ, in the dtype of a norm's output for one.
  const auto device = THPVariable_Unpack(tensor).device().type();
  return PyBool_FromLong(intercept::is_autocast_on(device) ? 0 : 1);
  END_HANDLE_TH_ERRORS
}

PyMethodDef scope_functions[] = {
    {"recipes_are_on",
     [](PyObject*, PyObject*) { return PyBool_FromLong(recipes_are_on() ? 1 : 0); }, METH_NOARGS,
     "Whether what this thread saves now may have a recipe."},
    {"is_kept_anyway", kept_anyway, METH_O, "Whether saving the tensor here would cost nothing."},
    {"functions_take", functions_take, METH_O,
     "Whether PyTorch's functions called here with the tensor are memopt's, as its modules are."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool is_in_model_scope(bool functions) {
  if (!can_open()) return true;  // as far as one can be
  const auto* around = OpenScope::making_recipes();
  return around != nullptr && around->is_recipe_scope() && around->has_grad_mode_of_now() &&
         (!functions || around->functions_are_ours);
}

std::shared_ptr<void> model_scope(bool functions) {
  return is_in_model_scope(functions) ? nullptr : std::make_shared<Inside>(functions);
}

ModelScope model_scope_here() {
  if (!recipes_are_on()) return ModelScope::none;
  const auto* scope = OpenScope::making_recipes();
  if (scope->functions_are_ours && !intercept::functions_are_paused()) return ModelScope::functions;
  return scope->is_of_model ? ModelScope::recipes : ModelScope::none;
}

std::shared_ptr<void> same_scope(ModelScope scope) {
  return scope == ModelScope::none ? nullptr : model_scope(scope == ModelScope::functions);
}

void register_scope(py::module_& m) {
  py::class_<SavedTensors>(m, "SavedTensors", "The scope of memopt.saved_tensors().")
      .def(py::init<py::object>())
      .def("__enter__", &SavedTensors::enter)
      .def("__exit__", &SavedTensors::exit);
  m.def("refuses_hooks", &compat::refuses_hooks,
        "Whether this is PyTorch's error for a transform of torch.func inside saved-tensor hooks.");
  m.def("live_handles", &saved::Handle::live,
        "How many handles stand in for saved tensors, or are read by those that do.");
  m.def(
      "makes_output_again", [] { return autograd::output_is_made_again(); },
      "Whether what this thread computes now is an op's output once more, for backward.");
  m.def(
      "keeps_arguments", [] { return saved::flags().keeping_arguments; },
      "Whether what this thread saves now is an argument of a region, and it is the region's.");
  m.attr("INTERCEPT_KEY") = c10::toString(intercept::kInterceptKey);
  m.def("begin_functions", &intercept::begin_functions,
        "From here on this thread's calls of PyTorch's functions are memopt's.");
  m.def("end_functions", &intercept::end_functions, "Ends what the last begin_functions began.");
  m.def("pause_functions", &intercept::pause_functions,
        "Whether this thread's calls are PyTorch's in any case; returns what was set before.");
  intercept::here = here;
  if (PyModule_AddFunctions(m.ptr(), scope_functions) < 0) throw py::error_already_set();
}

}  // namespace memopt::python
