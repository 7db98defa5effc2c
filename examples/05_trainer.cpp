// The same training with the Trainer: arguments replace the loop of 04.
//
//   05_trainer examples/reviews.csv
//   hasten launch --nproc 2 05_trainer examples/reviews.csv
#include <torch/torch.h>

#include <iostream> // 05

#include "hasten/accelerator/accelerator.h" // 03
#include "hasten/base/world.h" // 05
#include "hasten/trainer/trainer.h" // 05
#include "reviews.h"

namespace examples {

constexpr int64_t kEpochs = 6;
constexpr int64_t kBatch = 16; // samples per batch, over all processes
constexpr int64_t kSteps = 4; // 04: batches per optimizer step

// [callback]
struct PrintEpochs : hasten::TrainerCallback {
  void on_epoch_end(const hasten::EpochReport& report) override {
    const double right = report.evaluation.at("eval_accuracy");
    std::cout << epoch_line(report.epoch, report.training_loss, right) << std::endl;
  }
};
// [/callback]

void train(const std::string& csv, const std::string& save_to) {
  const Reviews reviews = read_reviews(csv);

  torch::manual_seed(42);
  ReviewClassifier classifier(reviews.vocab_size, reviews.num_labels);

  // [trainer]
  hasten::TrainingArguments arguments;
  arguments.num_train_epochs = kEpochs;
  arguments.gradient_accumulation_steps = kSteps;
  arguments.learning_rate = 1e-2; // AdamW, linear schedule, clipped at 1.0
  arguments.train_sampling_strategy = hasten::SamplingStrategy::random;
  arguments.save_strategy = hasten::SaveStrategy::no;
  arguments.disable_tqdm = true; // PrintEpochs replaces banner, bars and table
  arguments.per_device_train_batch_size = kBatch / hasten::world_from_environment().world_size;

  const auto loss = [model = classifier](const hasten::Batch& batch) mutable {
    auto logits = model->forward(batch["input_ids"], batch["attention_mask"]);
    auto loss_sum = torch::nn::functional::cross_entropy(
        logits, batch["labels"],
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
    return hasten::LossOutput{loss_sum, double(batch.rows()), logits};
  };
  hasten::Trainer trainer(classifier.ptr(), loss, arguments, reviews.train, reviews.eval,
                          hasten::classification_metrics(reviews.num_labels));
  if (trainer.accelerator().is_main_process()) {
    trainer.add_callback(std::make_shared<PrintEpochs>());
  }
  trainer.train();
  // [/trainer]
  const bool main_process = trainer.accelerator().is_main_process(); // 05
  save(classifier, main_process ? save_to : ""); // 05
  trainer.accelerator().end_training(); // 05
}

} // namespace examples

int main(int argc, char** argv) { return examples::run_example(argc, argv, examples::train); }
