// The functions behind the private ops; declare.h describes their arguments. For autograd/, which
// calls the ops through the dispatcher with these types.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>

namespace memopt::ops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Scalar = std::optional<double>;                    // of an activation
using NormActivation = std::optional<std::string_view>;  // behind a norm
using Results2 = std::tuple<Tensor, Tensor>;
using Results3 = std::tuple<Tensor, Tensor, Tensor>;
using Results4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Results5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
// total, loss, log_sum, entropy; the gradients of input, weight, bias.
using LossResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Tensor _activation_forward(const Tensor& input, std::string_view name, Scalar scalar);
void _activation_forward_(const Tensor& input, std::string_view name, Scalar scalar);
Results2 _activation_backward(const Tensor& grad_output, const Tensor& input, std::string_view name,
                              Scalar scalar, bool recompute_output);
void _activation_backward_(const Tensor& grad_output, const Tensor& input, std::string_view name,
                           Scalar scalar, const OptionalTensor& output);

Tensor _gated_forward(const Tensor& gate, const Tensor& up, std::string_view name, Scalar scalar);
void _gated_forward_(const Tensor& gate, const Tensor& up, std::string_view name, Scalar scalar);
Results3 _gated_backward(const Tensor& grad_output, const Tensor& gate, const OptionalTensor& up,
                         std::string_view name, Scalar scalar, std::array<bool, 2> output_mask,
                         bool recompute_output);
void _gated_backward_(const Tensor& grad_output, const Tensor& gate, const Tensor& up,
                      std::string_view name, Scalar scalar, const OptionalTensor& grad_up,
                      const OptionalTensor& output);
Tensor _gated_packed_forward(const Tensor& input, std::string_view name, Scalar scalar,
                             bool interleaved);
Results2 _gated_packed_backward(const Tensor& grad_output, const Tensor& input,
                                std::string_view name, Scalar scalar, bool interleaved,
                                bool recompute_output);

Results4 _norm_forward(const Tensor& input, const OptionalTensor& residual, int64_t normalized_dims,
                       const OptionalTensor& weight, const OptionalTensor& bias,
                       std::optional<double> eps, std::string_view kind, bool zero_centered_weight,
                       NormActivation activation, bool for_backward);
Results4 _norm_backward(const Tensor& grad_output, const OptionalTensor& grad_sum, const Tensor& x,
                        int64_t normalized_dims, const OptionalTensor& mean, const Tensor& rstd,
                        const OptionalTensor& weight, const OptionalTensor& bias,
                        std::array<bool, 3> output_mask, bool recompute_output,
                        std::string_view kind, bool zero_centered_weight,
                        NormActivation activation);
Results3 _norm_backward_(const Tensor& grad_output, const Tensor& x, int64_t normalized_dims,
                         const OptionalTensor& mean, const Tensor& rstd,
                         const OptionalTensor& weight, const OptionalTensor& bias,
                         std::array<bool, 2> output_mask, bool recompute_output,
                         std::string_view kind, bool zero_centered_weight,
                         NormActivation activation);

// kind: "group_norm", "instance_norm", "batch_norm", "sync_batch_norm". Without mean and rstd the
// statistics are those of input, and are returned if they are wanted (the variance without bias);
// otherwise they are constants.
Results4 _channel_norm_forward(const Tensor& input, int64_t groups, const OptionalTensor& mean,
                               const OptionalTensor& rstd, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps, std::string_view kind,
                               NormActivation activation, Scalar scalar, bool for_backward,
                               bool with_variance);
Results3 _channel_norm_backward(const Tensor& grad_output, const Tensor& input, int64_t groups,
                                const Tensor& mean, const Tensor& rstd,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                bool given_statistics, std::array<bool, 3> output_mask,
                                std::string_view kind, NormActivation activation, Scalar scalar);

// The gradient of the norm's output from that of the activation behind it.
Tensor _channel_norm_activation_backward(const Tensor& grad_output, const Tensor& input,
                                         int64_t groups, const Tensor& mean, const Tensor& rstd,
                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                         std::string_view kind, std::string_view name,
                                         Scalar scalar);

// Batch norm's steps on one rank of several; between them the ranks exchange what they have.
// Moments of each channel: the mean is mean + shift. Sums of each channel: of grad_output, and of
// its products with xhat. means [channels, 2]: of both over all ranks, after weight.
Results3 _sync_batch_norm_moments(const Tensor& input);
Results2 _sync_batch_norm_sums(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                               const Tensor& rstd);
Tensor _sync_batch_norm_input_gradient(const Tensor& grad_output, const Tensor& input,
                                       const Tensor& mean, const Tensor& rstd,
                                       const OptionalTensor& weight, const Tensor& means);

Results2 _dropout_forward(const Tensor& input, double p, bool for_backward);
Tensor _dropout_backward(const Tensor& grad_output, const Tensor& rng_state, double p);
Results2 _activation_dropout_forward(const Tensor& input, const OptionalTensor& rng_state, double p,
                                     std::string_view name, Scalar scalar, bool for_backward);
Results2 _activation_dropout_backward(const Tensor& grad_output, const Tensor& input,
                                      const Tensor& rng_state, double p, std::string_view name,
                                      Scalar scalar, bool recompute_output);
Results5 _dropout_add_norm_forward(const Tensor& input, const Tensor& residual,
                                   const OptionalTensor& rng_state, double p,
                                   int64_t normalized_dims, const OptionalTensor& weight,
                                   const OptionalTensor& bias, std::optional<double> eps,
                                   std::string_view kind, bool zero_centered_weight,
                                   bool for_backward);
Results5 _dropout_add_norm_backward(const Tensor& grad_output, const OptionalTensor& grad_sum,
                                    const Tensor& sum, const Tensor& rng_state, double p,
                                    int64_t normalized_dims, const OptionalTensor& mean,
                                    const Tensor& rstd, const OptionalTensor& weight,
                                    const OptionalTensor& bias, std::array<bool, 4> output_mask,
                                    bool recompute_output, std::string_view kind,
                                    bool zero_centered_weight);

// Of logits [N, cols]: the sum of the rows' losses, each row's, and what backward needs of it.
Results3 _cross_entropy_forward(const Tensor& input, const Tensor& target,
                                const OptionalTensor& class_weight, int64_t ignore_index,
                                double label_smoothing);
// grad_loss: [N], or one number for all rows.
Tensor _cross_entropy_backward(const Tensor& grad_loss, const Tensor& input, const Tensor& log_sum,
                               const Tensor& target, const OptionalTensor& class_weight,
                               int64_t ignore_index, double label_smoothing);
void _cross_entropy_backward_(const Tensor& grad_loss, const Tensor& input, const Tensor& log_sum,
                              const Tensor& target, const OptionalTensor& class_weight,
                              int64_t ignore_index, double label_smoothing);

// Of input [N, features] and linear_weight [cols, features]. The gradients that output_mask asks
// for (of input, weight, bias) are those of the sum over rows of grad_loss times loss, and of
// grad_entropy times entropy: each [N], or one number for all rows; without grad_loss of the sum of
// losses. Without a target a row's loss is the logsumexp of its logits.
// With log_sum (and entropy), those of a call before, there are no results but gradients.
// The weight's gradient is float32 for float16; the bias's has the type of sums. softcap 0: none.
LossResults _linear_cross_entropy(
    const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias,
    const OptionalTensor& target_or_none, const OptionalTensor& class_weight,
    const OptionalTensor& grad_loss, const OptionalTensor& grad_entropy,
    const OptionalTensor& log_sum, const OptionalTensor& entropy, int64_t ignore_index,
    double label_smoothing, double softcap, double logit_scale, double z_loss, bool log_probs,
    bool with_entropy, std::array<bool, 3> output_mask, std::optional<int64_t> chunk);

}  // namespace memopt::ops
