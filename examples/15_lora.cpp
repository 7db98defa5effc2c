// LoRA on a small Llama, sharded over the ranks: only the adapter is trained, reduced and saved.
//   hasten launch --nproc 2 build/release/bin/15_lora
#include <torch/torch.h>

#include <filesystem>
#include <iostream>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/exit_code.h"
#include "hasten/core/random.h"
#include "hasten/models/auto_model.h"
#include "hasten/models/lora.h"
#include "hasten/optim/adamw.h"

namespace examples {

int train_adapter() {
  hasten::AcceleratorOptions options;
  options.strategy = hasten::Strategy::fsdp;
  options.save_frozen_weights = false; // a state holds the adapter; the base is read again
  hasten::Accelerator accelerator(options);
  hasten::set_seed(42);

  hasten::PreTrainedConfig shape = hasten::AutoConfig::for_model("llama");
  shape.vocab_size = 256;
  shape.hidden_size = 64;
  shape.intermediate_size = 128;
  shape.num_hidden_layers = 2;
  shape.num_attention_heads = 4;
  hasten::PreTrainedModel llama =
      hasten::model_from_config(shape, hasten::ModelTask::causal_lm); // or from_pretrained(folder)

  // [adapt]
  const hasten::LoraConfig config = hasten::get_peft_model(
      llama.ptr(), {.r = 8, .lora_alpha = 16, .target_modules = {"q_proj", "v_proj"}});
  const auto [trainable, all] = hasten::get_nb_trainable_parameters(*llama);

  hasten::AdamW adamw(llama->parameters(), torch::optim::AdamWOptions(1e-2)); // skips frozen ones
  auto [model, optimizer] = accelerator.prepare(llama, adamw);
  // [/adapt]
  constexpr double kPredicted = 2 * 15; // tokens of a batch with one before them
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    const at::Tensor ids = torch::arange(32).remainder(7).view({2, 16});
    auto window = accelerator.accumulate(model); // gathers the shards, too
    const at::Tensor loss = model->causal_loss({.input_ids = ids, .labels = ids}).loss_sum;
    accelerator.backward(loss, kPredicted);
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>() / kPredicted;
    first = step == 0 ? last : first;
  }

  const auto folder = std::filesystem::temp_directory_path() / "hasten_15_lora";
  // [save]
  accelerator.summon_full_params(
      [&] {
        if (accelerator.is_main_process()) {
          std::filesystem::create_directories(folder);
          hasten::save_adapter(*llama, config, folder); // PEFT reads it
        }
      },
      model);
  // [/save]
  if (accelerator.is_main_process()) {
    std::cout << trainable << " of " << all << " parameters trained, loss " << first << " to "
              << last << "\n";
    std::filesystem::remove_all(folder);
  }
  accelerator.end_training();
  return last < first ? 0 : 1;
}

} // namespace examples

int main() { return hasten::record(examples::train_adapter); }
