// Answers of token-classification, fill-mask and text-generation models to texts, like transformers' pipelines. The
// functions run the model in batches, without gradients, in evaluation mode, in the dtype of its
// weights and on its device. Local. Threading: one thread per model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hasten/models/generation.h"
#include "hasten/models/pretrained_model.h"
#include "hasten/text/tokenizer.h"

namespace hasten {

struct PipelineOptions {
  /// Texts of one forward. Memory: their logits, in fp32.
  int64_t batch_size = 32;
  /// Most tokens of a text, with special tokens; 0: the limit of model and tokenizer. Prompts are not
  /// truncated.
  int64_t max_length = 0;
};

/// The label of a word.
struct TaggedWord {
  std::string label{}; // empty if the word has no token, for example because it was truncated
  double score = 0; // probability of the label
};

/// Labels the words of each sentence: a word has the label of its first token. [sentence][word]
/// Throws InputError as Tokenizer::encode_words does.
std::vector<std::vector<TaggedWord>> tag_words(
    PreTrainedModel model, const Tokenizer& tokenizer,
    const std::vector<std::vector<std::string>>& sentences, const PipelineOptions& options = {});

/// An entity in a text. The fields have the names of transformers' pipeline("token-classification",
/// aggregation_strategy="first").
struct EntityGroup {
  std::string entity_group{}; // the label without B- and I-
  double score = 0; // mean of its words' probabilities
  std::string word{}; // the bytes of the text from start to end
  int64_t start = 0, end = 0; // bytes; Python counts characters
};

/// Finds the entities of each text. Words are those of the tokenizer. As in transformers, words of
/// the same type are one entity unless the second has a B- label, and O is no entity. [text]
std::vector<std::vector<EntityGroup>> find_entities(PreTrainedModel model,
                                                    const Tokenizer& tokenizer,
                                                    const std::vector<std::string>& texts,
                                                    const PipelineOptions& options = {});

/// A token for a mask, with the names of transformers' pipeline("fill-mask").
struct FilledMask {
  double score = 0; // probability
  int64_t token = 0;
  std::string token_str{};
  /// The text with this token at the mask, and all other masks as they are.
  std::string sequence{};
};

/// The `top_k` most probable tokens for each mask token of each text, the most probable first.
/// [text][mask][k]. Throws InputError for a text without a mask token (the message has its index),
/// and if the tokenizer has none.
std::vector<std::vector<std::vector<FilledMask>>> fill_masks(PreTrainedModel model,
                                                             const Tokenizer& tokenizer,
                                                             const std::vector<std::string>& texts,
                                                             int64_t top_k = 5,
                                                             const PipelineOptions& options = {});

/// A continuation of a prompt.
struct GeneratedText {
  /// Without the prompt and without special tokens: transformers' with return_full_text=False.
  std::string generated_text{};
  std::vector<int64_t> token_ids{}; // with the token that ended it
  /// False: max_new_tokens ended it.
  bool stopped = false;
};

/// Continues each prompt, in batches. A prompt has the special tokens that the tokenizer puts before a
/// text; an empty prompt without them is its bos_token. [prompt]
/// Throws InputError as generate() does, for an empty stop string, and for an empty prompt where the
/// tokenizer has no bos_token.
std::vector<GeneratedText> generate_texts(PreTrainedModel model, const Tokenizer& tokenizer,
                                          const std::vector<std::string>& prompts,
                                          const GenerationConfig& config = {},
                                          const PipelineOptions& options = {});

} // namespace hasten
