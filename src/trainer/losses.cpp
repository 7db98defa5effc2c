#include "hasten/trainer/losses.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "metrics/metric_checks.h"
#include "trainer_parts.h"

namespace hasten {

namespace detail {

constexpr const char* kLossesWhere = "trainer::losses";

[[noreturn]] void refuse_loss_inputs(const at::Tensor& logits, const at::Tensor& labels,
                                     const char* expected) {
  throw InputError(kLossesWhere, "outputs=" + form_text(logits) + ", labels=" + form_text(labels),
                   expected);
}

/// Losses of 16-bit outputs are computed in fp32.
at::Tensor wide(const at::Tensor& logits) {
  return logits.element_size() < 4 ? logits.to(at::kFloat) : logits;
}

at::Tensor weights_of(const std::vector<double>& weights, const at::Tensor& like) {
  return at::tensor(weights, at::kDouble).to(like.device(), like.scalar_type());
}

/// The labels of each token's next one, as of a causal language model.
static at::Tensor next_labels(const at::Tensor& labels) {
  return at::constant_pad_nd(labels.slice(1, 1), {0, 1}, -100);
}

/// Whether the labels are those of the next tokens. Empty: this batch does not show it. Throws
/// InputError if the loss is neither cross-entropy, because another one would replace it.
static std::optional<bool> shifts_labels(const LossOutput& own, const at::Tensor& labels) {
  const at::NoGradGuard no_grad;
  const double loss = own.loss_sum.item<double>();
  const bool narrow = own.outputs.defined() && own.outputs.element_size() < 4;
  double nearest = (narrow ? 2e-2 : 1e-3) * std::abs(loss) + 1e-6;
  std::optional<bool> shifts;
  const auto compare = [&](const LossOutput& plain, bool shifted) {
    const double difference = std::abs(plain.loss_sum.item<double>() - loss);
    if (own.weight == plain.weight && difference <= nearest) {
      nearest = difference;
      shifts = shifted;
    }
  };
  compare(labels.is_floating_point() ? bce_with_logits_output(own.outputs, labels)
                                     : cross_entropy_output(own.outputs, labels),
          false);
  if (labels.dim() >= 2 && !labels.is_floating_point()) {
    compare(cross_entropy_output(own.outputs, next_labels(labels)), true);
  }
  if (!shifts && std::isfinite(loss)) {
    throw InputError(kLossesWhere,
                     "label_smoothing_factor or class_weights, which replace cross-entropy, with a "
                     "loss function of your own",
                     "the cross-entropy of outputs and labels, over their number",
                     "leave both arguments out, and return cross_entropy_output(logits, labels, "
                     "{.label_smoothing, .class_weights}) or what you need");
  }
  return loss == 0 ? std::nullopt : shifts;
}

LossFunction with_objective(LossFunction inner, ClassificationLossOptions how, bool balanced) {
  const auto shifts = std::make_shared<std::optional<bool>>();
  return [inner = std::move(inner), how = std::move(how), balanced, shifts](const Batch& batch) {
    LossOutput output = inner(batch);
    if (!output.loss_sum.defined() || !batch.has("labels")) {
      return output;
    }
    if (!*shifts) {
      *shifts = shifts_labels(output, batch["labels"]);
    }
    const at::Tensor labels =
        shifts->value_or(false) ? next_labels(batch["labels"]) : batch["labels"];
    if (labels.is_floating_point() && labels.dim() == 2 && how.label_smoothing == 0) {
      return bce_with_logits_output(output.outputs, labels, how.class_weights);
    }
    if (!balanced) {
      return cross_entropy_output(output.outputs, labels, how);
    }
    ClassificationLossOptions padded = how; // labels without samples have weight 1
    padded.class_weights.resize(
        std::max(padded.class_weights.size(), static_cast<size_t>(output.outputs.size(-1))), 1.0);
    return cross_entropy_output(output.outputs, labels, padded);
  };
}

} // namespace detail

LossOutput cross_entropy_output(const at::Tensor& logits, const at::Tensor& labels,
                                const ClassificationLossOptions& options) {
  if (!logits.defined() || !labels.defined() || logits.dim() < 2 || !logits.is_floating_point() ||
      labels.scalar_type() != at::kLong ||
      logits.sizes().slice(0, logits.dim() - 1) != labels.sizes()) {
    detail::refuse_loss_inputs(logits, labels, "logits [..., classes] and int64 labels [...]");
  }
  const int64_t classes = logits.size(-1);
  LossOutput result;
  result.outputs = logits;
  const at::Tensor flat = detail::wide(logits).reshape({-1, classes});
  const at::Tensor numbers = labels.reshape({-1});
  at::Tensor weights;
  if (options.class_weights.empty()) {
    result.weight = DeviceScalar(numbers.ne(-100).sum().to(at::kDouble));
  } else {
    if (static_cast<int64_t>(options.class_weights.size()) != classes) {
      throw InputError(detail::kLossesWhere,
                       "class_weights of " + std::to_string(options.class_weights.size()) +
                           " labels for a model with " + std::to_string(classes),
                       "one number per label");
    }
    weights = detail::weights_of(options.class_weights, flat);
    const at::Tensor ignored = numbers.eq(-100);
    result.weight = DeviceScalar(detail::weights_of(options.class_weights, flat.to(at::kDouble))
                                     .index_select(0, numbers.masked_fill(ignored, 0))
                                     .masked_fill(ignored, 0)
                                     .sum());
  }
  result.loss_sum = at::cross_entropy_loss(flat, numbers, weights, at::Reduction::Sum,
                                           /*ignore_index=*/-100, options.label_smoothing);
  return result;
}

LossOutput mse_output(const at::Tensor& logits, const at::Tensor& labels) {
  const bool column = logits.dim() == 2 && logits.size(1) == 1;
  if (!(column || logits.dim() == 1) || labels.dim() != 1 || labels.size(0) != logits.size(0) ||
      !labels.is_floating_point()) {
    detail::refuse_loss_inputs(logits, labels,
                               "one output per sample and floating-point labels [B]");
  }
  LossOutput result;
  result.outputs = detail::wide(column ? logits.squeeze(1) : logits);
  result.loss_sum =
      at::mse_loss(result.outputs, labels.to(result.outputs.scalar_type()), at::Reduction::Sum);
  result.weight = static_cast<double>(labels.size(0));
  return result;
}

LossOutput bce_with_logits_output(const at::Tensor& logits, const at::Tensor& labels,
                                  const std::vector<double>& pos_weight) {
  if (logits.dim() != 2 || labels.sizes() != logits.sizes() || !labels.is_floating_point()) {
    detail::refuse_loss_inputs(logits, labels, "logits and floating-point labels [B, labels]");
  }
  if (!pos_weight.empty() && static_cast<int64_t>(pos_weight.size()) != logits.size(1)) {
    throw InputError(detail::kLossesWhere,
                     "pos_weight of " + std::to_string(pos_weight.size()) +
                         " labels for a model with " + std::to_string(logits.size(1)),
                     "one number per label");
  }
  LossOutput result;
  result.outputs = detail::wide(logits);
  result.loss_sum =
      at::binary_cross_entropy_with_logits(
          result.outputs, labels.to(result.outputs.scalar_type()), {},
          pos_weight.empty() ? at::Tensor() : detail::weights_of(pos_weight, result.outputs),
          at::Reduction::Sum) /
      static_cast<double>(logits.size(1));
  result.weight = static_cast<double>(logits.size(0));
  return result;
}

std::vector<double> resolve_class_weights(const std::string& class_weights, const Dataset* train,
                                          const std::string& labels_name) {
  if (class_weights != "balanced") {
    return class_weight_numbers(class_weights);
  }
  const auto refuse = [](const std::string& why) {
    throw InputError(detail::kLossesWhere, "class_weights=balanced " + why,
                     "training data whose labels are class numbers", "set the weights as numbers");
  };
  if (train == nullptr) {
    refuse("without training data");
  }
  constexpr int64_t kRowsAtOnce = 1024;
  std::vector<int64_t> counts;
  for (int64_t row = 0; row < train->size(); row += kRowsAtOnce) {
    std::vector<int64_t> rows(static_cast<size_t>(std::min(kRowsAtOnce, train->size() - row)));
    std::iota(rows.begin(), rows.end(), row);
    const Batch batch = train->collate(rows);
    if (!batch.has(labels_name) || batch[labels_name].scalar_type() != at::kLong) {
      refuse(batch.has(labels_name) ? "with labels of type " + detail::form_text(batch[labels_name])
                                    : "with batches that lack " + labels_name);
    }
    const at::Tensor labels = batch[labels_name].reshape({-1}).contiguous();
    const auto* label = labels.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < labels.numel(); ++i) {
      if (label[i] >= 0) {
        counts.resize(std::max(counts.size(), static_cast<size_t>(label[i]) + 1));
        ++counts[static_cast<size_t>(label[i])];
      }
    }
  }
  const auto total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const auto present = std::count_if(counts.begin(), counts.end(), [](int64_t n) { return n > 0; });
  return mapped(counts, [&](int64_t count) {
    return count == 0 ? 1.0 : static_cast<double>(total) / static_cast<double>(present * count);
  });
}

} // namespace hasten
