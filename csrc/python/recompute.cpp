#include "recompute.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "../autograd/recipe.h"
#include "../saved/recipes.h"
#include "hooks.h"

namespace memopt::python {

namespace {

namespace py = pybind11;

// The book of one entered scope, open in the thread that entered it.
class OpenBook {
 public:
  explicit OpenBook(c10::intrusive_ptr<saved::Recipes> recipes)
      : hooks_(recipes, py::none()), recipes_(std::move(recipes)) {
    open().push_back(recipes_.get());
    autograd::recipe_book() = recipes_.get();
  }
  // Scopes may be left in another order than that of their entering, by generators say.
  ~OpenBook() {
    auto& books = open();
    books.erase(std::find(books.begin(), books.end(), recipes_.get()));
    autograd::recipe_book() = books.empty() ? nullptr : books.back();
  }
  OpenBook(const OpenBook&) = delete;
  OpenBook& operator=(const OpenBook&) = delete;

 private:
  // This thread's, in the order of entering.
  static std::vector<saved::Recipes*>& open() {
    thread_local std::vector<saved::Recipes*> books;
    return books;
  }

  HooksGuard hooks_;
  c10::intrusive_ptr<saved::Recipes> recipes_;
};

// A with-statement's object; it may be entered again, inside itself, and by several threads.
class Recompute {
 public:
  Recompute() = default;
  ~Recompute() {
    // Hooks are a thread's own: what another one has entered and not left, it keeps.
    for (Entered& entered : entered_) {
      if (entered.thread != std::this_thread::get_id()) static_cast<void>(entered.book.release());
    }
  }
  Recompute(const Recompute&) = delete;
  Recompute& operator=(const Recompute&) = delete;

  void enter() {
    auto outer = active_hooks();
    const bool is_ours =
        outer.defined() && dynamic_cast<saved::Recipes*>(outer.get()) == autograd::recipe_book();
    // In a scope already; or what is saved cannot be exchanged (transforms of torch.func forbid
    // saved-tensor hooks, a traced graph would hold them).
    if ((is_ours && autograd::recipe_book() != nullptr) ||
        !at::SavedTensorDefaultHooks::is_enabled() || torch::jit::tracer::isTracing()) {
      entered_.push_back({std::this_thread::get_id(), nullptr});
      return;
    }
    auto recipes = c10::make_intrusive<saved::Recipes>(std::move(outer));
    entered_.push_back(
        {std::this_thread::get_id(), std::make_unique<OpenBook>(std::move(recipes))});
  }

  void exit(const py::args&) {
    const auto last = std::find_if(entered_.rbegin(), entered_.rend(), [](const Entered& entered) {
      return entered.thread == std::this_thread::get_id();
    });
    TORCH_CHECK(last != entered_.rend(),
                "memopt.recompute(): a scope must be left once, by the thread that entered it, got "
                "an exit in a thread that has not entered it");
    entered_.erase(std::next(last).base());
  }

 private:
  struct Entered {
    std::thread::id thread;
    std::unique_ptr<OpenBook> book;  // null where there was nothing to open
  };
  std::vector<Entered> entered_;
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
