// What an evaluation computes beside the loss, batch by batch and over ranks,
// in constant memory.
// Threading: one instance per thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "hasten/data/dataset.h"

namespace hasten {

class EvaluationMetrics {
 public:
  virtual ~EvaluationMetrics() = default;
  /// Counts a batch: `outputs` is what the loss function returned. Local.
  virtual void update(const at::Tensor& outputs, const Batch& batch) = 0;
  /// Everything counted so far as one tensor, of equal shape on all ranks,
  /// such that the sum over ranks is the state of all rows. Undefined for
  /// metrics that need none.
  virtual at::Tensor state() const = 0;
  /// Takes the sum over ranks.
  virtual void set_state(const at::Tensor& state) = 0;
  /// Values by name, without the "eval_" prefix: {"accuracy", 0.9}.
  virtual std::map<std::string, double> compute() const = 0;
};

/// Makes a new, empty instance for each evaluation. An empty function: loss only.
using ComputeMetrics = std::function<std::unique_ptr<EvaluationMetrics>()>;

/// "accuracy" and "f1" (macro) of logits [B, num_labels] against the batch's
/// `labels_name` [B]. Batches without that tensor are not counted.
ComputeMetrics classification_metrics(
    int64_t num_labels, std::string labels_name = "labels");

} // namespace hasten
