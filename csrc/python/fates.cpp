#include "fates.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include "../saved/buffered.h"
#include "../saved/detached.h"
#include "../saved/kept.h"
#include "../saved/metadata.h"
#include "../saved/offloaded.h"
#include "../saved/untracked.h"
#include "../saved/unwritten.h"
#include "objects.h"
#include "offload.h"

namespace memopt::python {

namespace {

namespace py = pybind11;
using c10::intrusive_ptr;
using saved::Fate;
using saved::Handle;

constexpr const char* kKeep = "keep";
constexpr const char* kRecipe = "recipe";
constexpr const char* kCpu = "cpu";
constexpr const char* kDisk = "disk";

bool is_text(py::handle value, const char* text) {
  return PyUnicode_Check(value.ptr()) && PyUnicode_CompareWithASCIIString(value.ptr(), text) == 0;
}

bool is_built_in(py::handle value) {
  return is_text(value, kKeep) || is_text(value, kRecipe) || is_text(value, kCpu) ||
         is_text(value, kDisk) || py::isinstance<saved::OffloadOptions>(value);
}

bool is_fate_of_a_user(py::handle value) {
  return !PyUnicode_Check(value.ptr()) && !PyType_Check(value.ptr()) && py::hasattr(value, "pack");
}

c10::SafePyObject safe(py::handle object) {
  return {object.inc_ref().ptr(), getPyInterpreter()};
}

py::object wrap(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

const char* class_of(py::handle object) {
  return Py_TYPE(object.ptr())->tp_name;
}

// A guard for a user's code that packs and restores: it computes values, whatever modes are on.
struct Aside {
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard outside_transforms{saved::active_transforms()};
};

// What a user's pack() gave.
class UserHandle : public Handle {
 public:
  UserHandle(const at::Tensor& tensor, py::handle object)
      : packed_(saved::Metadata::of(tensor)), object_(safe(object)) {}

  at::Tensor restore() override {
    const py::gil_scoped_acquire gil;
    const Aside aside;
    const auto object = object_of(object_);
    const py::object restored = object.attr("restore")();
    TORCH_CHECK_TYPE(THPVariable_Check(restored.ptr()), "saved_tensors: restore() of ",
                     class_of(object), " must return a tensor, got ", class_of(restored));
    const auto& tensor = THPVariable_Unpack(restored.ptr());
    const auto got = saved::Metadata::of(tensor);
    TORCH_CHECK_VALUE(got == packed_, "saved_tensors: restore() of ", class_of(object),
                      " must return a tensor like the one that was packed, ", packed_.text(),
                      ", got ", got.text());
    return tensor;
  }

 private:
  saved::Metadata packed_;
  c10::SafePyObject object_;
};

class UserFate : public Fate {
 public:
  explicit UserFate(py::handle object) : object_(safe(object)) {}

  intrusive_ptr<Handle> take(const at::Tensor& tensor) override {
    const py::gil_scoped_acquire gil;
    const Aside aside;
    const auto fate = object_of(object_);
    const auto packed = fate.attr("pack")(wrap(saved::detached(tensor)));
    if (packed.is_none()) return {};
    TORCH_CHECK_TYPE(py::hasattr(packed, "restore"), "saved_tensors: pack() of ", class_of(fate),
                     " must return an object with a method restore, or None, got ",
                     class_of(packed));
    return c10::make_intrusive<saved::Unwritten>(tensor,
                                                 c10::make_intrusive<UserHandle>(tensor, packed));
  }

 private:
  c10::SafePyObject object_;
};

// "cpu", "disk", or a memopt._C.Offload.
std::optional<saved::OffloadOptions> offload_of(py::handle value) {
  if (is_text(value, kCpu)) return saved::OffloadOptions{};
  if (is_text(value, kDisk)) {
    saved::OffloadOptions options;
    options.directory = saved::OffloadTarget::limits().directory;
    TORCH_CHECK_VALUE(!options.directory.empty(),
                      "saved_tensors: 'disk' needs the directory of "
                      "memopt.offload.configure(directory=), got none");
    return options;
  }
  if (!py::isinstance<saved::OffloadOptions>(value)) return std::nullopt;
  return value.cast<saved::OffloadOptions>();
}

// Leaves every tensor to the hooks around.
class Decline : public Fate {
 public:
  intrusive_ptr<Handle> take(const at::Tensor&) override { return {}; }
};

// Other threads may run Python while one waits for a copy to make way.
class WithoutGil : public Fate {
 public:
  explicit WithoutGil(intrusive_ptr<Fate> fate) : fate_(std::move(fate)) {}

  intrusive_ptr<Handle> take(const at::Tensor& tensor) override {
    const py::gil_scoped_release no_gil;
    return fate_->take(tensor);
  }

 private:
  intrusive_ptr<Fate> fate_;
};

intrusive_ptr<Fate> offload(const saved::OffloadOptions& options, bool in_region) {
  if (in_region) return c10::make_intrusive<Decline>();
  return c10::make_intrusive<WithoutGil>(saved::offload_in_scope(options, is_held));
}

// Asks a user's callable for each tensor.
class Asked : public Fate {
 public:
  Asked(py::handle policy, intrusive_ptr<saved::RecipeRegistry> registry, bool in_region)
      : policy_(safe(policy)), registry_(std::move(registry)), in_region_(in_region) {}

  intrusive_ptr<Handle> take(const at::Tensor& tensor) override {
    const py::gil_scoped_acquire gil;
    const auto answer = ask(tensor);
    if (is_text(answer, kKeep)) return saved::keep(tensor);
    if (is_text(answer, kRecipe)) return registry_->take(tensor);
    if (is_built_in(answer)) return offload_for(answer)->take(tensor);
    TORCH_CHECK_TYPE(is_fate_of_a_user(answer), "saved_tensors: a policy must answer ",
                     "'keep', 'recipe', 'cpu', 'disk' or an object with a method pack, got ",
                     std::string(py::repr(answer)));
    return UserFate(answer).take(tensor);
  }

 private:
  py::object ask(const at::Tensor& tensor) {
    const Aside aside;
    return object_of(policy_)(wrap(tensor));
  }

  // One for each answer of the kind: a fate counts what its scope offloads.
  intrusive_ptr<Fate> offload_for(const py::object& answer) {
    for (const auto& [known, fate] : offloads_) {
      if (object_of(known).equal(answer)) return fate;  // strings may be made anew each time
    }
    offloads_.emplace_back(safe(answer), offload(*offload_of(answer), in_region_));
    return offloads_.back().second;
  }

  c10::SafePyObject policy_;
  intrusive_ptr<saved::RecipeRegistry> registry_;
  bool in_region_;
  std::vector<std::pair<c10::SafePyObject, intrusive_ptr<Fate>>> offloads_;
};

}  // namespace

void check_policy(py::handle policy) {
  TORCH_CHECK_VALUE(!PyUnicode_Check(policy.ptr()) || is_built_in(policy),
                    "saved_tensors: policy must be 'keep', 'recipe', 'cpu' or 'disk' if it "
                    "is a string, got ",
                    std::string(py::repr(policy)));
  TORCH_CHECK_TYPE(
      is_built_in(policy) || is_fate_of_a_user(policy) || PyCallable_Check(policy.ptr()) != 0,
      "saved_tensors: policy must be a string, a path, an object with a method pack "
      "or a callable, got ",
      std::string(py::repr(policy)));
}

Policy policy_of(py::handle policy, bool in_region) {
  if (is_text(policy, kKeep)) return {c10::make_intrusive<saved::Keep>(), {}};
  if (const auto options = offload_of(policy)) return {offload(*options, in_region), {}};
  if (is_fate_of_a_user(policy)) return {c10::make_intrusive<UserFate>(policy), {}};
  auto registry = c10::make_intrusive<saved::RecipeRegistry>();
  if (is_text(policy, kRecipe)) return {registry, registry};
  return {c10::make_intrusive<Asked>(policy, registry, in_region), registry};
}

intrusive_ptr<Fate> fate_of_arguments(py::handle fate) {
  if (is_text(fate, kKeep)) return {};
  if (const auto options = offload_of(fate)) {
    return c10::make_intrusive<WithoutGil>(saved::offload_of_region(options->directory, is_held));
  }
  if (py::isinstance<saved::Buffers>(fate)) {
    return c10::make_intrusive<WithoutGil>(fate.cast<saved::Buffers&>().fate(is_held));
  }
  TORCH_CHECK_TYPE(is_fate_of_a_user(fate),
                   "memopt: the fate of a region's arguments must be 'keep', 'cpu' or an object "
                   "with a method pack, got ",
                   std::string(py::repr(fate)));
  return c10::make_intrusive<UserFate>(fate);
}

}  // namespace memopt::python
