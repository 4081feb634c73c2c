#include "buffers.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../saved/buffered.h"

namespace memopt::python {

namespace {

namespace py = pybind11;
using saved::Buffers;

py::list stats(const Buffers& buffers) {
  py::list rows;
  for (const auto& [device, stats] : buffers.stats()) {
    py::dict row;
    row["device"] = device.str();
    row["slab_bytes"] = stats.slab_bytes;
    row["in_use"] = stats.in_use;
    row["high_water"] = stats.high_water;
    row["kept_bytes"] = stats.kept_bytes;
    row["steps"] = stats.steps;
    row["copies"] = stats.copies;
    row["copied_bytes"] = stats.copied_bytes;
    row["fallbacks"] = stats.fallbacks;
    row["fallback_bytes"] = stats.fallback_bytes;
    row["relearned"] = stats.relearned;
    row["found_elsewhere_bytes"] = stats.found_elsewhere_bytes;
    rows.append(std::move(row));
  }
  return rows;
}

}  // namespace

void register_buffers(py::module_& m) {
  py::class_<Buffers, std::shared_ptr<Buffers>>(m, "Buffers",
                                                "Memory for the arguments of regions.")
      .def(py::init([] { return std::make_shared<Buffers>(); }))
      .def("stats", &stats, "A dict for each device.")
      .def("settle", &Buffers::settle, py::call_guard<py::gil_scoped_release>(),
           "settle(constant): make the memory that the steps so far ask for; tensors of `constant` "
           "are held anyway.")
      .def("remove", &Buffers::remove, py::call_guard<py::gil_scoped_release>(),
           "Give the memory back, and take nothing from now on.");
}

}  // namespace memopt::python
