#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "hasten/data/loader.h"
#include "hasten/metrics/classification.h"
#include "hasten/metrics/multi_label.h"
#include "hasten/metrics/regression.h"
#include "training_run.h"

namespace hasten {

namespace detail {

/// This rank's outputs with the indices of their samples.
struct RankOutputs {
  std::vector<at::Tensor> rows{};
  std::vector<int64_t> indices{};
};

/// All ranks' outputs in the order of the dataset, on the CPU. Collective.
at::Tensor outputs_in_order(TrainerParts& parts, RankOutputs mine, int64_t dataset_rows) {
  Communicator& communicator = parts.communicator();
  // A rank without samples does not know shape and dtype of the outputs.
  nlohmann::json form;
  if (!mine.rows.empty()) {
    const at::Tensor& first = mine.rows.front();
    form = {{"dtype", static_cast<int>(first.scalar_type())},
            {"sizes", first.sizes().slice(1).vec()}};
  }
  const auto forms = communicator.all_gather_object(form, "shape of the outputs");
  const auto known = std::ranges::find_if(forms, [](const auto& f) { return !f.is_null(); });
  auto sizes = known->at("sizes").get<std::vector<int64_t>>();
  sizes.insert(sizes.begin(), 0);
  const at::Tensor none =
      at::empty(sizes, at::TensorOptions(parts.accelerator->device())
                           .dtype(static_cast<at::ScalarType>(known->at("dtype").get<int>())));
  const at::Tensor rows = mine.rows.empty() ? none : at::cat(mine.rows);
  const at::Tensor indices = at::tensor(mine.indices, at::kLong).to(parts.accelerator->device());
  const at::Tensor all_rows = communicator.all_gather_rows(rows.contiguous(), "outputs").cpu();
  const at::Tensor all_indices =
      communicator.all_gather_rows(indices, "indices of the outputs").cpu();
  sizes[0] = dataset_rows;
  return at::empty(sizes, all_rows.options()).index_copy_(0, all_indices, all_rows);
}

double rounded(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}

/// One rank's part of an evaluation: loss on the device, weight, counts.
struct EvaluationPass {
  at::Tensor loss_sum{}; // 0-d fp64
  double weight = 0;
  int64_t rows = 0;
  int64_t steps = 0; // batches of a rank
};

EvaluationPass evaluate_share(TrainerParts& parts, const Dataset& dataset,
                              EvaluationMetrics* metrics, RankOutputs* outputs) {
  const Accelerator& accelerator = *parts.accelerator;
  LoaderOptions options;
  options.batch_size = parts.arguments.per_device_eval_batch_size;
  options.shuffle = false;
  options.group_by_length = true; // longest first, for the least padding
  options.num_workers = parts.arguments.dataloader_num_workers;
  options.prefetch_factor = parts.arguments.dataloader_prefetch_factor;
  DataLoader loader(std::shared_ptr<const Dataset>(std::shared_ptr<void>(), &dataset), options);
  loader.shard(accelerator.process_index(), accelerator.num_processes());
  EvaluationPass pass;
  pass.steps = loader.size();
  pass.loss_sum = at::zeros({}, at::TensorOptions(accelerator.device()).dtype(at::kDouble));
  int64_t done = 0;
  const ForwardGuard forward = accelerator.forward_scope(parts.model);
  const auto run = [&](const Batch& batch) {
    const Autocast autocast = accelerator.autocast();
    return parts.loss_function(batch);
  };
  for (const Batch& host_batch : loader) {
    throw_if_interrupted();
    if (host_batch.rows() == 0 &&
        accelerator.core()->models.sharded(parts.model.get()) != nullptr) {
      run(dataset.collate({0}).to(accelerator.device())); // the other ranks gather parameters
    } else if (host_batch.rows() > 0) {
      const Batch batch = host_batch.to(accelerator.device());
      LossOutput output = run(batch);
      if (output.outputs.defined() && output.outputs.is_floating_point() &&
          output.outputs.element_size() < 4) {
        output.outputs = output.outputs.to(at::kFloat);
      }
      if (output.loss_sum.defined()) {
        pass.loss_sum.add_(output.loss_sum);
        pass.weight += output.weight;
      }
      if (metrics != nullptr) {
        metrics->update(output.outputs, batch);
      }
      if (outputs != nullptr) {
        outputs->rows.push_back(output.outputs);
        outputs->indices.insert(outputs->indices.end(), batch.indices.begin(), batch.indices.end());
      }
      pass.rows += batch.rows();
    }
    ++done;
    parts.notify([&](TrainerCallback& c) { c.on_prediction_step(done, pass.steps); });
  }
  return pass;
}

nlohmann::json evaluate_dataset(TrainerParts& parts, const Dataset& dataset,
                                const std::string& prefix, at::Tensor* outputs) {
  if (dataset.size() < 1) {
    throw InputError("trainer::evaluate", "samples=0", "at least one sample");
  }
  settle_precision(parts);
  const Stopwatch time;
  const at::NoGradGuard no_grad;
  const auto put_back = c10::make_scope_exit(
      [&, training = parts.model->is_training()] { parts.model->train(training); });
  parts.model->eval();
  const auto metrics = parts.compute_metrics ? parts.compute_metrics() : nullptr;
  parts.accelerator->sync_buffers();
  RankOutputs mine;
  const EvaluationPass pass =
      evaluate_share(parts, dataset, metrics.get(), outputs != nullptr ? &mine : nullptr);

  Accelerator& accelerator = *parts.accelerator;
  at::Tensor sums =
      at::stack({pass.loss_sum, at::scalar_tensor(pass.weight, pass.loss_sum.options()),
                 at::scalar_tensor(static_cast<double>(pass.rows), pass.loss_sum.options())});
  sums = accelerator.reduce(sums).cpu();
  if (metrics) {
    for (Metric* metric : metrics->metrics()) {
      reduce_in_place(*accelerator.core(), *metric);
    }
  }
  if (outputs != nullptr) {
    *outputs = outputs_in_order(parts, std::move(mine), dataset.size());
  }
  parts.evaluation_report = metrics ? metrics->report() : nlohmann::json::object();
  const double weight = sums[1].item<double>();
  const auto rows = static_cast<int64_t>(sums[2].item<double>());
  const double seconds =
      accelerator.reduce(at::scalar_tensor(time.seconds(), pass.loss_sum.options()), ReduceOp::MAX)
          .item<double>();
  accelerator.communicator()->check(
      "evaluation"); // the sums are undefined after the loss of a rank
  nlohmann::json record;
  if (weight > 0) {
    record[prefix + "_loss"] = sums[0].item<double>() / weight;
  }
  if (metrics) {
    for (const auto& [name, value] : metrics->compute()) {
      record[prefix + "_" + name] = value;
    }
  }
  record[prefix + "_runtime"] = rounded(seconds, 4);
  record[prefix + "_samples_per_second"] = rounded(static_cast<double>(rows) / seconds, 3);
  record[prefix + "_steps_per_second"] = rounded(static_cast<double>(pass.steps) / seconds, 3);
  return record;
}

constexpr int64_t kMostMatrixLabels = 256;

/// The wrong predictions with the greatest cross entropy, the greatest first. state(): [20, 4] of
/// loss, sample, label and predicted label; loss -1 where there are fewer.
class MostWrong final : public MergedMetric<MostWrong> {
 public:
  MostWrong() { MostWrong::reset(); }

  void update(const at::Tensor& outputs, const at::Tensor& labels,
              const std::vector<int64_t>& samples) {
    const at::Tensor logits = outputs.detach().to(at::kCPU, at::kDouble);
    const at::Tensor truth = labels.detach().to(at::kCPU, at::kLong);
    const at::Tensor losses = at::cross_entropy_loss(logits, truth, {}, at::Reduction::None);
    const at::Tensor predicted = logits.argmax(1);
    const at::Tensor wrong = predicted.ne(truth).logical_and(truth.ge(0)); // -100: no label
    merge_state(at::stack({losses.where(wrong, -1.0), at::tensor(samples, at::kDouble),
                           truth.to(at::kDouble), predicted.to(at::kDouble)},
                          1));
  }
  at::Tensor state() const override { return worst_; }
  void merge_state(const at::Tensor& other) override {
    at::Tensor all = at::cat({worst_, other});
    for (const int64_t column : {1, 0}) { // of equal losses the first sample
      all = all.index_select(
          0, std::get<1>(at::sort(all.select(1, column), /*stable=*/true, 0, column == 0)));
    }
    worst_ = all.slice(0, 0, kMost).clone();
  }
  void reset() override { worst_ = at::full({kMost, 4}, -1.0, at::kDouble); }
  nlohmann::json table(const std::vector<std::string>& names) const {
    nlohmann::json samples = nlohmann::json::array();
    for (const at::Tensor& row : worst_.unbind()) {
      const auto* values = row.const_data_ptr<double>();
      if (values[0] != -1) {
        samples.push_back({{"sample", static_cast<int64_t>(values[1])},
                           {"label", names[static_cast<size_t>(values[2])]},
                           {"predicted", names[static_cast<size_t>(values[3])]},
                           {"loss", values[0]}});
      }
    }
    return samples;
  }

 private:
  static constexpr int64_t kMost = 20;
  at::Tensor worst_{};
};

nlohmann::json per_class_json(const std::vector<ClassScores>& scores,
                              const std::vector<std::string>& names) {
  nlohmann::json all = nlohmann::json::object();
  for (size_t i = 0; i < scores.size(); ++i) {
    all[names[i]] = {{"precision", scores[i].precision},
                     {"recall", scores[i].recall},
                     {"f1", scores[i].f1},
                     {"support", scores[i].support}};
  }
  return all;
}

nlohmann::json matrix_json(const at::Tensor& matrix, const std::vector<std::string>& names) {
  nlohmann::json counts;
  for (const at::Tensor& row : matrix.unbind()) {
    const auto* cells = row.const_data_ptr<int64_t>();
    counts.push_back(std::vector<int64_t>(cells, cells + row.numel()));
  }
  return {{"labels", names}, {"counts", std::move(counts)}};
}

/// M: metrics with several values.
template <typename M>
class CountedEvaluation final : public EvaluationMetrics {
 public:
  CountedEvaluation(std::string labels_name, std::vector<std::string> names)
      : metrics_(std::ssize(names)),
        labels_name_(std::move(labels_name)),
        names_(std::move(names)) {}

  void update(const at::Tensor& outputs, const Batch& batch) override {
    if (batch.has(labels_name_)) {
      metrics_.update(outputs, batch[labels_name_]);
      if (kOneLabel && outputs.dim() == 2) { // not of predicted labels
        most_wrong_.update(outputs, batch[labels_name_], batch.indices);
      }
    }
  }
  std::vector<Metric*> metrics() override { return {&metrics_, &most_wrong_}; }
  std::map<std::string, double> compute() const override {
    return metrics_.rows() > 0 ? metrics_.compute() : std::map<std::string, double>{};
  }
  nlohmann::json report() const override {
    if (metrics_.rows() == 0) {
      return nlohmann::json::object();
    }
    nlohmann::json report = {{"per_class", per_class_json(metrics_.per_class(), names_)}};
    if constexpr (kOneLabel) {
      report["most_wrong"] = most_wrong_.table(names_);
      if (std::ssize(names_) <= kMostMatrixLabels) {
        report["confusion_matrix"] = matrix_json(metrics_.confusion_matrix(), names_);
      }
    }
    return report;
  }

 private:
  static constexpr bool kOneLabel = std::is_same_v<M, ClassificationMetrics>;
  M metrics_;
  MostWrong most_wrong_{}; // empty with several labels
  std::string labels_name_;
  std::vector<std::string> names_; // [label]
};

template <typename M>
ComputeMetrics counted_metrics(std::vector<std::string> values, int64_t num_labels,
                               std::string labels_name, std::vector<std::string> names) {
  if (!names.empty() && std::ssize(names) != num_labels) {
    throw InputError("trainer::EvaluationMetrics",
                     "label_names has " + std::to_string(names.size()) + " names",
                     "num_labels=" + std::to_string(num_labels) + " names, or none");
  }
  for (int64_t label = std::ssize(names); label < num_labels; ++label) {
    names.push_back(std::to_string(label));
  }
  return NamedFactory{std::move(values),
                      [labels_name = std::move(labels_name), names = std::move(names)] {
                        return std::make_unique<CountedEvaluation<M>>(labels_name, names);
                      }};
}

std::string padded(const std::string& text, size_t width) {
  return std::string(width - std::min(width, text_width(text)), ' ') + text;
}

/// At most `width` characters, the last of them "…" if the text is longer.
std::string abbreviated(const std::string& text, size_t width) {
  if (text_width(text) <= width) {
    return text;
  }
  size_t end = 0;
  while (end < text.size() && text_width(text.substr(0, end + 1)) < width) {
    ++end;
  }
  return text.substr(0, end) + "…";
}

/// Abbreviated, with spaces after it.
std::string left(const std::string& text, size_t width) {
  const std::string name = abbreviated(text, width);
  return name + std::string(width - text_width(name), ' ');
}

std::string matrix_text(const nlohmann::json& matrix, size_t longest, int columns,
                        const std::string& place) {
  constexpr size_t kMostLabels = 10;
  const auto labels = matrix.at("labels").get<std::vector<std::string>>();
  const auto counts = matrix.at("counts").get<std::vector<std::vector<int64_t>>>();
  size_t cell = 6; // of a count with two spaces
  for (const auto& row : counts) {
    for (const int64_t count : row) {
      cell = std::max(cell, format_count(count).size() + 2);
    }
  }
  const size_t wide = std::max<size_t>(cell, std::max<size_t>(8, longest) + 2);
  const auto all = static_cast<size_t>(columns == 0 ? 1 << 20 : columns);
  if (labels.size() > kMostLabels || labels.size() * cell + 8 > all) {
    return place.empty() ? "" : "\nThe confusion matrix does not fit. It is in " + place + ".\n";
  }
  const size_t first = std::min(longest, all - labels.size() * cell);
  cell = std::min(wide, (all - first) / labels.size());
  std::string text = "\n" + left("true", first) + "  predicted as\n" + left("", first);
  for (const std::string& label : labels) {
    text += padded(abbreviated(label, cell - 2), cell);
  }
  for (size_t row = 0; row < labels.size(); ++row) {
    text += "\n" + left(labels[row], first);
    for (const int64_t count : counts[row]) {
      text += padded(format_count(count), cell);
    }
  }
  return text + "\n";
}

} // namespace detail

nlohmann::json EvaluationMetrics::report() const { return nlohmann::json::object(); }

ComputeMetrics classification_metrics(int64_t num_labels, std::string labels_name,
                                      std::vector<std::string> label_names) {
  return detail::counted_metrics<ClassificationMetrics>(
      {"accuracy", "f1"}, num_labels, std::move(labels_name), std::move(label_names));
}

ComputeMetrics multi_label_metrics(int64_t num_labels, std::string labels_name,
                                   std::vector<std::string> label_names) {
  return detail::counted_metrics<MultiLabelMetrics>({"f1_micro", "f1_macro", "accuracy"},
                                                    num_labels, std::move(labels_name),
                                                    std::move(label_names));
}

ComputeMetrics regression_metrics(std::string labels_name) {
  return named_metrics(std::move(labels_name), std::pair("mse", MeanSquaredError()),
                       std::pair("mae", MeanAbsoluteError()),
                       std::pair("pearson", PearsonCorrCoef()),
                       std::pair("spearman", SpearmanCorrCoef()));
}

std::string report_text(const nlohmann::json& report, int columns, const std::string& place) {
  constexpr size_t kScoreColumns = 41;
  if (!report.contains("per_class")) {
    return {};
  }
  const auto& scores = report.at("per_class");
  size_t longest = 5;
  for (const auto& label : scores.items()) {
    longest = std::max(longest, text_width(label.key()));
  }
  const size_t room = std::max(static_cast<size_t>(columns), kScoreColumns + 8) - kScoreColumns;
  const size_t width = columns > 0 ? std::min(longest, room) : longest;
  std::string text = detail::left("label", width) + "  precision    recall        f1   samples\n";
  for (const auto& [label, values] : scores.items()) {
    text += detail::left(label, width);
    for (const char* name : {"precision", "recall", "f1"}) {
      text +=
          detail::padded(format_fixed(values.at(name).get<double>(), 4), name[0] == 'p' ? 11 : 10);
    }
    text += detail::padded(format_count(values.at("support").get<int64_t>()), 10) + "\n";
  }
  const auto matrix = report.find("confusion_matrix");
  return matrix == report.end() ? text
                                : text + detail::matrix_text(*matrix, longest, columns, place);
}

} // namespace hasten
