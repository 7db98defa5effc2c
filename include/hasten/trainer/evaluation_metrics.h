// The metrics that an evaluation computes in addition to the loss, batch by batch and over ranks,
// in constant memory: any metrics of hasten/metrics/.
//
//   hasten::named_metrics(
//       "targets", std::pair("r2", R2Score()), std::pair("mse", MeanSquaredError()))
//
// Threading: one instance per thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hasten/data/dataset.h"
#include "hasten/metrics/metric.h"

namespace hasten {

class EvaluationMetrics {
 public:
  virtual ~EvaluationMetrics() = default;
  /// Adds a batch; `outputs` is what the loss function returned. Local.
  virtual void update(const at::Tensor& outputs, const Batch& batch) = 0;
  /// The metrics that it updates and owns; the same list on all ranks. Before compute(),
  /// Accelerator::reduce replaces each by the total over ranks.
  virtual std::vector<Metric*> metrics() = 0;
  /// Values by name, without the "eval_" prefix: {"accuracy", 0.9}.
  virtual std::map<std::string, double> compute() const = 0;
  /// Tables that explain the values, of names as in classification_metrics(). By default {}.
  virtual nlohmann::json report() const;
};

/// Makes a new, empty instance for each evaluation. An empty function computes only the loss.
using ComputeMetrics = std::function<std::unique_ptr<EvaluationMetrics>()>;

/// "accuracy" and "f1" (macro) of logits [B, num_labels] against the batch's
/// `labels_name` [B]. Batches without that tensor are not counted.
/// report(): {"per_class": {label: {"precision", "recall", "f1", "support"}},
/// "confusion_matrix": {"labels": […], "counts": [[…]]}}, counts [true label][predicted label]. With
/// more than 256 labels there is no matrix. `label_names`: [num_labels], or empty for "0", "1", ….
/// Throws InputError for another number of names.
ComputeMetrics classification_metrics(int64_t num_labels, std::string labels_name = "labels",
                                      std::vector<std::string> label_names = {});

/// "f1_micro", "f1_macro" and "accuracy" (all labels of a sample right) of logits [B, num_labels]
/// against `labels_name` [B, num_labels] of zeros and ones. report() has "per_class".
ComputeMetrics multi_label_metrics(int64_t num_labels, std::string labels_name = "labels",
                                   std::vector<std::string> label_names = {});

/// "mse", "mae", "pearson" and "spearman" of outputs [B] against `labels_name` [B].
ComputeMetrics regression_metrics(std::string labels_name = "labels");

/// The tables of an EvaluationMetrics::report() as text: a line for each label, and the confusion
/// matrix if it has at most 10 labels. Empty for {}. If `columns` is not 0, names are abbreviated
/// ("custom…"), and a matrix that does not fit is left out. If a matrix is left out, the text says
/// that it is in `place`, unless that is empty.
std::string report_text(const nlohmann::json& report, int columns = 0,
                        const std::string& place = {});

namespace detail {

/// A ComputeMetrics with known names, against which metric_for_best_model is checked before
/// training.
struct NamedFactory {
  std::vector<std::string> names{};
  ComputeMetrics make{};
  std::unique_ptr<EvaluationMetrics> operator()() const { return make(); }
};

template <typename... M>
class NamedMetrics final : public EvaluationMetrics {
 public:
  NamedMetrics(std::string labels_name, std::vector<std::string> names, std::tuple<M...> metrics)
      : labels_name_(std::move(labels_name)),
        names_(std::move(names)),
        metrics_(std::move(metrics)) {}

  void update(const at::Tensor& outputs, const Batch& batch) override {
    if (batch.has(labels_name_)) {
      const at::Tensor& labels = batch[labels_name_];
      std::apply([&](M&... metric) { (metric.update(outputs, labels), ...); }, metrics_);
    }
  }
  std::vector<Metric*> metrics() override {
    return std::apply([](M&... metric) { return std::vector<Metric*>{&metric...}; }, metrics_);
  }
  std::map<std::string, double> compute() const override {
    std::map<std::string, double> values;
    auto name = names_.begin();
    std::apply([&](const M&... metric) { ((values[*name++] = metric.compute()), ...); }, metrics_);
    return values;
  }

 private:
  std::string labels_name_;
  std::vector<std::string> names_; // [metric]
  std::tuple<M...> metrics_;
};

} // namespace detail

/// Any metrics with update(outputs, labels) and a scalar value, by name. Each evaluation starts
/// with copies of them. They get the loss function's outputs and the batch's `labels_name`. Batches
/// without that tensor are skipped.
template <typename... M>
ComputeMetrics named_metrics(std::string labels_name, std::pair<const char*, M>... metrics) {
  std::vector<std::string> names{metrics.first...};
  return detail::NamedFactory{names, [labels_name = std::move(labels_name), names,
                                      fresh = std::tuple<M...>(std::move(metrics.second)...)] {
                                return std::make_unique<detail::NamedMetrics<M...>>(labels_name,
                                                                                    names, fresh);
                              }};
}

} // namespace hasten
