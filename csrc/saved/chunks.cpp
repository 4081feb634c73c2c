#include "chunks.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <unordered_set>

namespace memopt::saved {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

// That of AccumulateGrad: nodes with it run before all others that are ready.
constexpr uint64_t kAtOnce = std::numeric_limits<uint64_t>::max();

template <class T, class... Args>
NodePtr make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {
    return std::make_shared<T>(std::forward<Args>(args)...);
  } else {
    return NodePtr(c10::make_intrusive<T>(std::forward<Args>(args)...));
  }
}

edge_list only(Edge edge) {
  edge_list edges;
  edges.push_back(std::move(edge));
  return edges;
}

int64_t product(at::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

std::vector<int64_t> joined_sizes(at::IntArrayRef first, at::IntArrayRef second) {
  std::vector<int64_t> sizes(first.begin(), first.end());
  sizes.insert(sizes.end(), second.begin(), second.end());
  return sizes;
}

// The dtype of a sum over chunks.
at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

// A view that autograd does not know for one, of the version counter of its base.
at::Tensor without_base(const at::Tensor& view) {
  const auto* impl = view.unsafeGetTensorImpl();
  std::optional<c10::impl::ExcludeDispatchKeyGuard> unseen;  // by modes that watch operators
  if (!impl->key_set().has(c10::DispatchKey::Python)) unseen.emplace(c10::DispatchKey::Python);
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                  /*allow_tensor_metadata_change=*/false));
}

bool is_leaf_node(const Edge& edge) {
  return dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get()) != nullptr;
}

// The gradient of one chunk with respect to one tensor: of some of its rows, or of all of it.
class ChunkGradient : public Node {
 public:
  ChunkGradient(const NodePtr& sum, const torch::autograd::InputMetadata& of)
      : Node(kAtOnce, only({sum, 0})), sum_(static_cast<GradientSum&>(*sum)) {
    input_metadata_.emplace_back(of);
  }
  ChunkGradient(const NodePtr& sum, int64_t first, int64_t rows, std::vector<int64_t> sizes)
      : Node(kAtOnce, only({sum, 0})),
        sum_(static_cast<GradientSum&>(*sum)),
        first_(first),
        rows_(rows),
        sizes_(std::move(sizes)) {}

 protected:
  variable_list apply(variable_list&& grads) override {
    auto grad = std::move(grads[0]);
    grads.clear();
    if (!grad.defined()) return {at::Tensor()};
    const bool is_of_rows = rows_ > 0;
    if (is_of_rows) grad = grad.reshape({-1, row_size()});
    if (!at::GradMode::is_enabled()) {
      if (is_of_rows) {
        sum_.put_rows(grad, first_, rows_);
      } else {
        sum_.add(grad);
      }
      return {at::Tensor()};
    }
    if (!is_of_rows) return {grad};
    return {at::constant_pad_nd(grad, {0, 0, first_, rows_ - first_ - grad.size(0)}).view(sizes_)};
  }

 private:
  int64_t row_size() const { return product(sizes_) / rows_; }

  GradientSum& sum_;  // which the edge keeps alive
  int64_t first_ = 0, rows_ = 0;
  std::vector<int64_t> sizes_;  // of the whole tensor
};

// Hands each chunk the rows of the gradient that are its own.
class JoinedRows : public Node {
 public:
  JoinedRows(edge_list&& chunks, std::vector<std::vector<int64_t>> sizes, int64_t rows)
      : Node(std::move(chunks)), sizes_(std::move(sizes)), rows_(rows) {}

 protected:
  variable_list apply(variable_list&& grads) override {
    variable_list result(num_outputs());
    if (!grads[0].defined()) return result;
    const auto flat = grads[0].reshape({rows_, grads[0].numel() / rows_});
    grads.clear();
    int64_t first = 0;
    for (size_t i = 0; i < result.size(); ++i) {
      const int64_t count = flat.size(1) == 0 ? 0 : product(sizes_[i]) / flat.size(1);
      if (task_should_compute_output(i)) result[i] = flat.narrow(0, first, count).view(sizes_[i]);
      first += count;
    }
    return result;
  }

 private:
  std::vector<std::vector<int64_t>> sizes_;
  int64_t rows_;
};

}  // namespace

GradientSum::GradientSum(Edge to, const torch::autograd::InputMetadata& of)
    : Node(kAtOnce, only(std::move(to))) {
  input_metadata_.emplace_back(of);
}

std::shared_ptr<at::Tensor> GradientSum::sum() {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& entry = sums_[torch::autograd::get_current_graph_task_id()];
  auto sum = entry.lock();
  if (sum == nullptr) {
    sum = std::make_shared<at::Tensor>();
    entry = sum;
    torch::autograd::Engine::get_default_engine().queue_callback([sum] {});
  }
  return sum;
}

void GradientSum::put_rows(const at::Tensor& grad, int64_t first, int64_t rows) {
  const auto sum = this->sum();
  // Of the gradient, so that it is one of several where that is: is_grads_batched=True.
  if (!sum->defined()) *sum = grad.new_zeros({rows, grad.size(1)});
  sum->narrow(0, first, grad.size(0)).copy_(grad);
}

void GradientSum::add(const at::Tensor& grad) {
  const auto sum = this->sum();
  if (!sum->defined()) {
    *sum = grad.to(sum_dtype(grad.scalar_type()), /*non_blocking=*/false, /*copy=*/true);
  } else if (sum->layout() == grad.layout()) {
    sum->add_(grad);
  } else {
    *sum = sum->to_dense().add_(grad);
  }
}

variable_list GradientSum::apply(variable_list&& grads) {
  auto grad = std::move(grads[0]);
  grads.clear();
  at::Tensor sum;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sums_.find(torch::autograd::get_current_graph_task_id());
    if (found != sums_.end()) {
      if (const auto mine = found->second.lock()) sum = std::exchange(*mine, at::Tensor());
      sums_.erase(found);
    }
  }
  if (!sum.defined()) return {grad};
  const auto& of = input_metadata(0);
  sum = sum.to(of.dtype().toScalarType());
  if (!of.is_same_shape(sum)) sum = sum.reshape_symint(of.shape_as_dim_vector());
  return {grad.defined() ? grad + sum : sum};
}

ChunkedInput::ChunkedInput(at::Tensor tensor, int64_t row_dims)
    : tensor_(std::move(tensor)), row_dims_(row_dims) {
  const at::NoGradGuard no_grad;
  const auto sizes = tensor_.sizes();
  const auto rows = product(sizes.slice(0, row_dims_));
  flat_ = tensor_.detach().reshape(joined_sizes({rows}, sizes.slice(row_dims_)));
}

at::Tensor ChunkedInput::chunk(int64_t first, int64_t count) {
  std::vector<int64_t> sizes(row_dims_ - 1, 1);
  sizes.push_back(count);
  const auto rest = tensor_.sizes().slice(row_dims_);
  at::Tensor part;
  {
    const at::NoGradGuard no_grad;
    part = flat_.narrow(0, first, count).view(joined_sizes(sizes, rest));
  }
  if (!tensor_.requires_grad() || !at::GradMode::is_enabled()) return part;
  part = without_base(part);
  if (sum_ == nullptr) {
    sum_ = make_node<GradientSum>(torch::autograd::impl::gradient_edge(tensor_),
                                  torch::autograd::InputMetadata(tensor_));
  }
  torch::autograd::set_history(
      part, make_node<ChunkGradient>(sum_, first, flat_.size(0), tensor_.sizes().vec()));
  return part;
}

void ChunkedOutput::put(const at::Tensor& chunk) {
  const at::NoGradGuard no_grad;
  const auto rest = chunk.sizes().slice(row_dims_);
  if (!whole_.defined()) whole_ = at::empty(joined_sizes({rows_}, rest), chunk.options());
  const auto count = product(chunk.sizes().slice(0, row_dims_));
  whole_.narrow(0, filled_, count).copy_(chunk.reshape(joined_sizes({count}, rest)));
  filled_ += count;
  requires_grad_ = requires_grad_ || chunk.requires_grad();
  chunks_.emplace_back(torch::autograd::impl::gradient_edge(chunk), chunk.sizes().vec());
}

at::Tensor ChunkedOutput::joined(at::IntArrayRef row_sizes) {
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    result = whole_.view(joined_sizes(row_sizes, whole_.sizes().slice(1))).detach();
  }
  if (!requires_grad_ || !at::GradMode::is_enabled()) return result;
  edge_list edges;
  std::vector<std::vector<int64_t>> sizes;
  for (auto& [edge, of_chunk] : chunks_) {
    edges.push_back(std::move(edge));
    sizes.push_back(std::move(of_chunk));
  }
  torch::autograd::set_history(result,
                               make_node<JoinedRows>(std::move(edges), std::move(sizes), rows_));
  return result;
}

void ChunkSums::begin() {
  begun_at_ = at::sequence_number::peek();
  sinks_.clear();
}

Edge ChunkSums::sink(const Edge& edge) {
  const std::pair key{edge.function.get(), edge.input_nr};
  const auto& of = edge.function->input_metadata(edge.input_nr);
  auto& sum = sums_[key];
  if (sum == nullptr) sum = make_node<GradientSum>(edge, of);
  auto& sink = sinks_[key];
  if (sink == nullptr) sink = make_node<ChunkGradient>(sum, of);
  return {sink, 0};
}

void ChunkSums::end(const std::vector<at::Tensor>& results) {
  std::vector<Node*> left;
  std::unordered_set<Node*> seen;
  const auto is_inside = [&](const Edge& edge) {
    return !is_leaf_node(edge) && edge.function->sequence_nr() >= begun_at_;
  };
  const auto go_on = [&](const Edge& edge) {
    if (seen.insert(edge.function.get()).second) left.push_back(edge.function.get());
  };
  for (const auto& result : results) {
    const auto edge = torch::autograd::impl::gradient_edge(result);
    if (edge.is_valid() && is_inside(edge)) go_on(edge);
  }
  while (!left.empty()) {
    auto& node = *left.back();
    left.pop_back();
    for (auto& edge : node.next_edges()) {
      if (!edge.is_valid() || dynamic_cast<ChunkGradient*>(edge.function.get()) != nullptr) {
        continue;
      }
      if (is_inside(edge)) {
        go_on(edge);
      } else if (!edge.function->input_metadata(edge.input_nr).is_tensor_subclass()) {
        edge = sink(edge);
      }
    }
  }
}

}  // namespace memopt::saved
