// A call in chunks of rows: one region for each chunk, and the graph nodes between these and the
// rest of the graph. There is no second engine: each chunk is an ordinary region, differentiated by
// PyTorch's engine like any other.
//
//   forward    y[c] = f(x[c]) for each chunk c of rows, written into one y
//   backward   dx[c] of each chunk, written into one dx; the chunks run one after another
//
//   y: JoinedRows ---> the graphs of the regions ---> ChunkGradient ---> GradientSum ---> x
//                                          \--------> ChunkGradient ---> GradientSum ---> a weight
//
// PyTorch's engine runs ready nodes by their number, the newest first. The nodes of a chunk are
// newer than those of the chunks before it, so backward goes through the chunks from the last one
// to the first, and ends one before it begins the next. The nodes here run as soon as they can, as
// AccumulateGrad does. So nothing of two chunks is there at once but what they share, and sums of
// gradients have a fixed order: the last chunk's first.
//
// What several chunks give one tensor outside of the call, a weight say, the engine would add in
// that tensor's dtype and with a new tensor for each sum. So the edges that leave a chunk's graph
// are led through a GradientSum too. It adds in place, 16 bits in float32, and rounds once: a sum
// of roundings to 16 bits would be less exact than one product of all rows.
//
// With create_graph=True gradients pass the nodes as they are, and the engine's differentiable sums
// take over.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace memopt::saved {

// Nodes are owned by shared_ptr in PyTorch before 2.12 and by intrusive_ptr since.
using NodePtr = decltype(torch::autograd::Edge::function);

// Where the gradients of all chunks with respect to one tensor meet. One input, whose gradient is
// undefined unless create_graph=True.
class GradientSum : public torch::autograd::Node {
 public:
  GradientSum(torch::autograd::Edge to, const torch::autograd::InputMetadata& of);

  // Into rows [first, first + grad.size(0)) of the `rows` that the sum has in all.
  void put_rows(const at::Tensor& grad, int64_t first, int64_t rows);
  // To the sum, in float32 or the gradient's wider dtype.
  void add(const at::Tensor& grad);

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;

 private:
  // The sum of the running backward. It is owned by that backward, which may end by an exception.
  std::shared_ptr<at::Tensor> sum();

  std::mutex mutex_;
  std::unordered_map<int64_t, std::weak_ptr<at::Tensor>> sums_;  // by backward
};

// The rows of one tensor among the arguments.
class ChunkedInput {
 public:
  // The leading `row_dims` dims count rows. A tensor whose rows are not evenly strided is copied.
  ChunkedInput(at::Tensor tensor, int64_t row_dims);

  // A view of `count` rows, of as many dims as the tensor: [1, ..., count, ...].
  at::Tensor chunk(int64_t first, int64_t count);

 private:
  at::Tensor tensor_;
  at::Tensor flat_;
  int64_t row_dims_;
  NodePtr sum_;  // null: no gradient is wanted
};

// One tensor among the results.
class ChunkedOutput {
 public:
  ChunkedOutput(int64_t rows, int64_t row_dims) : rows_(rows), row_dims_(row_dims) {}

  void put(const at::Tensor& chunk);
  // With these sizes in place of the leading row dims.
  at::Tensor joined(at::IntArrayRef row_sizes);

 private:
  int64_t rows_, row_dims_, filled_ = 0;
  at::Tensor whole_;
  std::vector<std::pair<torch::autograd::Edge, std::vector<int64_t>>> chunks_;
  bool requires_grad_ = false;
};

// The sums of one call with respect to what is not cut.
class ChunkSums {
 public:
  // To be called when a chunk begins, and with its results when it has ended.
  void begin();
  void end(const std::vector<at::Tensor>& results);

 private:
  torch::autograd::Edge sink(const torch::autograd::Edge& edge);

  uint64_t begun_at_ = 0;
  std::map<std::pair<torch::autograd::Node*, uint32_t>, NodePtr> sums_;
  std::map<std::pair<torch::autograd::Node*, uint32_t>, NodePtr> sinks_;  // of this chunk
};

}  // namespace memopt::saved
