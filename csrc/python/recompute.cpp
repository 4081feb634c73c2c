#include "recompute.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <memory>
#include <optional>

#include "../autograd/recipe.h"
#include "../saved/recipes.h"
#include "hooks.h"

namespace memopt::python {

namespace {

namespace py = pybind11;

// The book of one entered scope, open in the thread that entered it.
class OpenBook {
 public:
  explicit OpenBook(const c10::intrusive_ptr<saved::Recipes>& recipes)
      : hooks_(recipes, py::none()),
        before_(std::exchange(autograd::recipe_book(), recipes.get())) {}
  ~OpenBook() { autograd::recipe_book() = before_; }
  OpenBook(const OpenBook&) = delete;
  OpenBook& operator=(const OpenBook&) = delete;

 private:
  HooksGuard hooks_;  // holds the book
  autograd::RecipeBook* before_;
};

// A with-statement's object; it may be entered again, and inside itself.
class Recompute {
 public:
  void enter() {
    auto outer = active_hooks();
    const bool is_ours =
        outer.defined() && dynamic_cast<saved::Recipes*>(outer.get()) == autograd::recipe_book();
    // In a scope already; or what is saved cannot be exchanged (transforms of torch.func forbid
    // saved-tensor hooks, a traced graph would hold them).
    if ((is_ours && autograd::recipe_book() != nullptr) ||
        !at::SavedTensorDefaultHooks::is_enabled() || torch::jit::tracer::isTracing()) {
      open_.push_back(nullptr);
      return;
    }
    open_.push_back(
        std::make_unique<OpenBook>(c10::make_intrusive<saved::Recipes>(std::move(outer))));
  }

  void exit(const py::args&) { open_.pop_back(); }

 private:
  std::vector<std::unique_ptr<OpenBook>> open_;
};

}  // namespace

void register_recompute(py::module_& m) {
  py::class_<Recompute>(m, "Recompute", "The scope of memopt.recompute().")
      .def(py::init<>())
      .def("__enter__", &Recompute::enter)
      .def("__exit__", &Recompute::exit);
  m.def("live_cells", &saved::Cell::live, "How many saved tensors are held by memopt.recompute().");
}

}  // namespace memopt::python
