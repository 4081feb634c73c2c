#include "plan.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../plan/front.h"
#include "../plan/timeline.h"

namespace memopt::python {

namespace {

namespace py = pybind11;
using plan::Bytes;

using ChoiceFields = std::tuple<Bytes, Bytes, Bytes, double, double, Bytes>;
using StageFields = std::pair<Bytes, std::vector<ChoiceFields>>;
using LinkFields = std::tuple<double, double, Bytes, Bytes>;

plan::Problem problem(const std::vector<StageFields>& stages, Bytes base, Bytes optimizer,
                      const LinkFields& link) {
  plan::Problem made;
  made.base = base;
  made.optimizer = optimizer;
  made.link = std::make_from_tuple<plan::Link>(link);
  for (const auto& [before_backward, choices] : stages) {
    auto& stage = made.stages.emplace_back();
    stage.before_backward = before_backward;
    for (const auto& choice : choices) {
      stage.choices.push_back(std::make_from_tuple<plan::Choice>(choice));
    }
  }
  return made;
}

const char* name(plan::Phase phase) {
  switch (phase) {
    case plan::Phase::kForward:
      return "forward";
    case plan::Phase::kBackward:
      return "backward";
    case plan::Phase::kOptimizer:
      return "optimizer";
  }
  return "";
}

// Under the names of memopt._plan.solver.Timeline.
py::dict timeline(const plan::Chain& chain, const std::vector<size_t>& choices) {
  const auto found = plan::evaluate(chain, choices);
  const bool in_stage = found.peak_phase != plan::Phase::kOptimizer;
  py::dict made;
  made["choices"] = py::tuple(py::cast(choices));
  made["seconds"] = found.seconds;
  made["wait_seconds"] = found.wait_seconds;
  made["offloaded"] = found.offloaded;
  made["peak"] = found.peak;
  made["peak_at"] = py::make_tuple(name(found.peak_phase),
                                   in_stage ? py::object(py::int_(found.peak_stage)) : py::none());
  made["forward_peaks"] = py::tuple(py::cast(found.forward_peaks));
  made["backward_peaks"] = py::tuple(py::cast(found.backward_peaks));
  made["optimizer_peak"] = found.optimizer_peak;
  made["forward_waits"] = py::tuple(py::cast(found.forward_waits));
  made["backward_waits"] = py::tuple(py::cast(found.backward_waits));
  return made;
}

std::optional<std::vector<size_t>> choices_within(const plan::Front& front, Bytes budget) {
  const auto* plan = front.at(budget);
  return plan == nullptr ? std::nullopt : std::optional(plan->choices);
}

}  // namespace

void register_plan(py::module_& m) {
  py::class_<plan::Front>(m, "PlanFront", "The plans worth having, from the least peak on.")
      .def("__len__", [](const plan::Front& front) { return front.plans.size(); })
      .def("within", &choices_within, py::arg("budget"),
           "The choices of the fastest plan within the budget; None below the floor.")
      .def_property_readonly("floor", [](const plan::Front& f) { return f.plans.front().peak; })
      .def_property_readonly("fastest", [](const plan::Front& f) { return f.plans.back().peak; })
      .def_readonly("grid", &plan::Front::grid)
      .def_readonly("floor_grid", &plan::Front::floor_grid)
      .def_readonly("most_labels", &plan::Front::most_labels);
  py::class_<plan::Chain>(m, "PlanChain", "A problem of memopt._plan.solver, checked.")
      .def(py::init([](const std::vector<StageFields>& stages, Bytes base, Bytes optimizer,
                       const LinkFields& link) {
             return std::make_unique<plan::Chain>(problem(stages, base, optimizer, link));
           }),
           py::kw_only(), py::arg("stages"), py::arg("base"), py::arg("optimizer"), py::arg("link"))
      .def("front", &plan::find_front, py::arg("most_labels") = plan::kMostLabels,
           py::call_guard<py::gil_scoped_release>())
      .def("evaluate", &timeline, py::arg("choices"));
}

}  // namespace memopt::python
