// TrainingArguments::cuda_graphs: steps whose forward and backward are replayed are those without,
// bit for bit, on a device whose graphs follow CUDA's rules.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "hasten/accelerator/accelerator.h"
#include "hasten/flat/grad_hooks.h"
#include "hasten/models/auto_model.h"
#include "hasten/trainer/trainer.h"
#include "support/device_backend.h"
#include "support/error_of.h"
#include "support/spawn.h"
#include "support/temporary_folder.h"
#include "support/test_device.h"
#include "trainer/toy_text.h"

namespace hasten::device_graphs_test {

using testing_support::device_counters;
using testing_support::error_of;
using testing_support::FaultRank;
using testing_support::TemporaryFolder;

PreTrainedModel bert() {
  PreTrainedConfig config = AutoConfig::from_shape("bert-tiny", toy::kWords);
  config.max_position_embeddings = 16;
  config.id2label = {"no", "maybe", "yes"};
  torch::manual_seed(5);
  return AutoModelForSequenceClassification::from_config(config); // with dropout
}

/// Texts padded to 9 tokens.
class OneShape : public toy::Texts {
 public:
  using toy::Texts::Texts;
  Batch collate(const std::vector<int64_t>& indices) const override {
    Batch batch = toy::Texts::collate(indices);
    for (const char* name : {"input_ids", "attention_mask"}) {
      at::Tensor& tensor = batch.tensors[name];
      tensor = at::constant_pad_nd(tensor, {0, 9 - tensor.size(1)});
    }
    return batch;
  }
};

TrainingArguments arguments() {
  TrainingArguments a = toy::arguments();
  a.per_device_train_batch_size = 4;
  a.num_train_epochs = 1;
  a.learning_rate = 1e-3;
  a.max_grad_norm = 0.5;
  return a;
}

/// After each step: its operators, and the parameters' values.
struct Steps : TrainerCallback {
  explicit Steps(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}
  void on_step_end(const StepProgress&) override {
    operators.push_back((device_counters() - before_).operators);
    std::vector<at::Tensor> values;
    for (const at::Tensor& parameter : module_->parameters()) {
      values.push_back(parameter.detach().cpu());
    }
    parameters.push_back(
        at::cat(c10::fmap(values, [](const at::Tensor& t) { return t.flatten(); })));
    before_ = device_counters();
  }
  std::vector<int64_t> operators{};
  std::vector<at::Tensor> parameters{};

 private:
  std::shared_ptr<torch::nn::Module> module_;
  testing_support::DeviceCounters before_ = device_counters();
};

struct Trained {
  std::vector<int64_t> operators{};
  std::vector<at::Tensor> parameters{}; // [step]
  std::vector<double> losses{}, norms{};
};

using Wrap = std::function<void(Trainer&, PreTrainedModel)>;
using LossOf = std::function<LossOutput(const at::Tensor& logits, const Batch& rows)>;

LossOutput mean_loss(const at::Tensor& logits, const Batch& rows) {
  return {at::cross_entropy_loss(logits, rows["labels"], {}, at::Reduction::Sum),
          static_cast<double>(rows.rows()), logits};
}

Trained train(Communicator& world, const TrainingArguments& a, std::shared_ptr<const Dataset> texts,
              const Wrap& wrap = {}, const LossOf& loss_of = mean_loss) {
  static int runs = 0;
  PreTrainedModel model = bert();
  AcceleratorOptions options = accelerator_options(a);
  options.device = "test_device";
  options.grad_scaler.init_scale = 1024;
  options.dataloader_config.non_blocking = true;
  const auto accelerator = std::make_shared<Accelerator>(
      options, world.duplicate({.name = "run " + std::to_string(runs++)}));
  const auto loss = [model, loss_of](const Batch& rows) mutable {
    return loss_of(model->forward({rows["input_ids"], rows["attention_mask"]}).logits, rows);
  };
  Trainer trainer(model.ptr(), loss, a, std::move(texts), nullptr, {}, accelerator);
  const auto steps = std::make_shared<Steps>(model.ptr());
  trainer.add_callback(steps);
  if (wrap) {
    wrap(trainer, model);
  }
  trainer.train();
  return {steps->operators, steps->parameters, toy::history(trainer, "loss"),
          toy::history(trainer, "grad_norm")};
}

void expect_equal(const Trained& graphs, const Trained& plain) {
  EXPECT_EQ(graphs.losses, plain.losses);
  EXPECT_EQ(graphs.norms, plain.norms);
  ASSERT_EQ(graphs.parameters.size(), plain.parameters.size());
  for (size_t i = 0; i < plain.parameters.size(); ++i) {
    EXPECT_TRUE(at::equal(graphs.parameters[i], plain.parameters[i])) << "step " << i + 1;
  }
}

void expect_bit_for_bit(Communicator& world) {
  const int64_t ranks = world.world_size();
  for (const Precision precision : {Precision::no, Precision::bf16, Precision::fp16}) {
    for (const int64_t accumulation : {1, 2}) {
      if (ranks > 1 && (precision == Precision::bf16) != (accumulation == 2)) {
        continue;
      }
      SCOPED_TRACE(std::string(precision_name(precision)) + ", " + std::to_string(accumulation));
      TrainingArguments a = arguments();
      a.precision = precision;
      a.gradient_accumulation_steps = accumulation;
      // The last batch has another shape.
      const auto texts = std::make_shared<OneShape>((20 * 4 * accumulation - 2) * ranks);
      const Trained plain = train(world, a, texts);
      a.cuda_graphs = true;
      const Trained graphs = train(world, a, texts);
      ASSERT_EQ(plain.parameters.size(), 20u);
      expect_equal(graphs, plain);
      testing::Test::RecordProperty(
          std::string(precision_name(precision)) + std::to_string(accumulation),
          std::to_string(plain.operators[10]) + " -> " + std::to_string(graphs.operators[10]));
      EXPECT_LT(graphs.operators[10], plain.operators[10] / 3) << "steps are replayed";
      EXPECT_EQ(graphs.operators[0], plain.operators[0]) << "the first are not";
      if (accumulation == 1) {
        EXPECT_EQ(graphs.operators[19], plain.operators[19]) << "nor is the last";
      }
    }
  }
}

HASTEN_RANK_FUNCTION(TrainWithGraphs) {
  const auto world = testing_support::device_world(rank.world());
  expect_bit_for_bit(*world);
  world->close();
}

TEST(DeviceGraphs, StepsAreThoseWithoutBitForBit) {
  expect_bit_for_bit(*testing_support::device_world(World{}));
  for (const auto& report :
       testing_support::spawn(2, "TrainWithGraphs", {}, {.deadline = std::chrono::seconds(300)})) {
    EXPECT_EQ(report.error, "");
    EXPECT_EQ(report.end.code, 0);
  }
}

TEST(DeviceGraphs, EachShapeHasItsOwn) {
  const auto world = testing_support::device_world(World{});
  TrainingArguments a = arguments();
  a.bf16 = true;
  const auto texts = std::make_shared<toy::Texts>(4 * 24);
  const Trained plain = train(*world, a, texts);
  a.cuda_graphs = true;
  expect_equal(train(*world, a, texts), plain);
}

TEST(DeviceGraphs, AParameterThatIsFrozenOrMovedIsCapturedAgain) {
  const auto world = testing_support::device_world(World{});
  struct Change : TrainerCallback {
    explicit Change(PreTrainedModel model) : model(std::move(model)) {}
    void on_step_end(const StepProgress&) override {
      if (++steps == 8) {
        model->named_parameters()["bert.embeddings.position_embeddings.weight"].requires_grad_(
            false);
      } else if (steps == 14) {
        at::Tensor weight = model->named_parameters()["classifier.weight"];
        weight.set_data(weight.detach().clone());
      }
    }
    PreTrainedModel model;
    int steps = 0;
  };
  const Wrap wrap = [](Trainer& trainer, PreTrainedModel model) {
    trainer.add_callback(std::make_shared<Change>(std::move(model)));
  };
  TrainingArguments a = arguments();
  const auto texts = std::make_shared<OneShape>(4 * 22);
  const Trained plain = train(*world, a, texts, wrap);
  a.cuda_graphs = true;
  expect_equal(train(*world, a, texts, wrap), plain);
}

TEST(DeviceGraphs, ABufferThatIsMovedIsCapturedAgain) {
  const auto world = testing_support::device_world(World{});
  struct Change : TrainerCallback {
    explicit Change(at::Tensor buffer) : buffer(std::move(buffer)) {}
    void on_step_end(const StepProgress&) override {
      if (++steps == 9) {
        buffer.set_data(buffer * 3);
      }
    }
    at::Tensor buffer;
    int steps = 0;
  };
  TrainingArguments a = arguments();
  const auto texts = std::make_shared<OneShape>(4 * 14);
  const auto run = [&] {
    const auto scale = std::make_shared<at::Tensor>(); // when the model is on its device
    const Wrap wrap = [&](Trainer& trainer, PreTrainedModel model) {
      *scale = model->register_buffer("scale", at::ones({1}));
      trainer.add_callback(std::make_shared<Change>(*scale));
    };
    return train(*world, a, texts, wrap, [scale](const at::Tensor& logits, const Batch& rows) {
      return mean_loss(logits * *scale, rows);
    });
  };
  const Trained plain = run();
  a.cuda_graphs = true;
  expect_equal(run(), plain);
}

TEST(DeviceGraphs, HooksRunWheneverAGradientChanges) {
  const auto world = testing_support::device_world(World{});
  TrainingArguments a = arguments();
  a.gradient_accumulation_steps = 3;
  const auto texts = std::make_shared<OneShape>(4 * 3 * 4);
  std::vector<std::vector<int>> calls;
  for (const bool graphs : {false, true}) {
    a.cuda_graphs = graphs;
    std::vector<GradHook> hooks;
    std::vector<int>& counts = calls.emplace_back();
    const Wrap wrap = [&](Trainer&, PreTrainedModel model) {
      const auto parameters = model->parameters();
      counts.assign(parameters.size(), 0);
      for (size_t i = 0; i < parameters.size(); ++i) {
        hooks.emplace_back(parameters[i], [&counts, i](const at::Tensor&) { ++counts[i]; });
      }
      parameters[3].register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    };
    static Trained plain;
    const Trained run = train(*world, a, texts, wrap);
    if (graphs) {
      expect_equal(run, plain);
    }
    plain = run;
  }
  EXPECT_EQ(calls[0], calls[1]);
  EXPECT_EQ(calls[1].back(), 12);
}

/// Samples of the third class do not count.
LossOutput counted_loss(const at::Tensor& logits, const Batch& rows) {
  const at::Tensor labels = rows["labels"], counted = labels.ne(2);
  const at::Tensor losses = at::cross_entropy_loss(logits, labels, {}, at::Reduction::None);
  return {(losses * counted).sum(), DeviceScalar(counted.sum().to(at::kDouble)), logits};
}

TEST(DeviceGraphs, AWeightOnTheDeviceIsThatOfEachBatch) {
  const auto world = testing_support::device_world(World{});
  TrainingArguments a = arguments();
  a.gradient_accumulation_steps = 2;
  const auto texts = std::make_shared<OneShape>(4 * 2 * 12);
  const Trained plain = train(*world, a, texts, {}, counted_loss);
  a.cuda_graphs = true;
  const Trained graphs = train(*world, a, texts, {}, counted_loss);
  expect_equal(graphs, plain);
  EXPECT_LT(graphs.operators[10], plain.operators[10] / 2) << "steps are replayed";
}

/// No sample of a window's first batch counts.
class EmptyFirst final : public OneShape {
 public:
  EmptyFirst(int64_t rows, int64_t ranks) : OneShape(rows), rows_(4 * ranks) {}
  Batch collate(const std::vector<int64_t>& indices) const override {
    Batch batch = OneShape::collate(indices);
    for (size_t i = 0; i < indices.size(); ++i) {
      if (indices[i] / rows_ % 2 == 0) {
        batch.tensors["labels"][static_cast<int64_t>(i)] = 2;
      }
    }
    return batch;
  }

 private:
  int64_t rows_;
};

// A batch of weight 0 makes no gradient. Several ranks then have zeros, to which the next batch adds.
void expect_first_batches_may_be_empty(Communicator& world) {
  TrainingArguments a = arguments();
  a.gradient_accumulation_steps = 2;
  const int64_t ranks = world.world_size();
  const auto texts = std::make_shared<EmptyFirst>(4 * 2 * 8 * ranks, ranks);
  const Trained plain = train(world, a, texts, {}, counted_loss);
  a.cuda_graphs = true;
  const Trained graphs = train(world, a, texts, {}, counted_loss);
  expect_equal(graphs, plain);
  EXPECT_FALSE(at::equal(graphs.parameters[6], graphs.parameters[7]));
}

HASTEN_RANK_FUNCTION(TrainWithEmptyFirstBatches) {
  const auto world = testing_support::device_world(rank.world());
  expect_first_batches_may_be_empty(*world);
  world->close();
}

TEST(DeviceGraphs, AWindowMayBeginWithBatchesOfWeightZero) {
  for (const auto& report : testing_support::spawn(2, "TrainWithEmptyFirstBatches", {},
                                                   {.deadline = std::chrono::seconds(120)})) {
    EXPECT_EQ(report.error, "");
    EXPECT_EQ(report.end.code, 0);
  }
}

TEST(DeviceGraphs, AResumedRunEndsAsTheWhole) {
  const auto world = testing_support::device_world(World{});
  const TemporaryFolder folder;
  TrainingArguments a = arguments();
  a.bf16 = true;
  a.gradient_accumulation_steps = 2;
  a.cuda_graphs = true;
  a.output_dir = (folder.path() / "run").string();
  a.save_strategy = SaveStrategy::steps;
  a.save_steps = 7;
  a.save_total_limit = 0;
  const auto texts = std::make_shared<OneShape>(4 * 2 * 20);
  const Trained whole = train(*world, a, texts);
  a.resume_from_checkpoint = (folder.path() / "run" / "checkpoint-7").string();
  a.output_dir = (folder.path() / "resumed").string();
  const Trained resumed = train(*world, a, texts);
  ASSERT_EQ(resumed.parameters.size(), 13u);
  for (size_t i = 0; i < 13; ++i) {
    EXPECT_TRUE(at::equal(resumed.parameters[i], whole.parameters[7 + i])) << "step " << 8 + i;
  }
}

TEST(DeviceGraphs, WhatTheyCannotRunIsAnErrorThatNamesIt) {
  for (const auto& [change, name] :
       std::vector<std::pair<std::function<void(TrainingArguments&)>, std::string>>{
           {[](auto& a) { a.strategy = Strategy::fsdp; }, "strategy=fsdp"},
           {[](auto& a) { a.local_sgd_steps = 2; }, "local_sgd_steps=2"},
           {[](auto& a) { a.gradient_checkpointing = "full"; }, "gradient_checkpointing=full"}}) {
    TrainingArguments a = arguments();
    a.cuda_graphs = true;
    change(a);
    const std::string error = error_of<InputError>([&a = a] { a.validate(); });
    EXPECT_NE(error.find("cuda_graphs=true with " + name), std::string::npos) << error;
  }
  const auto run = [](const std::string& device, bool reads) {
    auto model = std::make_shared<toy::Classifier>(at::kFloat);
    TrainingArguments a = arguments();
    a.cuda_graphs = true;
    AcceleratorOptions options = accelerator_options(a);
    options.device = device;
    const auto loss = [reads, inner = toy::loss_function(model)](const Batch& batch) {
      LossOutput output = inner(batch);
      if (reads) {
        output.weight = static_cast<double>(batch["labels"].ne(-100).sum().item<int64_t>());
      }
      return output;
    };
    Trainer(model, loss, a, std::make_shared<OneShape>(40), nullptr, {},
            std::make_shared<Accelerator>(options))
        .train();
  };
  EXPECT_EQ(error_of<InputError>([&] { run("test_device", false); }), "");
  const std::string read = error_of<InputError>([&] { run("test_device", true); });
  EXPECT_NE(read.find("the loss function cannot be captured: operation not permitted"),
            std::string::npos)
      << read;
  TrainingArguments a = arguments();
  a.cuda_graphs = true;
  const std::vector<double> table(40, 2.0); // of samples' weights, on the host
  const std::string host = error_of<InputError>([&] {
    train(*testing_support::device_world(World{}), a, std::make_shared<OneShape>(40), {},
          [&](const at::Tensor& logits, const Batch& rows) {
            LossOutput output = mean_loss(logits, rows);
            double weight = 0;
            for (const int64_t i : rows.indices) {
              weight += table[static_cast<size_t>(i)];
            }
            output.weight = weight;
            return output;
          });
  });
  EXPECT_NE(host.find("weight is a number of the host: weight=8 for 4 samples"), std::string::npos)
      << host;
  const std::string cpu = error_of<InputError>([&] { run("cpu", false); });
  EXPECT_NE(cpu.find("cuda_graphs=true on cpu"), std::string::npos) << cpu;
}

} // namespace hasten::device_graphs_test
