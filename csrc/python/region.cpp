#include "region.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "../saved/flags.h"
#include "../saved/region.h"
#include "call.h"
#include "call_scopes.h"
#include "fates.h"
#include "hooks.h"
#include "modules_reached.h"
#include "offload.h"
#include "partition.h"
#include "scope.h"
#include "settings.h"

namespace memopt::python {

namespace {

namespace py = pybind11;

// Where nothing would be saved, or what is saved cannot be exchanged, a region is the plain call.
bool is_plain_call() {
  // Set while a transform of torch.func runs; those forbid saved-tensor hooks.
  constexpr auto kTransform = c10::DispatchKey::FuncTorchDynamicLayerFrontMode;
  return saved::flags().disabled || !at::GradMode::is_enabled() ||
         torch::jit::tracer::isTracing() || c10::impl::tls_is_dispatch_key_included(kTransform);
}

void count_pass(const Settings& settings, const py::object& owner, int step) {
  if (!settings.on_pass.is_none()) settings.on_pass(owner, step);
}

// What becomes of the tensors among a call's arguments; empty: they are saved as usual.
c10::intrusive_ptr<saved::FateOfArguments> fate_of_call(const Settings& settings, const Call& call,
                                                        const py::object& subject) {
  if (!settings.takes_arguments()) return {};
  // A region around this one drops its arguments: to take them would free nothing.
  const auto around = active_hooks();
  if (around.defined() && around->is_of_region()) return {};
  if (settings.partition == nullptr) return saved::for_each_argument(settings.arguments);
  return partition_of_call(*settings.partition, settings.arguments, settings.check_partition, call,
                           subject);
}

struct Begun {
  c10::intrusive_ptr<saved::Region> region;
  ModelScope scope;
};

// `opens_scope`: fn does so itself when it is run again.
Begun begin(const py::object& fn, const py::tuple& args, const py::dict& kwargs,
            const py::object& settings_object, const py::object& owner, bool opens_scope = false) {
  const auto& settings = settings_object.cast<Settings&>();
  auto call = std::make_unique<Call>(fn, args, kwargs, settings_object, owner);
  auto& made = *call;
  const auto fate = fate_of_call(settings, made, owner.is_none() ? fn : owner);
  auto region = c10::make_intrusive<saved::Region>(std::move(call), made.tensors(), fate.get(),
                                                   settings.options);
  made.release_tensors();
  const auto scope = made.scope();
  if (opens_scope) made.leave_scope_to_function();
  return {std::move(region), scope};
}

// A call whose saved tensors go to the region.
py::object call_inside(const Begun& begun, const Settings& settings, const py::object& fn,
                       const py::tuple& args, const py::dict& kwargs) {
  // A region that is nested in one that is recomputed is part of that recompute.
  const bool first = !saved::flags().recomputing;
  const saved::FlagsGuard flags({/*checkpointing=*/first, /*recomputing=*/!first, false});
  const HooksGuard hooks(begun.region, settings.on_saved);
  const auto scope = same_scope(begun.scope);
  const CallScopesGuard calls;
  auto result = call_function(settings, fn, args, kwargs);
  if (!result) throw_python_error();
  return result;
}

py::object forward(const py::object& fn, const py::tuple& args, const py::dict& kwargs,
                   const py::object& settings_object, const py::object& owner) {
  const auto& settings = settings_object.cast<Settings&>();
  const auto begun = begin(fn, args, kwargs, settings_object, owner);
  const bool first = !saved::flags().recomputing;
  if (first) count_pass(settings, owner, +1);
  try {
    auto result = call_inside(begun, settings, fn, args, kwargs);
    begun.region->forward_ended();
    return result;
  } catch (...) {
    if (first) count_pass(settings, owner, -1);
    throw;
  }
}

// A region of several calls, one after another, between which the user's code runs. It does not
// hold the region, which lives as long as something of it is wanted in backward.
class JoinedRegion {
 public:
  // `replay` is what the recompute calls, with the first call's arguments. It makes each call by
  // again().
  py::object begin_with(const py::object& replay, const py::object& fn, const py::tuple& args,
                        const py::dict& kwargs, const py::object& settings) {
    auto begun = begin(replay, args, kwargs, settings, py::none(), /*opens_scope=*/true);
    region_ = c10::weak_intrusive_ptr<saved::Region>(begun.region);
    scope_ = begun.scope;
    settings_ = settings;
    return call(begun, fn, args, kwargs);
  }

  // Whether a call from here would find all as the last one left it.
  bool goes_on() {
    if (!region_.has_value() || region_->expired() || scope_ != model_scope_here()) return false;
    return state_.is_unchanged();
  }

  py::object go_on(const py::object& fn, const py::tuple& args, const py::dict& kwargs) {
    TORCH_CHECK(region_.has_value(), "memopt: a joined region must have begun");
    auto region = region_->lock();
    TORCH_CHECK(region.defined(), "memopt: a joined region must be alive");
    return call({std::move(region), scope_}, fn, args, kwargs);
  }

  // Makes a call in the recompute, in a scope of its own as in forward: what a call returns has a
  // recipe inside of it alone, or the next call would not save it as it did.
  py::object again(const py::object& fn, const py::tuple& args, const py::dict& kwargs) const {
    const auto scope = same_scope(scope_);
    const CallScopesGuard calls;
    return fn(*args, **kwargs);
  }

 private:
  py::object call(const Begun& begun, const py::object& fn, const py::tuple& args,
                  const py::dict& kwargs) {
    auto result = call_inside(begun, settings_.cast<Settings&>(), fn, args, kwargs);
    state_ = saved::ContextState::capture({}, /*random=*/true);
    return result;
  }

  std::optional<c10::weak_intrusive_ptr<saved::Region>> region_;
  ModelScope scope_ = ModelScope::none;
  py::object settings_;
  saved::ContextState state_;
};

// run_region(fn, args, kwargs, settings, owner)
PyObject* run_region(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 5, "memopt: run_region takes 5 arguments, got ", count);
  auto *fn = arguments[0], *args = arguments[1], *kwargs = arguments[2];
  if (is_plain_call()) return PyObject_Call(fn, args, kwargs);
  const auto borrow = [](PyObject* object) { return py::reinterpret_borrow<py::object>(object); };
  try {
    return forward(borrow(fn), borrow(args), borrow(kwargs), borrow(arguments[3]),
                   borrow(arguments[4]))
        .release()
        .ptr();
  } catch (const std::system_error& error) {  // the directory that arguments wait in has gone
    set_os_error(error);
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {
    {"run_region", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_region)),
     METH_FASTCALL, "run_region(fn, args, kwargs, settings, owner): call fn as a region."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void register_region(py::module_& m) {
  register_hooks(m);
  register_partition(m);
  py::class_<Settings>(m, "RegionSettings", "How a region runs.")
      .def(py::init([](py::object call_uncompiled, py::object region_name,
                       py::object hold_statistics, bool preserve_rng_state, bool check_metadata,
                       bool early_stop, const py::object& arguments,
                       std::shared_ptr<Partition> partition, bool check_partition,
                       py::object on_pass, py::object on_saved, py::object again,
                       py::object diagnose) {
             return Settings{{preserve_rng_state, check_metadata, early_stop},
                             fate_of_arguments(arguments),
                             std::move(partition),
                             check_partition,
                             std::move(call_uncompiled),
                             std::move(region_name),
                             std::move(hold_statistics),
                             std::move(on_pass),
                             std::move(on_saved),
                             std::move(again),
                             std::move(diagnose)};
           }),
           py::kw_only(), py::arg("call_uncompiled"), py::arg("region_name"),
           py::arg("hold_statistics"), py::arg("preserve_rng_state") = true,
           py::arg("check_metadata") = true, py::arg("early_stop") = true,
           py::arg("arguments") = "keep", py::arg("partition") = py::none(),
           py::arg("check_partition") = false, py::arg("on_pass") = py::none(),
           py::arg("on_saved") = py::none(), py::arg("again") = py::none(),
           py::arg("diagnose") = py::none())
      .def(
          "with_early_stop",
          [](Settings settings, bool early_stop) {
            settings.options.early_stop = early_stop;
            return settings;
          },
          "The same but for whether a recompute ends as soon as it can.")
      .def(
          "with_again",
          [](Settings settings, py::object again) {
            settings.again = std::move(again);
            return settings;
          },
          "The same but for what a recompute calls in place of the function.");
  if (PyModule_AddFunctions(m.ptr(), functions) < 0) throw py::error_already_set();
  py::class_<JoinedRegion>(m, "JoinedRegion", "A region of several calls, one after another.")
      .def(py::init<>())
      .def("begin_with", &JoinedRegion::begin_with,
           "begin_with(replay, fn, args, kwargs, settings): call fn as the region's first call.")
      .def("goes_on", &JoinedRegion::goes_on,
           "Whether the region lives, and random generators and autocast are what the last call "
           "left.")
      .def("go_on", &JoinedRegion::go_on, "go_on(fn, args, kwargs): call fn as the next one.")
      .def("again", &JoinedRegion::again,
           "again(fn, args, kwargs): make one of the calls in the recompute.");

  py::class_<saved::Flags>(m, "Flags", "Where a thread is.")
      .def_readwrite("checkpointing", &saved::Flags::checkpointing)
      .def_readwrite("recomputing", &saved::Flags::recomputing)
      .def_readwrite("disabled", &saved::Flags::disabled);
  m.def("flags", [] { return saved::flags(); }, "The thread's flags as they are now.");
  m.def(
      "set_flags", [](saved::Flags set) { return std::exchange(saved::flags(), set); },
      "Set the thread's flags; returns what they were before.");
  m.def(
      "modules_reached",
      [](const py::args& roots) {
        py::list modules;
        for (auto& module : modules_reached({roots.begin(), roots.end()})) modules.append(module);
        return modules;
      },
      "The modules that calling one of the arguments can be seen to use.");
  m.def("live_regions", &saved::Region::live, "How many regions are alive.");
}

}  // namespace memopt::python
