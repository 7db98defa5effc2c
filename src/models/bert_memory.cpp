#include "hasten/models/bert_memory.h"

#include <algorithm>
#include <string>

#include "bert_memory_tape.h"
#include "hasten/base/error.h"
#include "hasten/core/linear.h"
#include "narrow_attention.h"

namespace hasten {

namespace detail {

// In the order of BertLayerImpl::forward and self_attention.
void attend_forward(MemoryTape& tape, const LayerSizes& s) {
  tape.take(s.a() + 2 * s.n()); // query, key, value
  if (!s.attention_dropout) {
    tape.take(s.a() + s.heads_asking); // context, logarithms of sums
    return; // query, key, value and context are saved
  }
  tape.take(s.a()); // scaled query
  tape.take(s.a() + s.n()); // query and key by head, contiguous: saved
  tape.take(s.scores);
  tape.give(s.a()); // scaled query
  tape.take(s.scores); // softmax: saved
  tape.take(s.scores); // dropout: saved
  tape.take(s.n()); // value by head: saved
  tape.take(s.a()); // context by head
  tape.give(s.scores);
  tape.take(s.a()); // context: saved
  tape.give(s.a() + s.a() + 2 * s.n()); // by head; query, key, value
}

void layer_forward(MemoryTape& tape, const LayerSizes& s) {
  if (s.asking != s.rows) {
    tape.take(s.a()); // the asking tokens: saved
  }
  attend_forward(tape, s);
  tape.take(s.a()); // attention.output: lives to the block's end
  tape.take(s.a()); // sum with the residual: saved
  tape.take(s.a() + 2 * s.asking); // norm: saved
  tape.take(s.w()); // intermediate: saved
  tape.take(s.w()); // its activation: saved
  tape.take(s.a()); // output
  tape.take(s.a()); // sum: saved
  tape.give(s.a()); // output
  tape.take(s.a() + 2 * s.asking); // norm: saved by whoever comes next
  tape.give(s.a()); // attention.output
}

void linear_gradients(MemoryTape& tape, int64_t in, int64_t out) {
  tape.gradient(in * out);
  tape.gradient(out);
}

// A saved input, which nobody else keeps, becomes its gradient.
void linear_backward(MemoryTape& tape, int64_t rows, int64_t in, int64_t out) {
  if (linear_uses_onednn(rows, in, out)) {
    tape.take(in * out + out);
    tape.give(rows * in);
    tape.take(rows * in);
    tape.settle(in * out + out);
  } else {
    tape.take(rows * in);
    linear_gradients(tape, in, out);
    tape.give(rows * in);
  }
}

// Norm and the sum before it: the gradient of the norm's output becomes those of the
// sum's two parts.
void norm_backward(MemoryTape& tape, const LayerSizes& s) {
  tape.take(s.a()); // of the sum
  tape.gradient(2 * s.hidden);
  tape.give(2 * s.a() + 2 * s.asking); // of the output; the saved sum
  if (s.dropout) {
    tape.take(s.a()); // of what was dropped from
  }
}

// Begins with the gradient of the layer's output alive (asking tokens), ends with
// that of its input (all tokens).
void layer_backward(MemoryTape& tape, const LayerSizes& s) {
  const int64_t of_sum = s.dropout ? s.a() : 0; // beside the residual's
  norm_backward(tape, s);
  linear_backward(tape, s.asking, s.wide, s.hidden); // of the activation
  tape.give(of_sum);
  tape.take(s.w()); // of intermediate
  tape.give(2 * s.w()); // of the activation; its saved input
  linear_backward(tape, s.asking, s.hidden, s.wide); // of the first norm's output
  tape.give(s.w() + s.a()); // of intermediate; into the residual's
  norm_backward(tape, s);
  linear_backward(tape, s.asking, s.hidden, s.hidden); // of the context
  tape.give(of_sum);
  if (s.attention_dropout) {
    tape.take(s.a()); // by head, contiguous
    tape.give(s.a());
    tape.take(s.scores + s.n()); // of probabilities, of values
    tape.give(s.a() + s.scores + s.n()); // of the context; both saved
    tape.take(s.scores); // before dropout
    tape.give(s.scores);
    tape.take(s.scores); // before softmax
    tape.give(2 * s.scores); // behind it; saved probabilities
    tape.take(s.a() + s.n()); // of queries and keys
    tape.give(s.scores + s.a() + s.n()); // both saved
  } else {
    tape.take(s.a() + 2 * s.n()); // of queries, keys, values
    tape.give(2 * s.a() + s.heads_asking + 2 * s.n()); // of the context; all saved
  }
  // Beside the residual's gradient, which becomes the input's. Query, key, value: back
  // from heads, contiguous; the input's part, added.
  for (const int64_t numbers : {s.a(), s.n(), s.n()}) {
    tape.take(numbers);
    tape.give(numbers);
    tape.take(numbers);
    linear_gradients(tape, s.hidden, s.hidden);
    tape.give(2 * numbers);
    if (numbers != s.n()) { // the asking tokens' scattered into all
      tape.take(s.n());
      tape.give(2 * s.a()); // with those saved
    }
  }
  tape.give(s.n()); // the layer's saved input
}

/// Pooler and classifier, forward and backward; returns what is alive between.
int64_t head_of_step(MemoryTape& tape, int64_t rows, int64_t h, int64_t labels, bool narrow) {
  if (!narrow) {
    tape.take(3 * rows * h); // pooler, its tanh, dropout
    const int64_t saved = tape.live();
    linear_gradients(tape, h, labels);
    linear_gradients(tape, h, h);
    tape.give(3 * rows * h);
    return saved;
  }
  linear_forward_bf16(tape, rows, h, h, true); // pooler
  tape.take16(3 * rows * h); // its product, tanh, dropout
  linear_forward_bf16(tape, rows, h, labels, false);
  const int64_t saved = tape.live();
  linear_backward_bf16(tape, rows, h, labels, false);
  tape.give16(3 * rows * h);
  linear_backward_bf16(tape, rows, h, h, true);
  tape.give16(rows * h);
  tape.give(rows * h);
  return saved;
}

} // namespace detail

std::vector<std::vector<int64_t>> bert_layer_shapes(const BertConfig& config) {
  const int64_t h = config.hidden_size;
  const int64_t i = config.intermediate_size;
  std::vector<std::vector<int64_t>> shapes;
  for (int projection = 0; projection < 4; ++projection) {
    shapes.push_back({h, h});
    shapes.push_back({h});
  }
  shapes.insert(shapes.end(), {{h}, {h}, {i, h}, {i}, {h, i}, {h}, {h}, {h}}); // with both norms
  return shapes;
}

std::vector<std::vector<int64_t>> bert_parameter_shapes(const BertConfig& config) {
  const int64_t h = config.hidden_size;
  std::vector<std::vector<int64_t>> shapes = {{config.vocab_size, h},
                                              {config.max_position_embeddings, h},
                                              {config.type_vocab_size, h},
                                              {h},
                                              {h}};
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const auto of_layer = bert_layer_shapes(config);
    shapes.insert(shapes.end(), of_layer.begin(), of_layer.end());
  }
  shapes.insert(shapes.end(), {{h, h}, {h}, {config.num_labels(), h}, {config.num_labels()}});
  return shapes;
}

BertStepMemory bert_step_memory(const BertConfig& config, int64_t rows, int64_t tokens,
                                GradientPlace gradients, at::ScalarType compute_dtype) {
  if (compute_dtype != at::kFloat && compute_dtype != at::kBFloat16) {
    throw InputError("models::bert_step_memory",
                     std::string("compute_dtype=") + c10::toString(compute_dtype),
                     "Float or BFloat16");
  }
  const bool narrow = compute_dtype == at::kBFloat16;
  if (rows < 1 || tokens < 1 || tokens > config.max_position_embeddings) {
    throw InputError("models::bert_step_memory",
                     "rows=" + std::to_string(rows) + ", tokens=" + std::to_string(tokens),
                     "1 or more, and at most the model's " +
                         std::to_string(config.max_position_embeddings) + " tokens");
  }
  const int64_t h = config.hidden_size;
  detail::LayerSizes all{};
  all.hidden = h;
  all.wide = config.intermediate_size;
  all.rows = all.asking = rows * tokens;
  all.heads_asking = rows * config.num_attention_heads * tokens;
  all.scores = all.heads_asking * tokens;
  const int64_t padded = detail::padded_tokens(tokens);
  all.padded_rows = all.padded_asking = rows * padded;
  all.padded_scores = rows * config.num_attention_heads * padded * padded;
  all.dropout = config.hidden_dropout_prob > 0;
  all.attention_dropout = config.attention_probs_dropout_prob > 0;
  detail::LayerSizes last = all;
  last.asking = rows;
  last.heads_asking = rows * config.num_attention_heads;
  last.scores = last.heads_asking * tokens;
  last.padded_asking = rows;
  last.padded_scores = last.heads_asking * padded;
  last.one_asks = true;
  all.one_asks = tokens == 1;

  detail::MemoryTape tape(gradients);
  tape.take(3 * 2 * rows * tokens); // int64: ids, mask, row ends
  // Embeddings: words, positions and types, their sum (saved), norm, dropout.
  tape.take(all.n() + tokens * h);
  tape.take(all.n());
  tape.give(all.n() + tokens * h);
  tape.take(all.n() + 2 * all.rows);
  if (all.dropout) {
    tape.take(all.n());
    tape.give(all.n());
  }
  const int64_t layers = config.num_hidden_layers;
  for (int64_t layer = 0; layer < layers; ++layer) {
    (narrow ? detail::layer_forward_bf16 : detail::layer_forward)(tape,
                                                                  layer + 1 == layers ? last : all);
  }
  BertStepMemory memory;
  memory.saved_bytes = detail::head_of_step(tape, rows, h, config.num_labels(), narrow);
  // The gradient of the last layer's output takes the place of that output.
  for (int64_t layer = layers - 1; layer >= 0; --layer) {
    (narrow ? detail::layer_backward_bf16 : detail::layer_backward)(
        tape, layer + 1 == layers ? last : all);
  }
  if (all.dropout) {
    tape.take(all.n()); // of the norm's output
    tape.give(all.n());
  }
  tape.take(all.n()); // of the sum
  tape.gradient(2 * h);
  tape.give(2 * all.n() + 2 * all.rows);
  tape.gradient(config.max_position_embeddings * h);
  tape.gradient(config.type_vocab_size * h);
  tape.gradient(config.vocab_size * h);
  memory.peak_bytes = tape.peak();
  memory.activation_bytes = tape.activations();
  return memory;
}

} // namespace hasten
