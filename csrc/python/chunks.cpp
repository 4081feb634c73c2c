#include "chunks.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "../saved/chunks.h"

namespace memopt::python {

namespace py = pybind11;

void register_chunks(py::module_& m) {
  using saved::ChunkedInput, saved::ChunkedOutput, saved::ChunkSums;
  py::class_<ChunkedInput>(m, "ChunkedInput", "The rows of a tensor among a call's arguments.")
      .def(py::init<at::Tensor, int64_t>(), "ChunkedInput(tensor, row_dims)")
      .def("chunk", &ChunkedInput::chunk, "chunk(first, count): a view of these rows.");
  py::class_<ChunkedOutput>(m, "ChunkedOutput", "A tensor among a call's results.")
      .def(py::init<int64_t, int64_t>(), "ChunkedOutput(rows, row_dims)")
      .def("put", &ChunkedOutput::put, "put(chunk): the result of the next rows.")
      .def(
          "joined",
          [](ChunkedOutput& output, const std::vector<int64_t>& row_sizes) {
            return output.joined(row_sizes);
          },
          "joined(row_sizes): all rows, differentiable as the chunks are.");
  py::class_<ChunkSums>(m, "ChunkSums", "Sums of the chunks' gradients.")
      .def(py::init<>())
      .def("begin", &ChunkSums::begin, "To be called when a chunk begins.")
      .def("end", &ChunkSums::end, "end(results): to be called when it has ended.");
}

}  // namespace memopt::python
