#include "call_scopes.h"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "scope.h"

namespace memopt::python {

namespace {

namespace py = pybind11;

// A with-statement's object, entered.
class Entered {
 public:
  explicit Entered(py::object context) : context_(std::move(context)) {
    context_.attr("__enter__")();
  }
  ~Entered() {
    const py::error_scope pending;
    try {
      context_.attr("__exit__")(py::none(), py::none(), py::none());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("memopt: leaving a scope around a module's call");
    }
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  py::object context_;
};

// What a pre-hook opened.
struct CallScope {
  const PyObject* module;  // compared, never read
  const PyObject* key;     // which pair of hooks
  py::object caller;       // a frame, held so that no later one has its address
  int calls;               // of the module inside itself that opened nothing
  std::shared_ptr<void> scope;
  std::array<const PyObject*, 2> hooks;  // the module's dictionaries, compared, never read
};

// The scopes of a thread. Those that a SystemExit or a KeyboardInterrupt left are still there when
// the thread ends, which is without the GIL and, for the main thread, without an interpreter: what
// they hold of Python's is not touched then.
struct OpenScopes {
  std::vector<CallScope> scopes;
  ~OpenScopes() {
    if (!scopes.empty()) new std::vector<CallScope>(std::move(scopes));
  }
};

std::vector<CallScope>& open_scopes() {
  thread_local OpenScopes open;
  return open.scopes;
}

void end_from(size_t size) {
  auto& scopes = open_scopes();
  while (scopes.size() > size) {
    const auto last = std::move(scopes.back());
    scopes.pop_back();
  }
}

py::object current_frame() {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
}

py::object caller_of(const py::object& frame) {
  auto* caller = PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr()));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(caller));
}

bool is_running(const py::object& frame) {
  for (auto now = current_frame(); now; now = caller_of(now)) {
    if (now.is(frame)) return true;
  }
  return false;
}

void end_what_an_interrupt_left() {
  auto& scopes = open_scopes();
  for (size_t i = 0; i < scopes.size(); ++i) {
    if (!is_running(scopes[i].caller)) {
      end_from(i);
      return;
    }
  }
}

bool is_innermost(const PyObject* module, const PyObject* key) {
  const auto& scopes = open_scopes();
  return !scopes.empty() && scopes.back().module == module && scopes.back().key == key;
}

void open(PyObject* module, const PyObject* key, std::shared_ptr<void> scope) {
  const auto hooks = [&](const char* name) { return py::getattr(module, name, py::none()).ptr(); };
  // The current frame is the hook's; the one that runs the module's hooks called it.
  open_scopes().push_back({module,
                           key,
                           caller_of(current_frame()),
                           /*calls=*/1,
                           std::move(scope),
                           {hooks("_forward_pre_hooks"), hooks("_forward_hooks")}});
}

constexpr const char* kRecipesKey = "memopt.convert: recipes";
PyObject* recipes_key = nullptr;
PyTypeObject* const ordered_dict = &PyODict_Type;
PyTypeObject* call_hooks = nullptr;

// Whether one of the dictionary's hooks has something to do now.
int hooks_have_work(PyObject* self) {
  if (PyDict_GET_SIZE(self) != 1) return PyDict_GET_SIZE(self) != 0;
  const int of_recipes = PyDict_Contains(self, recipes_key);
  if (of_recipes != 1) return of_recipes < 0 ? -1 : 1;
  const auto& scopes = open_scopes();
  const bool are_to_end_one = std::any_of(scopes.begin(), scopes.end(), [&](const CallScope& one) {
    return one.hooks[0] == self || one.hooks[1] == self;
  });
  return are_to_end_one || !is_in_model_scope(/*functions=*/true) ? 1 : 0;
}

// enter_recipes(module, key, functions)
PyObject* enter_recipes(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 3, "memopt: enter_recipes takes 3 arguments, got ", count);
  auto* module = arguments[0];
  const auto* key = arguments[1];
  end_what_an_interrupt_left();
  if (auto scope = model_scope(/*functions=*/arguments[2] == Py_True)) {
    open(module, key, std::move(scope));
  } else if (is_innermost(module, key)) {
    ++open_scopes().back().calls;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// enter_context(module, key, context)
PyObject* enter_context(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 3, "memopt: enter_context takes 3 arguments, got ", count);
  end_what_an_interrupt_left();
  open(arguments[0], arguments[1],
       std::make_shared<Entered>(py::reinterpret_borrow<py::object>(arguments[2])));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// leave_call(module, key)
PyObject* leave_call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2, "memopt: leave_call takes 2 arguments, got ", count);
  if (is_innermost(arguments[0], arguments[1]) && --open_scopes().back().calls == 0) {
    const py::error_scope pending;  // what the scope frees may run Python
    end_from(open_scopes().size() - 1);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// end_interrupted_calls()
PyObject* end_interrupted_calls(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  const py::error_scope pending;
  end_what_an_interrupt_left();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// become_call_hooks(dictionary, become)
PyObject* become_call_hooks(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2, "memopt: become_call_hooks takes 2 arguments, got ", count);
  auto* dictionary = arguments[0];
  // As assigning to __class__, which Python allows for classes written in Python alone. Both have
  // the same layout. An object counts as a reference to its type where that is no static one.
  if (arguments[1] == Py_True && Py_IS_TYPE(dictionary, ordered_dict)) {
    Py_SET_TYPE(dictionary, call_hooks);
    Py_INCREF(call_hooks);
  } else if (arguments[1] == Py_False && Py_IS_TYPE(dictionary, call_hooks)) {
    Py_SET_TYPE(dictionary, ordered_dict);
    Py_DECREF(call_hooks);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

template <typename F>
PyCFunction as_function(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef call_scope_functions[] = {
    {"enter_recipes", as_function(enter_recipes), METH_FASTCALL,
     "enter_recipes(module, key, functions): until leave_call, memopt.recipes(); if `functions` "
     "is True, with PyTorch's functions replaced by memopt's. For the hook `key` of `module`."},
    {"enter_context", as_function(enter_context), METH_FASTCALL,
     "enter_context(module, key, context): enters `context` until leave_call."},
    {"leave_call", as_function(leave_call), METH_FASTCALL,
     "leave_call(module, key): ends what this call of `module` has entered, if anything."},
    {"end_interrupted_calls", end_interrupted_calls, METH_NOARGS,
     "end_interrupted_calls(): ends what calls that are gone have opened in this thread and not "
     "ended."},
    {"become_call_hooks", as_function(become_call_hooks), METH_FASTCALL,
     "become_call_hooks(dictionary, become): make this very OrderedDict a CallHooks, or one again; "
     "nothing where it is neither."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

CallScopesGuard::CallScopesGuard() : open_(open_scopes().size()) {}

CallScopesGuard::~CallScopesGuard() {
  if (open_scopes().size() == open_) return;
  const py::error_scope pending;
  end_from(open_);
}

void register_call_scopes(py::module_& m) {
  recipes_key = PyUnicode_InternFromString(kRecipesKey);
  if (recipes_key == nullptr) throw py::error_already_set();
  m.attr("RECIPES_KEY") = py::reinterpret_borrow<py::object>(recipes_key);
  PyType_Slot slots[] = {
      {Py_nb_bool, reinterpret_cast<void*>(hooks_have_work)},
      {Py_tp_doc, const_cast<char*>("A module's dictionary of hooks that is true where one of them "
                                    "has something to do.")},
      {0, nullptr}};
  PyType_Spec spec = {"memopt._C.CallHooks", /*basicsize=*/0, /*itemsize=*/0, Py_TPFLAGS_DEFAULT,
                      slots};
  auto* type = PyType_FromSpecWithBases(
      &spec, py::make_tuple(py::handle(reinterpret_cast<PyObject*>(ordered_dict))).ptr());
  if (type == nullptr) throw py::error_already_set();
  call_hooks = reinterpret_cast<PyTypeObject*>(type);
  m.attr("CallHooks") = py::handle(type);
  if (PyModule_AddFunctions(m.ptr(), call_scope_functions) < 0) throw py::error_already_set();
}

}  // namespace memopt::python
