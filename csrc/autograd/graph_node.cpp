#include "graph_node.h"

#include <ATen/FuncTorchTLS.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <mutex>
#include <optional>

namespace memopt::autograd {

namespace compiled = torch::dynamo::autograd;

namespace {

class WantedHere {
 public:
  explicit WantedHere(GradientWanted* wanted) : before_(gradient_wanted()) {
    gradient_wanted() = wanted;
  }
  ~WantedHere() { gradient_wanted() = before_; }
  WantedHere(const WantedHere&) = delete;
  WantedHere& operator=(const WantedHere&) = delete;

 private:
  GradientWanted* const before_;
};

}  // namespace

void GraphNode::add_output(const Tensor& output, bool has_gradient) {
  const uint32_t number = add_input_metadata(output);
  if (has_gradient) torch::autograd::impl::set_gradient_edge(output, {getptr(), number});
}

void GraphNode::save(const variable_list& tensors) {
  saved_.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    if (tensor.defined()) {
      const bool is_output = tensor.grad_fn().get() == this;
      saved_.emplace_back(tensor, is_output);
    } else {
      saved_.emplace_back();
    }
  }
}

variable_list GraphNode::unpacked(Tensor first) {
  TORCH_CHECK(!is_released_, torch::autograd::ERR_BACKWARD_TWICE);
  const auto node = getptr();
  variable_list tensors;
  tensors.reserve(saved_.size());
  if (first.defined()) tensors.push_back(std::move(first));
  for (size_t i = tensors.size(); i < saved_.size(); ++i) {
    tensors.push_back(saved_[i].unpack(node));
  }
  return tensors;
}

Tensor GraphNode::gradient_from_recipe(const variable_list& grads, Tensor* first) {
  const auto asked = behind();
  if (!asked.has_value() || at::GradMode::is_enabled() || is_released_ || saved_.empty() ||
      !grads[0].defined() || !task_should_compute_output(0)) {
    return {};
  }
  GradientWanted wanted{&saved_[0], *asked, grads[0]};
  {
    const WantedHere here(&wanted);
    *first = saved_[0].unpack(getptr());
  }
  return std::move(wanted.answer);
}

Wanted GraphNode::wanted_here() const {
  Wanted wanted;
  for (size_t i = 0; i < num_outputs(); ++i) wanted.push_back(task_should_compute_output(i));
  return wanted;
}

variable_list GraphNode::apply(variable_list&& grads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Tensor first;
  if (Tensor gradient = gradient_from_recipe(grads, &first); gradient.defined()) {
    variable_list gradients(num_outputs());
    gradients[0] = std::move(gradient);
    return gradients;
  }
  return backward(unpacked(std::move(first)), grads, wanted_here());
}

void GraphNode::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  saved_.clear();
  is_released_ = true;
}

void GraphNode::release_resources() {
  ReleasedNode::release_resources();
  saved_.clear();
}

void GraphNode::compiled_args(torch::autograd::CompiledNodeArgs& args) const {
  args.collect(std::string(typeid(*this).name()));
  args.collect(options());
  args.collect(saved_, /*is_output=*/true);
}

// As the nodes of torch::autograd::Function do it: what was saved, and which gradients are wanted,
// become arguments of a function that the compiler traces.
variable_list GraphNode::apply_with_saved(const variable_list& grads,
                                          torch::autograd::SwapSavedVariables& swapped) {
  swapped.before(saved_);
  const Wanted wanted = wanted_here();
  compiled::PackedArgs packed;
  packed.pack(unpacked());
  packed.pack(std::vector<bool>(wanted.begin(), wanted.end()));
  const std::vector<at::IValue> args = packed.vec();
  std::vector<at::TypePtr> schema;
  for (const at::IValue& arg : args) schema.push_back(arg.type());

  const auto function = [backward = without_node()](const variable_list& outer,
                                                    const std::vector<at::IValue>& inner) {
    compiled::PackedArgs given(inner);
    auto saved = given.unpack<variable_list>();
    const auto needed = given.unpack<std::vector<bool>>();
    return backward(std::move(saved), outer, Wanted(needed.begin(), needed.end()));
  };
  const auto metadata =
      compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
          compiled::get_input_metadata(next_edges()));
  const auto& python = compiled::getPyCompilerInterface();
  const std::string name =
      python->bind_function(swapped.get_py_compiler(), typeid(*this).name(), function, schema,
                            /*is_custom_function=*/true, /*is_traceable=*/true);
  variable_list results = python->call_function(swapped.get_py_compiler(), "apply_functional", name,
                                                grads, args, metadata);
  swapped.after(saved_);
  return results;
}

void check_transforms() {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (transforms) transforms->checkSupportsCppAutogradFunction();
}

}  // namespace memopt::autograd
