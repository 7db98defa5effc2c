// Losses of the usual heads for a Trainer: a sum, and the weight to divide it by. The Trainer
// divides, over all micro-batches and ranks of a step. The result is torch's loss with
// reduction=mean on the joined batch. Local. Threading: free functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "hasten/config/training_arguments.h"
#include "hasten/trainer/trainer.h"

namespace hasten {

struct ClassificationLossOptions {
  /// torch's cross_entropy(label_smoothing), which is transformers' LabelSmoother:
  ///   (1 - e) * -log p[label] + e * mean over classes of -log p. In [0, 1).
  double label_smoothing = 0;
  /// torch's cross_entropy(weight): [class], above 0; empty: all 1. The loss's weight is then the
  /// sum of the labels' weights. With smoothing each class's term has its own weight, as in torch.
  /// transformers has no class weights; adding them there divides each micro-batch by its own sum,
  /// which is another loss under accumulation.
  std::vector<double> class_weights{};
};

/// Cross-entropy. logits [..., C] of a floating type, labels [...] int64; samples (or tokens) with
/// label -100 are ignored. outputs = logits. Cost: the host reads one element, the weight.
/// Throws InputError for other shapes or dtypes, or class_weights of another length.
LossOutput cross_entropy_output(const at::Tensor& logits, const at::Tensor& labels,
                                const ClassificationLossOptions& options = {});

/// Mean squared error of a regression with one output. logits [B] or [B, 1], labels
/// [B] of a floating type; weight = B; outputs = logits as [B].
LossOutput mse_output(const at::Tensor& logits, const at::Tensor& labels);

/// Several labels per sample: BCE with logits, the mean over a sample's labels; weight = B. logits
/// and labels [B, L], labels 0 or 1 of a floating type. `pos_weight` [label] weights the positive
/// samples of each label, as in torch; empty: all 1. outputs = logits.
LossOutput bce_with_logits_output(const at::Tensor& logits, const at::Tensor& labels,
                                  const std::vector<double>& pos_weight = {});

/// The argument class_weights as values. For "balanced" it reads `labels_name` of every sample of
/// `train` once; labels that do not occur get 1. Empty if the argument is empty.
/// Throws InputError for "balanced" without training data or with labels that are not int64.
std::vector<double> resolve_class_weights(const std::string& class_weights, const Dataset* train,
                                          const std::string& labels_name = "labels");

} // namespace hasten
