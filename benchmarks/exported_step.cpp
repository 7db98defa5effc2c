// Forward, backward and AdamW of a model that Python exported, one thread. Peer: peers/exported_step.py.
//   exported_step MODEL.pt2 ROWS TOKENS [--smoke]     the exported graph
//   exported_step bert-mini|gpt2 ROWS TOKENS [--smoke] hasten's own family of the same shape
// Prints {"seconds": median of the steps, "peak": largest sum of tensors in a step, in bytes}. As a rank of
// several it replicates the graph with DDP.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "hasten/accelerator/accelerator.h"
#include "hasten/core/memory.h"
#include "hasten/core/random.h"
#include "hasten/exported/exported_module.h"
#include "hasten/models/auto_model.h"
#include "hasten/optim/adamw.h"
#include "median.h"

namespace hasten {

using Logits = std::function<at::Tensor(const at::Tensor& ids, const at::Tensor& mask)>;

/// The model of peers/exported_step.py.
static PreTrainedModel family_model(const std::string& name) {
  if (name == "bert-mini") {
    return AutoModelForSequenceClassification::from_config(AutoConfig::from_shape(name));
  }
  PreTrainedConfig config = AutoConfig::for_model("gpt2");
  config.vocab_size = 5000;
  config.hidden_size = 320;
  config.num_hidden_layers = 6;
  config.num_attention_heads = 5;
  config.intermediate_size = 1280;
  config.max_position_embeddings = 512;
  return AutoModelForCausalLM::from_config(config);
}

/// Backward and optimizer step, given the loss. Then gradients are zero.
using Step = std::function<void(const at::Tensor& loss)>;

static void measure(const Step& step_of, const Logits& logits, int64_t rows, int64_t tokens,
                    int steps) {
  const at::Tensor ids = at::randint(1, 4000, {rows, tokens}, at::kLong);
  const at::Tensor mask = at::ones_like(ids);
  std::vector<double> seconds;
  int64_t peak = 0;
  for (int step = -2; step < steps; ++step) {
    const int64_t before = memory_stats().live_bytes;
    reset_peak_memory();
    const auto start = std::chrono::steady_clock::now();
    const at::Tensor scores = logits(ids, mask).flatten(0, -2);
    const at::Tensor labels = scores.size(0) == rows ? ids.select(1, 0) % 2 : ids.flatten();
    step_of(torch::nn::functional::cross_entropy(scores, labels));
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    if (step >= 0) {
      seconds.push_back(time.count());
      peak = std::max(peak, memory_stats().peak_bytes - before);
    }
  }
  const char* rank = std::getenv("RANK");
  if (rank != nullptr && std::strcmp(rank, "0") != 0) {
    return;
  }
  std::printf("{\"seconds\": %.6f, \"peak\": %lld}\n", median_of(seconds),
              static_cast<long long>(peak));
}

static void measure_alone(torch::nn::Module& module, const Logits& logits, int64_t rows,
                          int64_t tokens, int steps) {
  AdamW adamw(module.parameters(), torch::optim::AdamWOptions(1e-5));
  const auto step = [&](const at::Tensor& loss) {
    loss.backward();
    adamw.step();
    adamw.zero_grad();
  };
  measure(step, logits, rows, tokens, steps);
}

static void measure_ranks(const ExportedModule& module, const Logits& logits, int64_t rows,
                          int64_t tokens, int steps) {
  Accelerator accelerator;
  AdamW adamw(module->parameters(), torch::optim::AdamWOptions(1e-5));
  auto [model, optimizer] = accelerator.prepare(module, adamw);
  const auto step = [&](const at::Tensor& loss) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(loss * rows, static_cast<double>(rows));
    optimizer.step();
    optimizer.zero_grad();
  };
  measure(step, logits, rows, tokens, steps);
  accelerator.end_training();
}

} // namespace hasten

int main(int argc, char** argv) {
  using namespace hasten;
  if (argc < 4) {
    std::fprintf(stderr, "usage: exported_step MODEL.pt2|bert-mini|gpt2 ROWS TOKENS [--smoke]\n");
    return 2;
  }
  at::set_num_threads(1);
  set_seed(1);
  install_memory_meter();
  const std::string name = argv[1];
  const int64_t rows = std::stoll(argv[2]);
  const int64_t tokens = std::stoll(argv[3]);
  const int steps = argc > 4 && std::strcmp(argv[4], "--smoke") == 0 ? 1 : 10;
  if (name.ends_with(".pt2")) {
    auto module = ExportedModule::load(name);
    const Logits logits = [&](const auto& ids, const auto& mask) {
      return module->forward({{"input_ids", ids}, {"attention_mask", mask}}).at("logits");
    };
    if (std::getenv("RANK") != nullptr) {
      measure_ranks(module, logits, rows, tokens, steps);
    } else {
      measure_alone(*module, logits, rows, tokens, steps);
    }
  } else {
    auto model = family_model(name);
    model->train();
    measure_alone(
        *model,
        [&](const auto& ids, const auto& mask) {
          return model->forward({.input_ids = ids, .attention_mask = mask}).logits;
        },
        rows, tokens, steps);
  }
  return 0;
}
