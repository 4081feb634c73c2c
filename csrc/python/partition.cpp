#include "partition.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/SafePyObject.h>
#include <pybind11/stl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include "../saved/partitioned.h"
#include "call.h"
#include "objects.h"
#include "offload.h"

namespace memopt::python {

namespace {

namespace py = pybind11;

c10::SafePyObject hold(const py::object& object) {
  return {py::object(object).release().ptr(), getPyInterpreter()};
}

// An error in Python's collective, for code that runs without the GIL.
template <typename Work>
auto with_gil(const Work& work) {
  const py::gil_scoped_acquire gil;
  try {
    return work();
  } catch (py::error_already_set& error) {
    error.restore();
    throw_python_error();
  }
}

// A torch.distributed.Work, or what else has wait() and is_completed().
class PythonPending : public saved::Pending {
 public:
  explicit PythonPending(const py::object& work) : work_(hold(work)) {}

  void wait() override {
    with_gil([&] { object_of(work_).attr("wait")(); });
  }

  bool is_done() override {
    if (Py_IsInitialized() == 0) return true;
    const py::gil_scoped_acquire gil;
    try {
      return object_of(work_).attr("is_completed")().cast<bool>();
    } catch (py::error_already_set&) {
      return true;  // it failed; called where nothing may be raised
    }
  }

 private:
  c10::SafePyObject work_;
};

class PythonLink : public saved::Link {
 public:
  explicit PythonLink(const py::object& start) : start_(hold(start)) {}

  std::unique_ptr<saved::Pending> start(const at::Tensor& part, const at::Tensor& all) override {
    return with_gil([&]() -> std::unique_ptr<saved::Pending> {
      const auto wrap = [](const at::Tensor& tensor) {
        return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
      };
      return std::make_unique<PythonPending>(object_of(start_)(wrap(part), wrap(all)));
    });
  }

 private:
  c10::SafePyObject start_;
};

std::vector<c10::DeviceType> types_named(const std::vector<std::string>& names) {
  std::vector<c10::DeviceType> types;
  types.reserve(names.size());
  for (const auto& name : names) types.push_back(c10::Device(name).type());
  return types;
}

}  // namespace

c10::intrusive_ptr<saved::FateOfArguments> partition_of_call(
    const Partition& partition, c10::intrusive_ptr<saved::Fate> of_parts, bool compares_every_call,
    const Call& call, const py::object& subject) {
  saved::PartitionOfCall made;
  made.ranks = partition.ranks;
  made.agreement = partition.agreement_of(subject).cast<std::shared_ptr<saved::Agreement>>();
  made.structure = call.structure();
  made.compares_every_call = compares_every_call;
  made.of_slab = std::move(of_parts);
  made.is_held = is_held;
  made.report = [&partition, &call, subject](const saved::PartitionOfCall::Differing& differing) {
    py::list arguments;
    for (const auto& [number, share] : differing)
      arguments.append(py::make_tuple(call.argument_name(number), share));
    partition.differs(subject, arguments);
  };
  return saved::partition(std::move(made));
}

void register_partition(py::module_& m) {
  py::class_<saved::Agreement, std::shared_ptr<saved::Agreement>>(
      m, "Agreement", "What the ranks found of one module's arguments.")
      .def(py::init<>());
  py::class_<Partition, std::shared_ptr<Partition>>(m, "Partition", "A group of ranks.")
      .def(py::init([](int64_t rank, int64_t ranks, const std::vector<std::string>& devices,
                       const py::object& start, py::object agreement_of, py::object differs) {
             return std::make_shared<Partition>(
                 Partition{std::make_shared<saved::Ranks>(std::make_unique<PythonLink>(start), rank,
                                                          ranks, types_named(devices)),
                           std::move(agreement_of), std::move(differs)});
           }),
           py::kw_only(), py::arg("rank"), py::arg("ranks"), py::arg("devices"), py::arg("start"),
           py::arg("agreement_of"), py::arg("differs"))
      .def(
          "unfinished", [](const Partition& partition) { return partition.ranks->unfinished(); },
          "How many gathers that nobody waits for any more still use their memory.");
}

}  // namespace memopt::python
