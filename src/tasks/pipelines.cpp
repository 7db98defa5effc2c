#include "hasten/tasks/pipelines.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <functional>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/tasks/task.h"

namespace hasten {

namespace detail {

/// Calls `take` with each row and its logits [T, …] in fp32 on the CPU, where T has padding.
void run_model(PreTrainedModel& model, const Tokenizer& tokenizer,
               const std::vector<Encoding>& encodings, const PipelineOptions& options,
               const std::function<void(size_t row, const at::Tensor& logits)>& take) {
  if (options.batch_size < 1) {
    throw InputError("tasks::pipelines", "batch_size=" + std::to_string(options.batch_size),
                     "at least 1");
  }
  const at::NoGradGuard no_grad;
  const bool training = model->is_training();
  const auto put_back = c10::make_scope_exit([&] { model->train(training); });
  model->eval();
  const DataCollatorWithPadding collator(tokenizer.padding());
  const at::Device device = model->parameters()[0].device();
  const auto batch_size = static_cast<size_t>(options.batch_size);
  for (size_t begin = 0; begin < encodings.size(); begin += batch_size) {
    std::vector<TokenFeature> features;
    for (size_t row = begin; row < std::min(begin + batch_size, encodings.size()); ++row) {
      features.push_back({.input_ids = encodings[row].ids,
                          .token_type_ids = encodings[row].token_type_ids,
                          .index = static_cast<int64_t>(row)});
    }
    const Batch batch = collator(features, 0).to(device);
    const at::Tensor logits =
        model->forward(model_inputs(batch)).logits.to(at::kCPU, at::kFloat).contiguous();
    for (size_t row = 0; row < features.size(); ++row) {
      const auto tokens = std::ssize(features[row].input_ids);
      const int64_t first =
          tokenizer.padding().padding_side == TokenSide::left ? logits.size(1) - tokens : 0;
      take(begin + row, logits[static_cast<int64_t>(row)].narrow(0, first, tokens));
    }
  }
}

/// A word in its encoding, by its first token.
struct FoundWord {
  int64_t word = 0;
  int64_t label = 0;
  double score = 0;
  int64_t start = 0, end = 0; // bytes; 0 without offsets
};

std::vector<FoundWord> found_words(const Encoding& encoding, const at::Tensor& logits) {
  const at::Tensor probabilities = at::softmax(logits, 1);
  const auto [scores, labels] = probabilities.max(1);
  std::vector<FoundWord> words;
  for (size_t token = 0; token < encoding.ids.size(); ++token) {
    const int64_t word = encoding.word_ids[token];
    if (word < 0) {
      continue;
    }
    const bool offsets = !encoding.offset_mapping.empty();
    if (words.empty() || words.back().word != word) {
      words.push_back({.word = word,
                       .label = labels.const_data_ptr<int64_t>()[token],
                       .score = scores.const_data_ptr<float>()[token],
                       .start = offsets ? encoding.offset_mapping[token].first : 0});
    }
    words.back().end = offsets ? encoding.offset_mapping[token].second : 0;
  }
  return words;
}

EncodeOptions pipeline_encoding(const PreTrainedModel& model, const Tokenizer& tokenizer,
                                const PipelineOptions& options, bool offsets) {
  int64_t length = model->config().max_tokens();
  for (const int64_t limit : {tokenizer.model_max_length(), options.max_length}) {
    length = limit > 0 ? std::min(length, limit) : length;
  }
  EncodeOptions encode{.max_length = length};
  encode.return_offsets_mapping = offsets;
  encode.return_word_ids = true;
  return encode;
}

void require_task(const PreTrainedModel& model, ModelTask task) {
  if (model->task() != task) {
    throw InputError("tasks::pipelines",
                     "the model has a head for " + std::string(task_name(model->task())),
                     "one for " + std::string(task_name(task)));
  }
}

/// {'B', type} of "B-type"; a label without B- or I- is {'I', label}, as in transformers.
std::pair<char, std::string> split_tag(const std::string& label) {
  return label.starts_with("B-") || label.starts_with("I-") ? std::pair(label[0], label.substr(2))
                                                            : std::pair('I', label);
}

std::vector<EntityGroup> grouped(const std::vector<FoundWord>& words, const std::string& text,
                                 const std::vector<std::string>& labels) {
  std::vector<EntityGroup> groups;
  std::vector<int64_t> sizes;
  for (const FoundWord& word : words) {
    const auto [prefix, type] = split_tag(labels[static_cast<size_t>(word.label)]);
    if (groups.empty() || prefix == 'B' || groups.back().entity_group != type) {
      groups.push_back({.entity_group = type, .start = word.start});
      sizes.push_back(0);
    }
    groups.back().score += word.score;
    groups.back().end = word.end;
    ++sizes.back();
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    EntityGroup& group = groups[i];
    group.score /= static_cast<double>(sizes[i]);
    // Byte-level tokenizers may count the space before a word as part of it.
    while (group.start < group.end && text[static_cast<size_t>(group.start)] == ' ') {
      ++group.start;
    }
    group.word =
        text.substr(static_cast<size_t>(group.start), static_cast<size_t>(group.end - group.start));
  }
  std::erase_if(groups, [](const EntityGroup& group) { return group.entity_group == "O"; });
  return groups;
}

} // namespace detail

std::vector<std::vector<TaggedWord>> tag_words(
    PreTrainedModel model, const Tokenizer& tokenizer,
    const std::vector<std::vector<std::string>>& sentences, const PipelineOptions& options) {
  detail::require_task(model, ModelTask::token_classification);
  const EncodeOptions encode = detail::pipeline_encoding(model, tokenizer, options, false);
  const auto encodings =
      mapped(sentences, [&](const auto& words) { return tokenizer.encode_words(words, encode); });
  const auto& labels = model->config().id2label;
  auto tagged =
      mapped(sentences, [](const auto& words) { return std::vector<TaggedWord>(words.size()); });
  detail::run_model(
      model, tokenizer, encodings, options, [&](size_t row, const at::Tensor& logits) {
        for (const detail::FoundWord& word : detail::found_words(encodings[row], logits)) {
          tagged[row][static_cast<size_t>(word.word)] = {
              .label = labels[static_cast<size_t>(word.label)], .score = word.score};
        }
      });
  return tagged;
}

std::vector<std::vector<EntityGroup>> find_entities(PreTrainedModel model,
                                                    const Tokenizer& tokenizer,
                                                    const std::vector<std::string>& texts,
                                                    const PipelineOptions& options) {
  detail::require_task(model, ModelTask::token_classification);
  const EncodeOptions encode = detail::pipeline_encoding(model, tokenizer, options, true);
  const auto encodings =
      mapped(texts, [&](const std::string& text) { return tokenizer.encode(text, encode); });
  std::vector<std::vector<EntityGroup>> found(texts.size());
  detail::run_model(model, tokenizer, encodings, options,
                    [&](size_t row, const at::Tensor& logits) {
                      found[row] = detail::grouped(detail::found_words(encodings[row], logits),
                                                   texts[row], model->config().id2label);
                    });
  return found;
}

std::vector<std::vector<std::vector<FilledMask>>> fill_masks(PreTrainedModel model,
                                                             const Tokenizer& tokenizer,
                                                             const std::vector<std::string>& texts,
                                                             int64_t top_k,
                                                             const PipelineOptions& options) {
  detail::require_task(model, ModelTask::masked_lm);
  const int64_t mask = tokenizer.special_id("mask_token");
  if (mask < 0 || top_k < 1) {
    throw InputError(
        "tasks::fill_masks",
        mask < 0 ? "the tokenizer has no mask_token" : "top_k=" + std::to_string(top_k),
        "a tokenizer with a mask_token, and top_k of at least 1");
  }
  const EncodeOptions encode = detail::pipeline_encoding(model, tokenizer, options, false);
  std::vector<Encoding> encodings;
  for (const std::string& text : texts) {
    encodings.push_back(tokenizer.encode(text, encode));
    if (std::ranges::find(encodings.back().ids, mask) == encodings.back().ids.end()) {
      throw InputError(
          "tasks::fill_masks",
          "text=" + std::to_string(encodings.size() - 1) + " has no mask: " + shortened(text, 80),
          "at least one " + tokenizer.token(mask) + " among its first " +
              std::to_string(encode.max_length) + " tokens",
          "write " + tokenizer.token(mask) + " for the word to be filled in");
    }
  }
  std::vector<std::vector<std::vector<FilledMask>>> filled(texts.size());
  detail::run_model(
      model, tokenizer, encodings, options, [&](size_t row, const at::Tensor& logits) {
        std::vector<int64_t> ids = encodings[row].ids;
        for (size_t token = 0; token < ids.size(); ++token) {
          if (ids[token] != mask) {
            continue;
          }
          const at::Tensor probabilities = at::softmax(logits[static_cast<int64_t>(token)], 0);
          const auto [scores, best] = probabilities.topk(
              std::min(top_k, std::min(probabilities.size(0), tokenizer.size())));
          auto& answers = filled[row].emplace_back();
          for (int64_t k = 0; k < best.size(0); ++k) {
            const int64_t id = best.const_data_ptr<int64_t>()[k];
            if (id >= tokenizer.size()) {
              continue; // a row of the vocabulary that pads the model's matrix
            }
            ids[token] = id;
            answers.push_back({.score = scores.const_data_ptr<float>()[k],
                               .token = id,
                               .token_str = tokenizer.decode({id}),
                               .sequence = tokenizer.decode(ids, {.skip_special_tokens = true})});
          }
          ids[token] = mask;
        }
      });
  return filled;
}

namespace detail {

std::vector<int64_t> prompt_ids(const Tokenizer& tokenizer, const std::string& prompt) {
  std::vector<int64_t> ids = tokenizer.encode(prompt).ids;
  if (ids.empty()) {
    ids = {tokenizer.special_id("bos_token")};
    if (ids[0] < 0) {
      throw InputError("tasks::generate_texts", "an empty prompt", "some text",
                       "the tokenizer has no bos_token to begin with");
    }
  }
  return ids;
}

/// Whether the last tokens complete one of the strings.
bool completes(const Tokenizer& tokenizer, const std::vector<int64_t>& tokens,
               const std::vector<std::string>& strings) {
  size_t longest = 0;
  for (const std::string& string : strings) {
    longest = std::max(longest, string.size());
  }
  // A token has at least a byte. Decoding may remove a space before the first.
  const size_t count = std::min(tokens.size(), longest + 4);
  const std::string end =
      tokenizer.decode({tokens.end() - static_cast<ptrdiff_t>(count), tokens.end()});
  return std::ranges::any_of(
      strings, [&](const std::string& string) { return end.find(string) != std::string::npos; });
}

/// The text that `answer` adds to that of `prompt`.
std::string added_text(const Tokenizer& tokenizer, std::vector<int64_t> prompt,
                       const std::vector<int64_t>& answer) {
  const DecodeOptions options{.skip_special_tokens = true};
  const std::string before = tokenizer.decode(prompt, options);
  prompt.insert(prompt.end(), answer.begin(), answer.end());
  const std::string all = tokenizer.decode(prompt, options);
  return all.starts_with(before) ? all.substr(before.size()) : tokenizer.decode(answer, options);
}

} // namespace detail

std::vector<GeneratedText> generate_texts(PreTrainedModel model, const Tokenizer& tokenizer,
                                          const std::vector<std::string>& prompts,
                                          const GenerationConfig& config,
                                          const PipelineOptions& options) {
  if (options.batch_size < 1 ||
      std::ranges::find(config.stop_strings, "") != config.stop_strings.end()) {
    throw InputError("tasks::generate_texts",
                     options.batch_size < 1 ? "batch_size=" + std::to_string(options.batch_size)
                                            : std::string("an empty stop string"),
                     "a batch_size of at least 1, and stop strings that are not empty");
  }
  GenerationConfig used = config;
  used.vocab_size = std::min(model->config().vocab_size, tokenizer.size());
  const auto all =
      mapped(prompts, [&](const std::string& text) { return detail::prompt_ids(tokenizer, text); });
  std::vector<GeneratedText> texts;
  const auto batch_size = static_cast<size_t>(options.batch_size);
  for (size_t begin = 0; begin < all.size(); begin += batch_size) {
    const size_t end = std::min(begin + batch_size, all.size());
    std::vector<bool> stopped(end - begin);
    used.first_prompt = static_cast<int64_t>(begin);
    const auto answers = generate(
        model,
        {all.begin() + static_cast<ptrdiff_t>(begin), all.begin() + static_cast<ptrdiff_t>(end)},
        used, [&](size_t prompt, const std::vector<int64_t>& tokens) {
          stopped[prompt] = !config.stop_strings.empty() &&
                            detail::completes(tokenizer, tokens, config.stop_strings);
          return stopped[prompt];
        });
    for (size_t i = 0; i < answers.size(); ++i) {
      const bool ended =
          std::ranges::find(config.eos_token_id, answers[i].back()) != config.eos_token_id.end();
      texts.push_back({.generated_text = detail::added_text(tokenizer, all[begin + i], answers[i]),
                       .token_ids = answers[i],
                       .stopped = stopped[i] || ended});
    }
  }
  return texts;
}

} // namespace hasten
