// What the Trainer costs: its steps compared with those of a loop written by hand on the
// same model and batches, in turns, one process, one thread.
//   trainer_overhead [--steps N] [--smoke]
// Prints one JSON line per case: {"case", "steps", "ours", "plain"}, the median
// seconds of a step: batch, forward, backward, AdamW, schedule, zero_grad, records.
// The loop by hand runs in the Trainer's own callback, so both find the caches as the
// other left them.
#include <torch/torch.h>

#include <chrono>
#include <functional>

#include "hasten/optim/adamw.h"
#include "hasten/trainer/trainer.h"
#include "overhead.h"

namespace hasten {

using OverheadClock = std::chrono::steady_clock;

// Rows of one length, collated by taking them out of whole tensors.
class TensorRows final : public Dataset {
 public:
  explicit TensorRows(std::map<std::string, at::Tensor> tensors) : tensors_(std::move(tensors)) {}
  int64_t size() const override { return tensors_.begin()->second.size(0); }
  Batch collate(const std::vector<int64_t>& indices) const override {
    Batch batch;
    const at::Tensor rows = torch::tensor(indices);
    for (const auto& [name, tensor] : tensors_) {
      batch.tensors[name] = tensor.index_select(0, rows);
    }
    batch.indices = indices;
    return batch;
  }

 private:
  std::map<std::string, at::Tensor> tensors_;
};

/// Takes the time of each step of the Trainer's, then does one by hand.
class Alternate final : public TrainerCallback {
 public:
  explicit Alternate(std::function<void()> by_hand) : by_hand_(std::move(by_hand)) {}
  void on_epoch_begin(const StepProgress&) override { resumed_ = OverheadClock::now(); }
  void on_step_end(const StepProgress& progress) override {
    const auto ended = OverheadClock::now();
    by_hand_();
    const auto both = OverheadClock::now();
    if (progress.global_step > 5) { // gradients, moments and buffers are there
      ours.push_back(std::chrono::duration<double>(ended - resumed_).count());
      plain.push_back(std::chrono::duration<double>(both - ended).count());
    }
    resumed_ = OverheadClock::now();
  }

  std::vector<double> ours{}; // seconds
  std::vector<double> plain{};

 private:
  std::function<void()> by_hand_;
  OverheadClock::time_point resumed_{};
};

constexpr int64_t kOverheadBatch = 8;
constexpr double kOverheadRate = 1e-4;

/// `make` gives the same model each time; `loss_of` the mean loss and the outputs.
template <typename Model>
void compare(const char* name, int64_t steps, const std::function<Model()>& make,
             const std::function<std::pair<at::Tensor, at::Tensor>(Model&, const Batch&)>& loss_of,
             std::shared_ptr<const Dataset> data) {
  at::set_num_threads(1);
  Model plain = make();
  AdamW plain_optimizer(plain->parameters(),
                        torch::optim::AdamWOptions(kOverheadRate).weight_decay(0));
  int64_t done = 0;
  double loss_sum = 0;
  const auto by_hand = [&] {
    std::vector<int64_t> indices;
    for (int64_t row = 0; row < kOverheadBatch; ++row) {
      indices.push_back((done * kOverheadBatch + row) % data->size());
    }
    const at::Tensor loss = loss_of(plain, data->collate(indices)).first;
    loss.backward();
    for (auto& group : plain_optimizer.param_groups()) {
      group.options().set_lr(kOverheadRate * static_cast<double>(steps - done) /
                             static_cast<double>(steps));
    }
    plain_optimizer.step();
    plain_optimizer.zero_grad();
    loss_sum += loss.item<double>();
    ++done;
  };
  Model ours = make();
  TrainingArguments arguments;
  arguments.disable_tqdm = true;
  arguments.max_steps = steps;
  arguments.per_device_train_batch_size = kOverheadBatch;
  arguments.learning_rate = kOverheadRate;
  arguments.max_grad_norm = 0; // nobody clips
  arguments.save_strategy = SaveStrategy::no;
  Trainer trainer(
      ours.ptr(),
      [&](const Batch& batch) {
        auto [loss, outputs] = loss_of(ours, batch);
        const auto rows = static_cast<double>(batch.rows());
        return LossOutput{loss * rows, rows, outputs};
      },
      arguments, data);
  at::set_num_threads(1);
  const auto alternate = std::make_shared<Alternate>(by_hand);
  trainer.add_callback(alternate);
  trainer.train();
  print_case(name, alternate->ours, alternate->plain);
}

void compare_bert_mini(int64_t steps) {
  constexpr int64_t kRows = 512, kTokens = 32;
  compare<PreTrainedModel>(
      "bert_mini", steps, seeded_bert_mini,
      [](PreTrainedModel& model, const Batch& batch) {
        const at::Tensor logits = model->forward({batch["input_ids"]}).logits;
        return std::pair(torch::nn::functional::cross_entropy(logits, batch["labels"]), logits);
      },
      std::make_shared<TensorRows>(std::map<std::string, at::Tensor>{
          {"input_ids", torch::randint(1, 30'000, {kRows, kTokens})},
          {"labels", torch::randint(0, 2, {kRows})}}));
}

// Ten parameters, and a step that is nothing but overhead.
void compare_ten_parameters(int64_t steps) {
  compare<torch::nn::Sequential>(
      "ten_parameters", steps,
      [] {
        set_seed(1);
        torch::nn::Sequential layers;
        for (int i = 0; i < 5; ++i) {
          layers->push_back(torch::nn::Linear(4, 4));
        }
        return layers;
      },
      [](torch::nn::Sequential& model, const Batch& batch) {
        const at::Tensor outputs = model->forward(batch["x"]);
        return std::pair(outputs.square().mean(), outputs);
      },
      std::make_shared<TensorRows>(
          std::map<std::string, at::Tensor>{{"x", torch::randn({512, 4})}}));
}

} // namespace hasten

int main(int argc, char** argv) {
  const int64_t steps = hasten::steps_of(argc, argv, 150, 8);
  if (steps == 0) {
    return 2;
  }
  hasten::compare_bert_mini(steps);
  hasten::compare_ten_parameters(20 * steps);
  return 0;
}
