// A model family of your own: blocks of convolutions over the tokens. Once it is registered,
// AutoConfig and the AutoModelFor… classes know it, and its folders are Hugging Face's.
//
//   13_model_family examples/reviews.csv [FOLDER]
//   hasten launch --nproc 2 13_model_family examples/reviews.csv [FOLDER]
#include <torch/torch.h>

#include "hasten/accelerator/accelerator.h"
#include "hasten/models/auto_model.h"
#include "hasten/models/model_family.h"
#include "reviews.h"

namespace examples {

// [block]
struct ConvBlockImpl : torch::nn::Module {
  explicit ConvBlockImpl(int64_t width)
      : conv(register_module(
            "conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(width, width, 3).padding(1)))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))) {}
  // x: [B, T, H].
  torch::Tensor forward(const torch::Tensor& x) {
    return norm(x + torch::relu(conv(x.transpose(1, 2))).transpose(1, 2));
  }
  torch::nn::Conv1d conv;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(ConvBlock);
// [/block]

// [model]
struct ConvReader : hasten::PreTrainedModelImpl {
  ConvReader(const hasten::PreTrainedConfig& config, hasten::ModelTask task)
      : PreTrainedModelImpl(config, task),
        encoder(register_module("encoder", std::make_shared<torch::nn::Module>())),
        words(encoder->register_module(
            "words", torch::nn::Embedding(config.vocab_size, config.hidden_size))),
        layers(encoder->register_module("layers", torch::nn::ModuleList())),
        classifier(register_module("classifier",
                                   torch::nn::Linear(config.hidden_size, config.num_labels()))) {
    for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
      layers->push_back(ConvBlock(config.hidden_size));
    }
  }

  torch::Tensor logits(const hasten::ModelInputs& inputs) override { // [B, L]
    const auto weight = inputs.attention_mask.unsqueeze(2).to(torch::kFloat);
    torch::Tensor x = words(inputs.input_ids);
    for (size_t i = 0; i < layers->size(); ++i) {
      x = hasten::call_block(layers->at<ConvBlockImpl>(i), x * weight);
    }
    return classifier((x * weight).sum(1) / weight.sum(1));
  }

  std::shared_ptr<torch::nn::Module> encoder;
  torch::nn::Embedding words;
  torch::nn::ModuleList layers;
  torch::nn::Linear classifier;
};
// [/model]

// [family]
void register_conv_reader() {
  hasten::ModelFamily family{
      .model_type = "conv-reader",
      .class_prefix = "ConvReader",
      .base_model_prefix = "encoder",
      .tasks = {hasten::ModelTask::sequence_classification},
      // "" is for what the family does not have.
      .attribute_map = {{"num_hidden_layers", "num_blocks"}, {"num_attention_heads", ""}},
      .make = [](const auto& config, auto task) -> std::shared_ptr<hasten::PreTrainedModelImpl> {
        return std::make_shared<ConvReader>(config, task);
      }};
  family.defaults.hidden_size = 32;
  family.defaults.num_hidden_layers = 2;
  hasten::register_model_family(std::move(family));
}
// [/family]

void train(const std::string& csv, const std::string& folder) {
  register_conv_reader();
  hasten::Accelerator accelerator;
  const Reviews reviews = read_reviews(csv);
  // [use]
  auto config = hasten::AutoConfig::for_model("conv-reader");
  config.vocab_size = reviews.vocab_size;
  auto reader = hasten::AutoModelForSequenceClassification::from_config(config);
  torch::optim::AdamW adamw(reader->parameters(), torch::optim::AdamWOptions(1e-2));
  hasten::DataLoader batches(reviews.train, {.batch_size = 16});
  auto [model, optimizer, loader] = accelerator.prepare(reader, adamw, batches);
  for (int64_t epoch = 0; epoch < 6; ++epoch) {
    loader.set_epoch(epoch);
    for (const hasten::Batch& batch : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(
          model->forward({batch["input_ids"], batch["attention_mask"], {}, batch["labels"]}).loss);
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  // [/use]
  const hasten::Batch held_out = reviews.eval->collate({0, 1, 2, 3, 4, 5, 6, 7});
  const hasten::ModelInputs inputs{held_out["input_ids"], held_out["attention_mask"]};
  const torch::NoGradGuard no_grad;
  const torch::Tensor logits = reader->forward(inputs).logits;
  const auto right = (logits.argmax(1) == held_out["labels"]).sum().item<int64_t>();
  accelerator.print("right: " + std::to_string(right) + " of 8");
  if (!folder.empty() && accelerator.is_main_process()) {
    reader->save_pretrained(folder);
    auto saved = hasten::AutoModelForSequenceClassification::from_pretrained(folder);
    const bool equal = torch::equal(saved->forward(inputs).logits, logits);
    accelerator.print(equal ? "saved: the same logits" : "saved: other logits");
  }
  accelerator.end_training();
}

} // namespace examples

int main(int argc, char** argv) { return examples::run_example(argc, argv, examples::train); }
