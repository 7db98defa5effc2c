#include "hasten/models/linear_cross_entropy.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "hasten/base/error.h"
#include "hasten/core/autocast.h"
#include "hasten/core/gradient_place.h"
#include "hasten/core/linear.h"
#include "hasten/core/memory_rehearsal.h"

namespace hasten {

namespace detail {

constexpr const char* kLinearCrossEntropy = "models::linear_cross_entropy";
constexpr int64_t kNoLabel = -100;
constexpr int64_t kCachedBytes = 8 << 20; // of logits in fp32, which a cache keeps

/// Tokens of a slice: 32 times a power of four, for which products have kernels.
static int64_t slice_tokens(int64_t vocab_size, int64_t slice_bytes) {
  int64_t tokens = 32;
  while (tokens * 4 * vocab_size * 4 <= slice_bytes) {
    tokens *= 4;
  }
  return tokens;
}

/// The gradient of `weight`, times `factor` [].
static at::Tensor weight_gradient(const at::Tensor& of_logits, const at::Tensor& hidden,
                                  const at::Tensor& weight, const at::Tensor& factor) {
  const bool wide = weight.scalar_type() == at::kFloat;
  at::Tensor sum = wide ? gradient_place(weight) : at::Tensor();
  sum = sum.defined() ? sum : at::empty(weight.sizes(), weight.options().dtype(at::kFloat));
  if (of_logits.scalar_type() == at::kFloat) {
    product_over_rows(of_logits, hidden.to(at::kFloat) * factor, sum, false);
  } else { // 16 bits might not hold hidden times the factor
    product_over_rows(of_logits, hidden.to(of_logits.scalar_type()), sum, false);
    sum.mul_(factor);
  }
  return sum.to(weight.scalar_type());
}

/// Writes the losses of logits [tokens, V]. With `gradients` the logits become their gradients: p, less 1
/// at the label.
static void take_losses(const at::Tensor& logits, const at::Tensor& labels,
                        const at::Tensor& losses, bool gradients) {
  const int64_t step = slice_tokens(logits.size(1), kCachedBytes);
  for (int64_t begin = 0; begin < logits.size(0); begin += step) {
    const int64_t tokens = std::min(step, logits.size(0) - begin);
    const at::Tensor part = logits.narrow(0, begin, tokens);
    const at::Tensor ignored = labels.narrow(0, begin, tokens).eq(kNoLabel).unsqueeze(1);
    const at::Tensor truth = labels.narrow(0, begin, tokens).unsqueeze(1).masked_fill(ignored, 0);
    at::Tensor p = at::log_softmax(part, 1, at::kFloat);
    losses.narrow(0, begin, tokens)
        .copy_(p.gather(1, truth).neg_().masked_fill_(ignored, 0).squeeze(1));
    if (gradients) {
      p.exp_().scatter_add_(1, truth, at::full({tokens, 1}, -1.0f, p.options()));
      part.copy_(p.masked_fill_(ignored, 0));
    }
  }
}

/// The weight's gradient is a product of the logits' gradient and x. Of the two gradients, the smaller
/// one waits for backward: the logits' one is only whole where one slice has all tokens.
class SlicedLoss : public torch::autograd::Function<SlicedLoss> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& hidden, const at::Tensor& weight,
                                                const at::Tensor& labels, int64_t step,
                                                bool of_hidden, bool of_weight, double softcap) {
    const auto narrow = autocast_dtype(hidden.device().type());
    const at::Tensor x = narrow ? hidden.to(*narrow) : hidden;
    const at::Tensor w = narrow ? weight.to(*narrow) : weight;
    const at::Tensor losses = at::empty({x.size(0)}, x.options().dtype(at::kFloat));
    at::Tensor x_gradient, w_gradient;
    if (of_hidden) {
      x_gradient = at::empty_like(hidden);
    }
    const bool later = of_weight && x.size(0) <= std::min(step, weight.size(1));
    if (of_weight && !later) {
      w_gradient = at::empty(weight.sizes(), weight.options().dtype(at::kFloat));
    }
    for (int64_t begin = 0; begin < x.size(0); begin += step) {
      const int64_t tokens = std::min(step, x.size(0) - begin);
      const at::Tensor part = x.narrow(0, begin, tokens);
      const at::Tensor gradient = fast_linear(part, w);
      at::Tensor bend; // tanh's derivative
      if (softcap > 0) {
        gradient.div_(softcap).tanh_();
        bend = 1 - gradient.square();
        gradient.mul_(softcap);
      }
      take_losses(gradient, labels.narrow(0, begin, tokens), losses.narrow(0, begin, tokens),
                  of_hidden || of_weight);
      if (softcap > 0) {
        gradient.mul_(bend);
      }
      if (of_hidden) {
        x_gradient.narrow(0, begin, tokens).copy_(fast_linear(gradient, w.t()));
      }
      if (later) {
        context->save_for_backward({hidden, weight});
        context->saved_data["logits"] = gradient;
      } else if (of_weight) {
        product_over_rows(gradient, part, w_gradient, begin > 0);
      }
    }
    if (of_hidden) {
      context->saved_data["hidden"] = x_gradient;
    }
    if (w_gradient.defined()) {
      context->saved_data["weight"] = w_gradient.to(weight.scalar_type());
    }
    context->mark_non_differentiable({losses});
    return {losses.sum(), losses};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (at::GradMode::is_enabled()) {
      throw InputError(kLinearCrossEntropy, "a second-order gradient (create_graph=true)",
                       "first-order gradients", "compute the loss from the model's logits");
    }
    const bool again = torch::autograd::get_current_graph_task_keep_graph();
    const auto scaled = [&](const char* name) {
      const auto found = context->saved_data.find(name);
      if (found == context->saved_data.end() || !gradients[0].defined()) {
        return at::Tensor();
      }
      const at::Tensor kept = found->second.toTensor();
      return again ? kept * gradients[0] : kept.mul_(gradients[0]);
    };
    at::Tensor of_hidden = scaled("hidden"), of_weight = scaled("weight");
    const auto logits = context->saved_data.find("logits");
    if (logits != context->saved_data.end() && gradients[0].defined()) {
      const auto saved = context->get_saved_variables();
      of_weight = weight_gradient(logits->second.toTensor(), saved[0], saved[1], gradients[0]);
    }
    if (!again) {
      context->saved_data.clear();
    }
    return {of_hidden, of_weight, {}, {}, {}, {}, {}};
  }
};

/// The indices of the tokens that have a label. Undefined if nearly all have one, or none, or if reading
/// the labels would wait for a device.
static at::Tensor labelled_tokens(const at::Tensor& labels) {
  if (!labels.is_cpu() || in_memory_rehearsal()) {
    return {};
  }
  const at::Tensor kept = labels.ne(kNoLabel).nonzero().squeeze(1);
  const bool few = kept.numel() > 0 && 8 * kept.numel() <= 7 * labels.numel();
  return few ? kept : at::Tensor();
}

static void check_loss_inputs(const at::Tensor& hidden, const at::Tensor& weight,
                              const at::Tensor& labels) {
  if (!hidden.defined() || !weight.defined() || !labels.defined() || weight.dim() != 2 ||
      hidden.dim() < 2 || hidden.size(-1) != weight.size(1) || !hidden.is_floating_point() ||
      labels.scalar_type() != at::kLong ||
      labels.sizes() != hidden.sizes().slice(0, hidden.dim() - 1)) {
    const auto text = [](const at::Tensor& of) {
      return of.defined() ? c10::str(of.scalar_type(), of.sizes()) : std::string("undefined");
    };
    throw InputError(
        kLinearCrossEntropy,
        "hidden=" + text(hidden) + ", weight=" + text(weight) + ", labels=" + text(labels),
        "hidden [..., H] and weight [V, H] of a float type, labels [...] of int64");
  }
  if (!labels.is_cpu() || in_memory_rehearsal() || labels.numel() == 0) {
    return;
  }
  const at::Tensor wrong =
      labels.ne(kNoLabel).logical_and(labels.lt(0).logical_or(labels.ge(weight.size(0))));
  if (wrong.any().item<bool>()) {
    throw InputError(kLinearCrossEntropy,
                     "label=" + std::to_string(labels.masked_select(wrong)[0].item<int64_t>()),
                     "0 to " + std::to_string(weight.size(0) - 1) + ", or -100 for no loss");
  }
}

} // namespace detail

LinearCrossEntropy linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                        const at::Tensor& labels, int64_t slice_bytes,
                                        double softcap) {
  detail::check_loss_inputs(hidden, weight, labels);
  const bool graph = at::GradMode::is_enabled();
  at::Tensor rows = hidden.reshape({-1, hidden.size(-1)}), truth = labels.reshape({-1});
  const at::Tensor kept = detail::labelled_tokens(truth);
  if (kept.defined()) {
    rows = rows.index_select(0, kept);
    truth = truth.index_select(0, kept);
  }
  const auto made = detail::SlicedLoss::apply(
      rows, weight, truth, detail::slice_tokens(weight.size(0), slice_bytes),
      graph && hidden.requires_grad(), graph && weight.requires_grad(), softcap);
  const at::Tensor losses =
      kept.defined() ? made[1].new_zeros({labels.numel()}).index_copy_(0, kept, made[1]) : made[1];
  return {.loss_sum = made[0], .token_losses = losses.view(labels.sizes())};
}

at::Tensor shifted_labels(const at::Tensor& labels) {
  return at::constant_pad_nd(labels.slice(1, 1), {0, 1}, detail::kNoLabel);
}

} // namespace hasten
