#include "savers.h"

#include <ATen/Operators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/library.h>

#include <atomic>
#include <optional>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "../saved/recipe_registry.h"
#include "here.h"
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

// Who is shown what an op has saved, where hooks would do nothing else.
struct Viewer {
  RecipeRegistry* registry = nullptr;
  autograd::HookedPacker* packer = nullptr;  // if there is no registry alone

  // Of an op with `keys`; of none where hooks are to get what it saves.
  static Viewer of(DispatchKeySet keys, bool for_packers) {
    if (!at::GradMode::is_enabled() || !kKnown.has_all(keys)) return {};
    auto* registry = static_cast<RecipeRegistry*>(autograd::recipe_recorder());
    if (registry != nullptr && registry->is_alone()) return {registry, nullptr};
    return {nullptr, for_packers ? autograd::packer_here() : nullptr};
  }

  explicit operator bool() const { return registry != nullptr || packer != nullptr; }
};

const Tensor& first(const Tensor& result) {
  return result;
}
template <class... Others>
const Tensor& first(const std::tuple<Tensor, Others...>& result) {
  return std::get<0>(result);
}

// Whether forward derivatives are computed anywhere. To ask each tensor takes a lock for each.
bool tangents_exist() {
  return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

// A derivative that is computed forward is of other ops, whose tensors hooks are to get.
bool has_tangent(const Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}
bool has_tangent(const std::optional<Tensor>& tensor) {
  return tensor.has_value() && has_tangent(*tensor);
}
template <class Other>
bool has_tangent(const Other&) {
  return false;
}

// Whether packers can have all that the op saves, and a second call gives the same.
template <class Op, class... Others>
constexpr bool is_one_of(std::tuple<Others...>*) {
  return (std::is_same_v<Op, Others> || ...);
}
using OnlyForRecipes = std::tuple<at::_ops::native_dropout, at::_ops::native_batch_norm,
                                  at::_ops::_scaled_dot_product_flash_attention,
                                  at::_ops::_scaled_dot_product_efficient_attention,
                                  at::_ops::_scaled_dot_product_cudnn_attention>;
template <class Op>
constexpr bool kIsForPackers = !is_one_of<Op>(static_cast<OnlyForRecipes*>(nullptr));

// Whether it saves a result, so that its kernel has run when it has saved the last tensor.
using SaveResults =
    std::tuple<at::_ops::relu, at::_ops::sigmoid, at::_ops::exp, at::_ops::sqrt, at::_ops::rsqrt,
               at::_ops::tanh, at::_ops::_softmax, at::_ops::_safe_softmax, at::_ops::_log_softmax,
               at::_ops::nll_loss_forward, at::_ops::native_layer_norm, at::_ops::native_group_norm,
               at::_ops::_scaled_dot_product_flash_attention_for_cpu>;
template <class Op>
constexpr bool kSavesResult = is_one_of<Op>(static_cast<SaveResults*>(nullptr));

// The tensors among an op's arguments, and those that its node gave to a packer, by their numbers.
class TensorArguments {
 public:
  template <class... All>
  explicit TensorArguments(const All&... all) {
    (add(all), ...);
  }

  autograd::HookedPacker::OpArguments all() const { return tensors_; }

  int8_t number_of(const SavedVariable& saved) const {
    const auto raw = saved.get_raw_data();
    for (size_t i = 0; raw.has_value() && i < tensors_.size(); ++i) {
      if (tensors_[i]->is_same(*raw)) return static_cast<int8_t>(i);
    }
    return -1;
  }

 private:
  void add(const Tensor& tensor) { tensors_.push_back(&tensor); }
  template <class Other>
  void add(const Other&) {}

  c10::SmallVector<const Tensor*, 4> tensors_;
};

// The kernel of `Op` (at::_ops), whose node is a `Node` with these members, in the order in which
// PyTorch saves them: inputs before outputs, each by name. A packer must be shown all.
template <class Op, class Node, SavedVariable Node::*... members>
struct Saver {
  template <class Schema>
  struct Kernel;
  template <class Result, class... Arguments>
  struct Kernel<Result(Arguments...)> {
    static Result call(DispatchKeySet keys, Arguments... arguments) {
      const DispatchKeySet below = below_intercept(keys);
      // A backend, or a library, may have given the op another derivative.
      static std::atomic<bool> has_other_node = false;
      constexpr size_t most = kSavesResult<Op> ? 0 : sizeof...(members);
      auto viewer = Viewer::of(keys, kIsForPackers<Op> && !has_other_node.load());
      const TensorArguments tensors(arguments...);
      if (auto*& packer = viewer.packer; packer != nullptr) {
        const bool is_plain = !tangents_exist() || !(has_tangent(arguments) || ...);
        if (is_plain && packer->pack_arguments(&has_other_node, tensors.all()))
          autograd::HookedPacker::end_function();
        if (!is_plain || !packer->packs_afterwards(most)) packer = nullptr;
      }
      if (!viewer) return Op::redispatch(below, arguments...);
      Result result = [&] {
        const autograd::WithoutHooks without_hooks;
        return Op::redispatch(below, arguments...);
      }();
      const auto& node = first(result).grad_fn();
      if (node == nullptr) return result;
      if (typeid(*node) != typeid(Node)) {
        if (viewer.registry != nullptr) return result;
        has_other_node = true;
        return Op::redispatch(below, arguments...);
      }
      auto& known = static_cast<Node&>(*node);
      if (viewer.registry != nullptr) {
        (viewer.registry->see_saved(node, known.*members), ...);
        return result;
      }
      c10::SmallVector<int8_t, 8> numbers;
      const auto pack = [&](SavedVariable& saved) {
        const auto number = tensors.number_of(saved);
        if (viewer.packer->pack_saved(node, saved)) numbers.push_back(number);
      };
      (pack(known.*members), ...);
      if (viewer.packer->is_complete()) autograd::HookedPacker::end_function();
      viewer.packer->note_arguments(&has_other_node, numbers);
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

at::Tensor mul_of_torch(DispatchKeySet keys, const Tensor& self, const Tensor& other) {
  using N = nodes::MulBackward0;
  return Saver<at::_ops::mul_Tensor, N, &N::other_, &N::self_>::Call::call(keys, self, other);
}

Tensor div_of_torch(DispatchKeySet keys, const Tensor& self, const Tensor& other) {
  using N = nodes::DivBackward0;
  return Saver<at::_ops::div_Tensor, N, &N::other_, &N::self_>::Call::call(keys, self, other);
}

Tensor pow_of_torch(DispatchKeySet keys, const Tensor& self, const at::Scalar& exponent) {
  using N = nodes::PowBackward0;
  return Saver<at::_ops::pow_Tensor_Scalar, N, &N::self_>::Call::call(keys, self, exponent);
}

// The op in its schema and in at::_ops, its node N, and what that saves.
#define MEMOPT_SAVER(schema, op, node, ...)                                      \
  {                                                                              \
    using N = nodes::node;                                                       \
    m.impl(schema, TORCH_FN((Saver<at::_ops::op, N, __VA_ARGS__>::Call::call))); \
  }

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  MEMOPT_SAVER("addmm", addmm, AddmmBackward0, &N::mat1_, &N::mat2_)
  MEMOPT_SAVER("mm", mm, MmBackward0, &N::mat2_, &N::self_)
  MEMOPT_SAVER("bmm", bmm, BmmBackward0, &N::mat2_, &N::self_)
  MEMOPT_SAVER("baddbmm", baddbmm, BaddbmmBackward0, &N::batch1_, &N::batch2_)
  MEMOPT_SAVER("convolution", convolution, ConvolutionBackward0, &N::input_, &N::weight_)
  MEMOPT_SAVER("exp", exp, ExpBackward0, &N::result_)
  MEMOPT_SAVER("log", log, LogBackward0, &N::self_)
  MEMOPT_SAVER("sin", sin, SinBackward0, &N::self_)
  MEMOPT_SAVER("cos", cos, CosBackward0, &N::self_)
  MEMOPT_SAVER("erf", erf, ErfBackward0, &N::self_)
  MEMOPT_SAVER("sqrt", sqrt, SqrtBackward0, &N::result_)
  MEMOPT_SAVER("rsqrt", rsqrt, RsqrtBackward0, &N::result_)
  MEMOPT_SAVER("tanh", tanh, TanhBackward0, &N::result_)
  MEMOPT_SAVER("where.self", where_self, WhereBackward0, &N::condition_)
  MEMOPT_SAVER("gather", gather, GatherBackward0, &N::index_, &N::self_)
  MEMOPT_SAVER("masked_fill.Scalar", masked_fill_Scalar, MaskedFillBackward0, &N::mask_)
  MEMOPT_SAVER("embedding", embedding, EmbeddingBackward0, &N::indices_)
  MEMOPT_SAVER("_softmax", _softmax, SoftmaxBackward0, &N::result_)
  MEMOPT_SAVER("_safe_softmax", _safe_softmax, SafeSoftmaxBackward0, &N::result_)
  MEMOPT_SAVER("_log_softmax", _log_softmax, LogSoftmaxBackward0, &N::result_)
  MEMOPT_SAVER("nll_loss_forward", nll_loss_forward, NllLossBackward0, &N::self_, &N::target_,
               &N::weight_, &N::total_weight_)
  MEMOPT_SAVER("native_layer_norm", native_layer_norm, NativeLayerNormBackward0, &N::bias_,
               &N::input_, &N::weight_, &N::result1_, &N::result2_)
  MEMOPT_SAVER("native_group_norm", native_group_norm, NativeGroupNormBackward0, &N::input_,
               &N::weight_, &N::result1_, &N::result2_)
  MEMOPT_SAVER("native_batch_norm", native_batch_norm, NativeBatchNormBackward0, &N::input_,
               &N::running_mean_, &N::running_var_, &N::weight_, &N::result1_, &N::result2_)
  MEMOPT_SAVER("native_dropout", native_dropout, NativeDropoutBackward0, &N::result1_)
  MEMOPT_SAVER("_scaled_dot_product_flash_attention_for_cpu",
               _scaled_dot_product_flash_attention_for_cpu,
               ScaledDotProductFlashAttentionForCpuBackward0, &N::attn_mask_, &N::key_, &N::query_,
               &N::value_, &N::logsumexp_, &N::output_)
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
