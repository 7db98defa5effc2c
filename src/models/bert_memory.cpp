#include "hasten/models/bert_memory.h"

#include <torch/nn/functional/loss.h>

#include <string>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/core/autocast.h"
#include "hasten/core/memory.h"
#include "hasten/core/memory_rehearsal.h"

namespace hasten {

namespace detail {

std::vector<std::vector<int64_t>> shapes_of(const torch::nn::Module& module) {
  return mapped(module.parameters(), [](const at::Tensor& of) { return of.sizes().vec(); });
}

} // namespace detail

std::vector<std::vector<int64_t>> bert_layer_shapes(const BertConfig& config) {
  const MemoryRehearsal rehearsal;
  return detail::shapes_of(*BertLayer(config));
}

std::vector<std::vector<int64_t>> bert_parameter_shapes(const BertConfig& config) {
  const MemoryRehearsal rehearsal;
  BertConfig of_one = config;
  of_one.num_hidden_layers = 1;
  auto shapes = detail::shapes_of(*BertForSequenceClassification(of_one, false));
  const auto of_layer = bert_layer_shapes(config);
  for (int64_t layer = 1; layer < config.num_hidden_layers; ++layer) {
    shapes.insert(shapes.end(), of_layer.begin(), of_layer.end());
  }
  return shapes;
}

BertStepMemory bert_step_memory(const BertConfig& config, int64_t rows, int64_t tokens,
                                GradientPlace gradients, at::ScalarType compute_dtype) {
  if (compute_dtype != at::kFloat && compute_dtype != at::kBFloat16) {
    throw InputError("models::bert_step_memory",
                     std::string("compute_dtype=") + c10::toString(compute_dtype),
                     "Float or BFloat16");
  }
  if (rows < 1 || tokens < 1 || tokens > config.max_position_embeddings) {
    throw InputError("models::bert_step_memory",
                     "rows=" + std::to_string(rows) + ", tokens=" + std::to_string(tokens),
                     "1 or more, and at most the model's " +
                         std::to_string(config.max_position_embeddings) + " tokens");
  }
  const MemoryRehearsal rehearsal;
  BertForSequenceClassification model(config, false);
  model->train();
  BertStepMemory memory;
  int64_t before = 0;
  int64_t kept_gradients = 0;
  const auto note_peak = [&] {
    if (const int64_t peak = memory_stats().peak_bytes - before; peak > memory.peak_bytes) {
      memory.peak_bytes = peak;
      memory.activation_bytes = peak - kept_gradients;
    }
  };
  for (const at::Tensor& parameter : model->parameters()) {
    if (gradients == GradientPlace::existing) {
      parameter.mutable_grad() = at::empty_like(parameter);
      continue;
    }
    parameter.register_hook([&](const at::Tensor& gradient) {
      note_peak();
      kept_gradients += static_cast<int64_t>(gradient.nbytes());
    });
  }
  before = memory_stats().live_bytes;
  reset_peak_memory();
  const at::Tensor ids = at::empty({rows, tokens}, at::kLong);
  const at::Tensor mask = at::empty_like(ids);
  const at::Tensor row_ends = at::empty_like(ids); // the third tensor of a batch
  at::Tensor loss;
  {
    const Autocast autocast({.enabled = compute_dtype == at::kBFloat16});
    loss = torch::nn::functional::cross_entropy(
        model->forward(ids, mask), at::empty({rows}, at::kLong),
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  }
  memory.saved_bytes = memory_stats().live_bytes - before;
  loss.backward();
  note_peak();
  return memory;
}

} // namespace hasten
