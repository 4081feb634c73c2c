#include "offload.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <system_error>

#include "../offload/file.h"
#include "objects.h"

namespace memopt::python {

namespace {

namespace py = pybind11;
using saved::OffloadOptions;
using saved::OffloadTarget;

py::dict link(const offload::LinkStats& stats) {
  py::dict made;
  made["copies"] = stats.copies;
  made["bytes"] = stats.bytes;
  made["bytes_timed"] = stats.bytes_timed;
  made["busy_seconds"] = stats.busy_seconds;
  made["stall_seconds"] = stats.stall_seconds;
  made["most_in_flight"] = stats.most_in_flight;
  made["most_bytes_in_flight"] = stats.most_bytes_in_flight;
  return made;
}

py::dict row(const OffloadTarget& target, saved::OffloadDevice& device) {
  const auto stats = device.engine->stats();
  device.watch_peak();
  const auto peak = device.peak_watch.peak();
  py::dict made;
  made["device"] = device.device.str();
  made["directory"] = target.directory();
  made["out"] = link(stats.out);
  made["back"] = link(stats.in);
  made["prefetch_hits"] = stats.prefetch_hits;
  made["prefetch_misses"] = stats.prefetch_misses;
  made["never_left"] = stats.never_left;
  made["found_elsewhere_bytes"] = stats.found_elsewhere_bytes;
  made["refused_bytes"] = stats.refused_bytes;
  made["failed_bytes"] = stats.failed_bytes;
  made["bytes_away"] = stats.bytes_away;
  made["bytes_held"] = stats.bytes_held;
  made["room_in_use"] = stats.room.in_use;
  made["room_high_water"] = stats.room.high_water;
  made["room_allocated"] = stats.room.allocated;
  made["room_pageable"] = stats.room.pageable;
  made["peak_bytes"] = peak.bytes;
  made["peak_bytes_away"] = peak.away;
  return made;
}

// A dict for each place and device that was used.
py::list all_stats(bool reset, bool wait) {
  py::list rows;
  for (const auto& target : OffloadTarget::all()) {
    for (const auto& [_, device] : target->devices()) {
      if (wait) {
        const py::gil_scoped_release no_gil;
        device->engine->synchronize();
      }
      rows.append(row(*target, *device));
      if (!reset) continue;
      device->engine->reset_stats();
      device->peak_watch.restart();
    }
  }
  return rows;
}

}  // namespace

bool is_held(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  const auto wrap = [](const at::Tensor& made) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(made));
  };
  return !is_of_base_class(wrap(tensor)) ||
         (tensor.is_view() && !is_of_base_class(wrap(at::Tensor(tensor._base()))));
}

void set_os_error(const std::system_error& error) {
  const auto arguments = py::make_tuple(error.code().value(), error.what());
  PyErr_SetObject(PyExc_OSError, arguments.ptr());
}

void register_offload(py::module_& m) {
  py::class_<OffloadOptions>(m, "Offload", "What is offloaded where.")
      .def(py::init([](std::string directory, size_t min_bytes, double fraction,
                       std::optional<size_t> max_bytes, size_t keep_last) {
             return OffloadOptions{std::move(directory), min_bytes, fraction,
                                   max_bytes.value_or(SIZE_MAX), keep_last};
           }),
           py::kw_only(), py::arg("directory") = "", py::arg("min_bytes") = 1024,
           py::arg("fraction") = 1.0, py::arg("max_bytes") = py::none(), py::arg("keep_last") = 0);
  m.def(
      "check_offload_directory",
      [](const std::string& directory) {
        // One in use has its files already. No engine is made, whose threads may not be needed.
        if (!OffloadTarget::get(directory)->devices().empty()) return;
        try {
          offload::FileOptions options;
          options.directory = directory;
          const offload::SpillFile probe(std::move(options));
        } catch (const std::system_error& error) {
          set_os_error(error);
          throw py::error_already_set();
        }
      },
      "Raises OSError unless files can be made in the directory.");
  m.def(
      "set_offload_limits",
      [](size_t copies_in_flight, std::optional<size_t> most_host_bytes, bool checksums,
         std::string directory) {
        const py::gil_scoped_release no_gil;
        OffloadTarget::set_limits({copies_in_flight, most_host_bytes.value_or(SIZE_MAX), checksums,
                                   std::move(directory)});
      },
      py::kw_only(), py::arg("copies_in_flight"), py::arg("most_host_bytes"), py::arg("checksums"),
      py::arg("directory"));
  m.def(
      "offload_directory", [] { return OffloadTarget::limits().directory; },
      "For those who name none; empty: there is none.");
  m.def(
      "offload_copies_in_flight",
      [](const std::string& directory) {
        return OffloadTarget::get(directory)->copies_in_flight();
      },
      "The most that are under way to or from a place at one time, each way.");
  m.def(
      "empty_offload_cache",
      [] {
        const py::gil_scoped_release no_gil;
        return OffloadTarget::empty_cache();
      },
      "Gives back memory and files that hold nothing; returns their bytes.");
  m.def("offload_stats", &all_stats, py::kw_only(), py::arg("reset"), py::arg("wait"),
        "A dict for each place and device.");
  m.def(
      "pretend_accelerator",
      [](const std::optional<std::string>& type) {
        saved::pretend_accelerator(type.has_value() ? std::optional(c10::Device(*type).type())
                                                    : std::nullopt);
      },
      "For tests: take this device type for an accelerator whose tensors can be offloaded.");
}

}  // namespace memopt::python
