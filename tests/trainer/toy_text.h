// A small text classifier that trains in milliseconds, rows of different lengths, and a plain
// LibTorch loop as the reference.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hasten/data/dataset.h"
#include "hasten/loader/batch.h"
#include "hasten/trainer/trainer.h"
#include "support/run_device.h"

namespace hasten::toy {

constexpr int64_t kWords = 23;
constexpr int64_t kLabels = 3;

/// Row i has 1 to 9 tokens; its label follows from them.
class Texts : public Dataset {
 public:
  explicit Texts(int64_t rows) {
    for (int64_t i = 0; i < rows; ++i) {
      std::vector<int64_t> ids;
      for (int64_t t = 0; t < 1 + (i * 7) % 9; ++t) {
        ids.push_back(1 + (i * 5 + t * t * 3) % (kWords - 1));
      }
      ids_.push_back(std::move(ids));
    }
  }
  int64_t size() const override { return static_cast<int64_t>(ids_.size()); }
  int64_t length(int64_t index) const override { return static_cast<int64_t>(ids_[index].size()); }
  Batch collate(const std::vector<int64_t>& indices) const override {
    int64_t longest = 1;
    for (const int64_t i : indices) {
      longest = std::max(longest, length(i));
    }
    const auto rows = static_cast<int64_t>(indices.size());
    at::Tensor ids = at::zeros({rows, longest}, at::kLong);
    at::Tensor mask = at::zeros({rows, longest}, at::kLong);
    at::Tensor labels = at::zeros({rows}, at::kLong);
    auto id_at = ids.accessor<int64_t, 2>();
    auto mask_at = mask.accessor<int64_t, 2>();
    auto label_at = labels.accessor<int64_t, 1>();
    for (int64_t r = 0; r < rows; ++r) {
      const auto& row = ids_[indices[r]];
      for (size_t t = 0; t < row.size(); ++t) {
        id_at[r][static_cast<int64_t>(t)] = row[t];
        mask_at[r][static_cast<int64_t>(t)] = 1;
      }
      label_at[r] = row.front() % kLabels;
    }
    return {{{"input_ids", ids}, {"attention_mask", mask}, {"labels", labels}}, indices};
  }

 private:
  std::vector<std::vector<int64_t>> ids_{}; // [row][token]
};

inline Batch on_run_device(Batch batch) {
  for (auto& [name, tensor] : batch.tensors) {
    tensor = tensor.to(testing_support::run_device());
  }
  return batch;
}

/// A linear layer on the normalised mean of the embeddings of a row's tokens.
struct Classifier : torch::nn::Module {
  explicit Classifier(at::ScalarType dtype = at::kDouble) {
    torch::manual_seed(11); // equal on every rank
    embedding = register_module("embedding", torch::nn::Embedding(kWords, 6));
    LayerNorm =
        register_module("LayerNorm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    head = register_module("head", torch::nn::Linear(6, kLabels));
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& mask) {
    const at::Tensor embedded = embedding->forward(ids);
    const at::Tensor weights = mask.unsqueeze(-1).to(embedded.scalar_type());
    const at::Tensor mean = (embedded * weights).sum(1) / weights.sum(1);
    return head->forward(LayerNorm->forward(mean));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::LayerNorm LayerNorm{nullptr};
  torch::nn::Linear head{nullptr};
};

inline LossFunction loss_function(std::shared_ptr<Classifier> model) {
  return [model](const Batch& batch) {
    const at::Tensor logits = model->forward(batch["input_ids"], batch["attention_mask"]);
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        logits, batch["labels"],
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
    return LossOutput{loss, static_cast<double>(batch.rows()), logits};
  };
}

/// Arguments for a run that writes nothing and uses the rows in order.
inline TrainingArguments arguments() {
  TrainingArguments arguments;
  arguments.disable_tqdm = true;
  arguments.save_strategy = SaveStrategy::no;
  arguments.eval_strategy = IntervalStrategy::no;
  arguments.train_sampling_strategy = SamplingStrategy::sequential;
  arguments.learning_rate = 0.05;
  arguments.weight_decay = 0.1;
  arguments.max_grad_norm = 0.3;
  arguments.warmup_steps = 2;
  arguments.logging_steps = 1;
  return arguments;
}

/// The losses and norms of each step, and the model after the last.
struct PlainRun {
  std::vector<double> losses{}; // [step], mean over its rows
  std::vector<double> grad_norms{}; // [step], before clipping
  std::shared_ptr<Classifier> model{};
};

inline double norm_type_of(const TrainingArguments& a) {
  return a.grad_norm_type == GradNormType::l1   ? 1.0
         : a.grad_norm_type == GradNormType::l2 ? 2.0
                                                : INFINITY;
}

/// The same training without hasten: `batch` rows a step, in order.
inline PlainRun plain_run(const Texts& texts, const TrainingArguments& a, int64_t batch) {
  PlainRun run;
  run.model = std::make_shared<Classifier>();
  const auto options = [&](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(a.learning_rate).weight_decay(decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(
      std::vector<at::Tensor>{run.model->embedding->weight, run.model->head->weight},
      options(a.weight_decay));
  groups.emplace_back(std::vector<at::Tensor>{run.model->LayerNorm->weight,
                                              run.model->LayerNorm->bias, run.model->head->bias},
                      options(0.0));
  torch::optim::AdamW optimizer(groups);
  const int64_t per_epoch = (texts.size() + batch - 1) / batch;
  const auto epochs = static_cast<int64_t>(a.num_train_epochs);
  const double total = static_cast<double>(per_epoch * epochs);
  for (int64_t update = 0; update < per_epoch * epochs; ++update) {
    const auto k = static_cast<double>(update);
    const double multiplier =
        k < a.warmup_steps ? k / a.warmup_steps : (total - k) / (total - a.warmup_steps);
    for (auto& group : optimizer.param_groups()) {
      group.options().set_lr(a.learning_rate * multiplier);
    }
    std::vector<int64_t> rows;
    for (int64_t i = (update % per_epoch) * batch;
         i < std::min(texts.size(), (update % per_epoch + 1) * batch); ++i) {
      rows.push_back(i);
    }
    const Batch joined = texts.collate(rows);
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        run.model->forward(joined["input_ids"], joined["attention_mask"]), joined["labels"]);
    optimizer.zero_grad();
    loss.backward();
    run.losses.push_back(loss.item<double>());
    run.grad_norms.push_back(torch::nn::utils::clip_grad_norm_(run.model->parameters(),
                                                               a.max_grad_norm, norm_type_of(a)));
    if (a.max_grad_value > 0) {
      torch::nn::utils::clip_grad_value_(run.model->parameters(), a.max_grad_value);
    }
    optimizer.step();
  }
  return run;
}

/// Values of `name` in the records that have it, in order.
inline std::vector<double> history(const Trainer& trainer, const std::string& name) {
  std::vector<double> values;
  for (const auto& record : trainer.state().log_history) {
    if (record.contains(name)) {
      values.push_back(record.at(name).get<double>());
    }
  }
  return values;
}

inline double largest_difference(const torch::nn::Module& a, const torch::nn::Module& b) {
  double largest = 0;
  for (const auto& entry : a.named_parameters()) {
    const at::Tensor other = b.named_parameters()[entry.key()];
    largest = std::max(
        largest, (entry.value().cpu() - other.cpu()).abs().max().to(at::kDouble).item<double>());
  }
  return largest;
}

} // namespace hasten::toy
