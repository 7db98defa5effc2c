// Losses of the usual heads, as a Trainer wants them: a sum and the weight it is to be
// divided by. The division is the Trainer's, over all micro-batches and ranks of an
// update; what it gives is torch's loss with reduction=mean on the joined batch.
// Local. Threading: free functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "hasten/trainer/trainer.h"
#include "hasten/trainer/training_arguments.h"

namespace hasten {

struct ClassificationLossOptions {
  /// torch's cross_entropy(label_smoothing), which is transformers' LabelSmoother:
  ///   (1 - e) * -log p[label] + e * mean over classes of -log p. In [0, 1).
  double label_smoothing = 0;
  /// torch's cross_entropy(weight): [class], above 0; empty: all 1. The weight is then
  /// the sum of the labels' weights. With smoothing each class's share has its own weight, as in torch. transformers has
  /// no class weights; who adds them there gets each micro-batch divided by its own
  /// sum, which is another loss under accumulation.
  std::vector<double> class_weights{};
};

/// Cross-entropy. logits [..., C] of a floating type, labels [...] int64; rows (or
/// tokens) with label -100 count nothing. outputs = logits. Cost: the host reads one
/// number, the weight.
/// Throws InputError: other shapes or types, class_weights of another number.
LossOutput cross_entropy_output(const at::Tensor& logits, const at::Tensor& labels,
                                const ClassificationLossOptions& options = {});

/// Mean squared error of a regression with one output. logits [B] or [B, 1], labels
/// [B] of a floating type; weight = B; outputs = logits as [B].
LossOutput mse_output(const at::Tensor& logits, const at::Tensor& labels);

/// Several labels at once: BCE with logits, the mean over a row's labels; weight = B.
/// logits and labels [B, L], labels 0 or 1 of a floating type. `pos_weight` [label]
/// weighs the positive rows of each, as in torch; empty: all 1. outputs = logits.
LossOutput bce_with_logits_output(const at::Tensor& logits, const at::Tensor& labels,
                                  const std::vector<double>& pos_weight = {});

/// class_weights of the arguments as numbers. "balanced" looks at `labels_name` of
/// every row of `train`, which costs reading each once; labels it does not have count
/// 1. Empty where the arguments say nothing.
/// Throws InputError: "balanced" without training data or with labels that are no
/// int64.
std::vector<double> resolve_class_weights(const std::string& class_weights, const Dataset* train,
                                          const std::string& labels_name = "labels");

} // namespace hasten
