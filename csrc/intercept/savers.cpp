#include "savers.h"

#include <ATen/Operators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/library.h>

#include <tuple>
#include <typeinfo>

#include "../saved/recipe_registry.h"
#include "key.h"

namespace memopt::intercept {

namespace {

namespace nodes = torch::autograd::generated;
using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using saved::RecipeRegistry;
using torch::autograd::SavedVariable;

// What a call of plain tensors goes through: any backend's kernels, autograd, and this. (An
// undefined tensor, a bias that is not there, has the key AutogradOther.)
constexpr DispatchKeySet kKnown =
    DispatchKeySet({DispatchKey::Dense, DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView,
                    DispatchKey::AutogradFunctionality, DispatchKey::AutogradOther,
                    kInterceptKey}) |
    DispatchKeySet(DispatchKeySet::RAW, c10::full_backend_mask);

// The registry that hooks would ask, if they would do nothing else with what `keys`' op saves.
RecipeRegistry* registry_alone(DispatchKeySet keys) {
  if (!at::GradMode::is_enabled() || !kKnown.has_all(keys)) return nullptr;
  auto* registry = static_cast<RecipeRegistry*>(autograd::recipe_recorder());
  return registry != nullptr && registry->is_alone() ? registry : nullptr;
}

const Tensor& first(const Tensor& result) {
  return result;
}
template <class... Others>
const Tensor& first(const std::tuple<Tensor, Others...>& result) {
  return std::get<0>(result);
}

// The kernel of `Op` (at::_ops), whose node is a `Node` with these members.
template <class Op, class Node, SavedVariable Node::*... members>
struct Saver {
  template <class Schema>
  struct Kernel;
  template <class Result, class... Arguments>
  struct Kernel<Result(Arguments...)> {
    static Result call(DispatchKeySet keys, Arguments... arguments) {
      const DispatchKeySet below = below_intercept(keys);
      auto* registry = registry_alone(keys);
      if (registry == nullptr) return Op::redispatch(below, arguments...);
      Result result = [&] {
        const autograd::WithoutHooks without_hooks;
        return Op::redispatch(below, arguments...);
      }();
      const auto& node = first(result).grad_fn();
      if (node == nullptr || typeid(*node) != typeid(Node)) return result;
      auto& known = static_cast<Node&>(*node);
      (registry->see_saved(node, known.*members), ...);
      return result;
    }
  };
  using Call = Kernel<typename Op::schema>;
};

}  // namespace

at::Tensor relu_of_torch(DispatchKeySet keys, const Tensor& self) {
  using N = nodes::ReluBackward0;
  return Saver<at::_ops::relu, N, &N::result_>::Call::call(keys, self);
}

at::Tensor sigmoid_of_torch(DispatchKeySet keys, const Tensor& self) {
  using N = nodes::SigmoidBackward0;
  return Saver<at::_ops::sigmoid, N, &N::result_>::Call::call(keys, self);
}

at::Tensor silu_of_torch(DispatchKeySet keys, const Tensor& self) {
  using N = nodes::SiluBackward0;
  return Saver<at::_ops::silu, N, &N::self_>::Call::call(keys, self);
}

at::Tensor gelu_of_torch(DispatchKeySet keys, const Tensor& self, std::string_view approximate) {
  using N = nodes::GeluBackward0;
  return Saver<at::_ops::gelu, N, &N::self_>::Call::call(keys, self, approximate);
}

// The op in its schema and in at::_ops, its node N, and what that saves.
#define MEMOPT_SAVER(schema, op, node, ...)                                      \
  {                                                                              \
    using N = nodes::node;                                                       \
    m.impl(schema, TORCH_FN((Saver<at::_ops::op, N, __VA_ARGS__>::Call::call))); \
  }

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  MEMOPT_SAVER("addmm", addmm, AddmmBackward0, &N::mat1_, &N::mat2_)
  MEMOPT_SAVER("mm", mm, MmBackward0, &N::self_, &N::mat2_)
  MEMOPT_SAVER("bmm", bmm, BmmBackward0, &N::self_, &N::mat2_)
  MEMOPT_SAVER("baddbmm", baddbmm, BaddbmmBackward0, &N::batch1_, &N::batch2_)
  MEMOPT_SAVER("convolution", convolution, ConvolutionBackward0, &N::input_, &N::weight_)
  MEMOPT_SAVER("mul.Tensor", mul_Tensor, MulBackward0, &N::self_, &N::other_)
  MEMOPT_SAVER("div.Tensor", div_Tensor, DivBackward0, &N::self_, &N::other_)
  MEMOPT_SAVER("pow.Tensor_Scalar", pow_Tensor_Scalar, PowBackward0, &N::self_)
  MEMOPT_SAVER("exp", exp, ExpBackward0, &N::result_)
  MEMOPT_SAVER("log", log, LogBackward0, &N::self_)
  MEMOPT_SAVER("sin", sin, SinBackward0, &N::self_)
  MEMOPT_SAVER("cos", cos, CosBackward0, &N::self_)
  MEMOPT_SAVER("erf", erf, ErfBackward0, &N::self_)
  MEMOPT_SAVER("sqrt", sqrt, SqrtBackward0, &N::result_)
  MEMOPT_SAVER("rsqrt", rsqrt, RsqrtBackward0, &N::result_)
  MEMOPT_SAVER("tanh", tanh, TanhBackward0, &N::result_)
  MEMOPT_SAVER("where.self", where_self, WhereBackward0, &N::condition_)
  MEMOPT_SAVER("gather", gather, GatherBackward0, &N::self_, &N::index_)
  MEMOPT_SAVER("masked_fill.Scalar", masked_fill_Scalar, MaskedFillBackward0, &N::mask_)
  MEMOPT_SAVER("embedding", embedding, EmbeddingBackward0, &N::indices_)
  MEMOPT_SAVER("_softmax", _softmax, SoftmaxBackward0, &N::result_)
  MEMOPT_SAVER("_safe_softmax", _safe_softmax, SafeSoftmaxBackward0, &N::result_)
  MEMOPT_SAVER("_log_softmax", _log_softmax, LogSoftmaxBackward0, &N::result_)
  MEMOPT_SAVER("nll_loss_forward", nll_loss_forward, NllLossBackward0, &N::self_, &N::target_,
               &N::weight_, &N::total_weight_)
  MEMOPT_SAVER("native_layer_norm", native_layer_norm, NativeLayerNormBackward0, &N::input_,
               &N::weight_, &N::bias_, &N::result1_, &N::result2_)
  MEMOPT_SAVER("native_group_norm", native_group_norm, NativeGroupNormBackward0, &N::input_,
               &N::weight_, &N::result1_, &N::result2_)
  MEMOPT_SAVER("native_batch_norm", native_batch_norm, NativeBatchNormBackward0, &N::input_,
               &N::weight_, &N::running_mean_, &N::running_var_, &N::result1_, &N::result2_)
  MEMOPT_SAVER("native_dropout", native_dropout, NativeDropoutBackward0, &N::result1_)
  MEMOPT_SAVER("_scaled_dot_product_flash_attention_for_cpu",
               _scaled_dot_product_flash_attention_for_cpu,
               ScaledDotProductFlashAttentionForCpuBackward0, &N::query_, &N::key_, &N::value_,
               &N::attn_mask_, &N::output_, &N::logsumexp_)
  MEMOPT_SAVER("_scaled_dot_product_flash_attention", _scaled_dot_product_flash_attention,
               ScaledDotProductFlashAttentionBackward0, &N::query_, &N::key_, &N::value_,
               &N::output_, &N::logsumexp_)
  MEMOPT_SAVER("_scaled_dot_product_efficient_attention", _scaled_dot_product_efficient_attention,
               ScaledDotProductEfficientAttentionBackward0, &N::query_, &N::key_, &N::value_,
               &N::attn_bias_, &N::output_, &N::log_sumexp_)
  MEMOPT_SAVER("_scaled_dot_product_cudnn_attention", _scaled_dot_product_cudnn_attention,
               ScaledDotProductCudnnAttentionBackward0, &N::query_, &N::key_, &N::value_,
               &N::attn_bias_, &N::output_, &N::logsumexp_)
}

}  // namespace memopt::intercept
