// Generates tokens with a causal language model, like transformers' generate().
//
//   auto model = hasten::AutoModelForCausalLM::from_pretrained(folder);
//   const auto config = hasten::GenerationConfig::from_pretrained(folder);
//   const auto answers = hasten::generate(model, {prompt_ids}, config);
//
// hasten/tasks/pipelines.h has generate_texts(), from texts to texts.
// Threading: one thread per model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hasten/models/pretrained_model.h"

namespace hasten {

/// The fields have the names of transformers' GenerationConfig, and its defaults where nothing else is
/// said.
struct GenerationConfig {
  /// Most tokens of an answer. 0: 256, or fewer if the model has no positions for more after the
  /// longest prompt.
  int64_t max_new_tokens = 0;
  /// Most tokens of a prompt and its answer together. 0: no such limit. max_new_tokens counts where both
  /// are given.
  int64_t max_length = 0;
  /// Draws tokens by their probabilities. False: always takes the most probable (greedy).
  bool do_sample = false;
  /// Divides the logits, > 0; below 1 makes probable tokens more probable. With do_sample only, as are
  /// top_k and top_p.
  double temperature = 1;
  /// Draws from the `top_k` most probable tokens, and from those as probable as the last of them; 0:
  /// from all.
  int64_t top_k = 50;
  /// Draws from the fewest most probable tokens whose probabilities sum up to `top_p`, in (0, 1].
  double top_p = 1;
  /// Divides positive logits of tokens that prompt or answer have by this, and multiplies negative
  /// ones (Keskar et al. 2019, CTRL), > 0; 1: none.
  double repetition_penalty = 1;
  /// Each of these tokens ends an answer, as its last token. Empty: none.
  std::vector<int64_t> eos_token_id{};
  /// A text that contains one of these ends, with the token that completes it. generate_texts() reads
  /// them; generate() needs stopping_criteria that do.
  std::vector<std::string> stop_strings{};
  /// Draws depend on the seed, the prompt's index and the token's place alone, not on the batch.
  uint64_t seed = 42;
  /// Index of the first prompt, where the prompts are a part of more.
  int64_t first_prompt = 0;
  /// Keeps keys and values (KeyValueCache). False: computes all tokens for each new one. Models
  /// without supports_cache() never use it.
  bool use_cache = true;
  /// Only tokens below this are generated: the tokenizer's size, where the model's vocabulary is
  /// larger. 0: all.
  int64_t vocab_size = 0;

  /// Of a folder's generation_config.json, else of the keys of that file that its config.json has. A
  /// max_length of 20 counts as none, as in transformers. `model` is a folder or the name of a repository in Hugging Face's cache. Logs keys that
  /// transformers does not have either. A value out of range is an error of generate(), so that it can
  /// be replaced first.
  /// Throws InputError for a value of another type, and for an option that changes answers and that
  /// hasten does not have (num_beams, no_repeat_ngram_size, min_p, …).
  static GenerationConfig from_pretrained(const std::string& model);
  /// Throws InputError with the first value that is out of range.
  void validate() const;
};

/// Called after each new token of a prompt. `tokens` are the answer's so far. Returns whether it ends
/// here.
using StoppingCriteria = std::function<bool(size_t prompt, const std::vector<int64_t>& tokens)>;

/// The answer to each prompt, without the prompt: [prompt][token]. All prompts are one batch. Prompts
/// of different lengths are padded on the left, and padding influences nothing. Answers that have
/// ended leave the batch once they are half of it.
/// Runs the model without gradients, in evaluation mode, in the dtype of its weights and on its
/// device. Local. Memory: the logits of one token of each prompt, and the cache.
/// Throws InputError if the model has no head for causal_lm, for a prompt without tokens or with ids
/// outside of the vocabulary, if a prompt and max_new_tokens are more than max_tokens(), and for
/// stop_strings without stopping_criteria.
std::vector<std::vector<int64_t>> generate(PreTrainedModel model,
                                           const std::vector<std::vector<int64_t>>& prompts,
                                           const GenerationConfig& config = {},
                                           const StoppingCriteria& stopping_criteria = {});

/// From which tokens the next one is drawn: temperature, top_k and top_p applied to logits [B, V].
struct TokenCandidates {
  /// [B, K] int64, the most probable first.
  at::Tensor tokens{};
  /// [B, K] fp32; 0 for those that top_p excludes. A row sums up to 1.
  at::Tensor probabilities{};
};
TokenCandidates token_candidates(const at::Tensor& logits, const GenerationConfig& config);

} // namespace hasten
