#include "cast.h"

#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <typeinfo>

namespace memopt::saved {

namespace {

namespace nodes = torch::autograd::generated;

template <class Kind>
bool is_a(const torch::autograd::Node& node) {
  return typeid(node) == typeid(Kind);
}

}  // namespace

std::optional<Cast> cast_of(const at::Tensor& tensor) {
  const at::Tensor& copy = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  const torch::autograd::Node* maker = copy.grad_fn().get();
  if (maker == nullptr || !is_a<nodes::ToCopyBackward0>(*maker)) return std::nullopt;
  if (copy.is_inference() || copy._version() != 0) return std::nullopt;
  torch::autograd::Edge edge = maker->next_edge(0);
  bool reshaped = false;
  while (edge.is_valid() && (is_a<nodes::ViewBackward0>(*edge.function) ||
                             is_a<nodes::UnsafeViewBackward0>(*edge.function))) {
    edge = edge.function->next_edge(0);
    reshaped = true;
  }
  if (!edge.is_valid()) return std::nullopt;
  return Cast{copy, std::move(edge), reshaped};
}

}  // namespace memopt::saved
