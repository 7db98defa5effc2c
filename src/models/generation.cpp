#include "hasten/models/generation.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/known_keys.h"
#include "encoder.h"
#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/core/random.h"
#include "hasten/models/auto_model.h"
#include "hasten/models/key_value_cache.h"
#include "hasten/models/lora.h"
#include "hasten/text/pretrained_folder.h"

namespace hasten {

std::pair<at::Tensor, at::Tensor> KeyValueCache::update(size_t layer, const at::Tensor& keys,
                                                        const at::Tensor& values) {
  layers_.resize(std::max(layers_.size(), layer + 1));
  Layer& kept = layers_[layer];
  const int64_t length = kept.length + keys.size(2);
  const auto grown = [&](at::Tensor& all, const at::Tensor& added) {
    if (all.defined() && (all.size(0) != added.size(0) || all.size(1) != added.size(1) ||
                          all.size(3) != added.size(3))) {
      throw InputError("models::KeyValueCache", c10::str("keys or values=", added.sizes()),
                       c10::str("[B, heads, T, width] of ", all.sizes()),
                       "make a cache for each batch");
    }
    if (!all.defined() || all.size(2) < length) {
      // The first tokens are the prompt's, and many answers are short.
      const int64_t capacity = all.defined() ? 2 * length : length + 64;
      const at::Tensor larger =
          at::empty({added.size(0), added.size(1), capacity, added.size(3)}, added.options());
      if (kept.length > 0) {
        larger.narrow(2, 0, kept.length).copy_(all.narrow(2, 0, kept.length));
      }
      all = larger;
    }
    all.narrow(2, kept.length, added.size(2)).copy_(added);
    return all.narrow(2, 0, length);
  };
  std::pair all{grown(kept.keys, keys), grown(kept.values, values)};
  kept.length = length;
  return all;
}

void KeyValueCache::select_rows(const at::Tensor& rows) {
  for (Layer& layer : layers_) {
    layer.keys = layer.keys.narrow(2, 0, layer.length).index_select(0, rows);
    layer.values = layer.values.narrow(2, 0, layer.length).index_select(0, rows);
  }
}

namespace detail {

constexpr const char* kGenerate = "models::generate";

void require_value(bool right, const std::string& what, const std::string& expected) {
  if (!right) {
    throw InputError(kGenerate, what, expected);
  }
}

/// Uniform in [0, 1).
double uniform_draw(uint64_t seed, uint64_t prompt, uint64_t place) {
  return static_cast<double>(stream_seed("generate", seed, prompt, place) >> 11) * 0x1p-53;
}

void penalise_repetitions(const at::Tensor& scores, const std::vector<int64_t>& ids,
                          double penalty) {
  const at::Tensor seen = at::tensor(ids, at::kLong).to(scores.device());
  const at::Tensor old = scores.index_select(0, seen);
  scores.index_copy_(0, seen, at::where(old < 0, old * penalty, old / penalty));
}

/// One prompt and its answer.
struct Generated {
  std::vector<int64_t> ids{}; // of both
  size_t prompt_tokens = 0;
  bool ended = false;

  std::vector<int64_t> answer() const {
    return {ids.begin() + static_cast<ptrdiff_t>(prompt_tokens), ids.end()};
  }
};

/// A batch that generates one token for each of its rows at a time.
class Generation {
 public:
  Generation(PreTrainedModel model, const std::vector<std::vector<int64_t>>& prompts,
             const GenerationConfig& config)
      : model_(std::move(model)), config_(config) {
    if (config_.use_cache && model_->supports_cache()) {
      cache_ = std::make_shared<KeyValueCache>();
    }
    for (const auto& prompt : prompts) {
      rows_.push_back(all_.size());
      all_.push_back({prompt, prompt.size()});
      longest_ = longest_prompt_ = std::max(longest_, std::ssize(prompt));
    }
  }

  std::vector<std::vector<int64_t>> run(const StoppingCriteria& stopping_criteria) {
    while (!rows_.empty()) {
      renew_cache();
      const at::Tensor tokens = next_tokens();
      for (size_t row = 0; row < rows_.size(); ++row) {
        Generated& one = all_[rows_[row]];
        if (!one.ended) {
          one.ids.push_back(tokens.const_data_ptr<int64_t>()[row]);
          one.ended = ends(one, rows_[row], stopping_criteria);
        }
      }
      ++longest_;
      drop_ended();
    }
    return mapped(all_, [](const Generated& one) { return one.answer(); });
  }

 private:
  bool ends(const Generated& one, size_t prompt, const StoppingCriteria& stopping_criteria) const {
    const std::vector<int64_t> answer = one.answer();
    const bool asked = stopping_criteria && stopping_criteria(prompt, answer);
    return asked || std::ssize(answer) >= config_.max_new_tokens ||
           std::ssize(one.ids) == config_.max_length ||
           std::ranges::find(config_.eos_token_id, answer.back()) != config_.eos_token_id.end();
  }

  /// All tokens, or those that the cache does not have: [B, T], padded on the left.
  ModelInputs inputs() const {
    const auto batch = static_cast<int64_t>(rows_.size());
    const int64_t past = cache_ ? cache_->length() : 0;
    const int64_t tokens = longest_ - past;
    at::Tensor ids = at::zeros({batch, tokens}, at::kLong);
    at::Tensor positions = at::zeros({batch, tokens}, at::kLong);
    at::Tensor mask = at::zeros({batch, longest_}, at::kLong);
    bool padded = false;
    for (int64_t row = 0; row < batch; ++row) {
      const Generated& one = all_[rows_[static_cast<size_t>(row)]];
      const int64_t padding = longest_prompt_ - static_cast<int64_t>(one.prompt_tokens);
      padded = padded || padding > 0;
      mask[row].slice(0, padding).fill_(1);
      for (int64_t place = std::max(padding, past); place < longest_; ++place) {
        const auto at = static_cast<size_t>(place - padding);
        const int64_t to = row * tokens + place - past;
        // A row that has ended goes on with its last token, which nobody reads.
        ids.mutable_data_ptr<int64_t>()[to] = one.ids[std::min(at, one.ids.size() - 1)];
        positions.mutable_data_ptr<int64_t>()[to] = place - padding;
      }
    }
    const at::Device device = model_->parameters()[0].device();
    return {.input_ids = ids.to(device),
            .attention_mask = padded ? mask.to(device) : at::Tensor(),
            .position_ids = padded || past > 0 ? positions.to(device) : at::Tensor(),
            .past_key_values = cache_,
            .logits_to_keep = 1};
  }
  void renew_cache() {
    const int64_t limit = model_->cache_limit();
    const bool above =
        limit > 0 && std::ranges::any_of(rows_, [&](size_t row) {
          return longest_ - longest_prompt_ + static_cast<int64_t>(all_[row].prompt_tokens) ==
                 limit + 1;
        });
    if (cache_ && above) {
      cache_ = std::make_shared<KeyValueCache>();
    }
  }

  at::Tensor next_tokens() {
    at::Tensor scores = model_->forward(inputs()).logits.select(1, -1).to(at::kFloat);
    if (config_.vocab_size > 0) {
      scores = scores.slice(1, 0, config_.vocab_size);
    }
    if (config_.repetition_penalty != 1) {
      scores = scores.clone();
      for (size_t row = 0; row < rows_.size(); ++row) {
        penalise_repetitions(scores[static_cast<int64_t>(row)], all_[rows_[row]].ids,
                             config_.repetition_penalty);
      }
    }
    return config_.do_sample ? drawn(scores) : scores.argmax(1).cpu();
  }

  at::Tensor drawn(const at::Tensor& scores) const {
    const TokenCandidates candidates = token_candidates(scores, config_);
    const at::Tensor ids = candidates.tokens.cpu().contiguous();
    const at::Tensor sums = candidates.probabilities.cpu().to(at::kDouble).cumsum(1);
    at::Tensor tokens = at::empty({ids.size(0)}, at::kLong);
    for (int64_t row = 0; row < ids.size(0); ++row) {
      const size_t prompt = rows_[static_cast<size_t>(row)];
      const Generated& one = all_[prompt];
      const double* begin = sums.const_data_ptr<double>() + row * ids.size(1);
      const double* end = begin + ids.size(1);
      const double at =
          uniform_draw(config_.seed, prompt + static_cast<uint64_t>(config_.first_prompt),
                       one.ids.size() - one.prompt_tokens);
      // A candidate of probability 0 does not raise the sum, so it is never the first above.
      const double* found = std::upper_bound(begin, end, at * end[-1]);
      tokens[row] = ids[row][found - begin];
    }
    return tokens;
  }

  void drop_ended() {
    std::vector<int64_t> going; // rows of the batch
    for (size_t row = 0; row < rows_.size(); ++row) {
      if (!all_[rows_[row]].ended) {
        going.push_back(static_cast<int64_t>(row));
      }
    }
    if (2 * going.size() > rows_.size()) {
      return; // copying the cache would take longer than a few rows more
    }
    rows_ = mapped(going, [this](int64_t row) { return rows_[static_cast<size_t>(row)]; });
    if (cache_ && !rows_.empty()) {
      cache_->select_rows(at::tensor(going, at::kLong).to(model_->parameters()[0].device()));
    }
  }

  PreTrainedModel model_;
  GenerationConfig config_;
  std::shared_ptr<KeyValueCache> cache_{};
  std::vector<Generated> all_{}; // [prompt]
  std::vector<size_t> rows_{}; // prompts of the batch's rows
  int64_t longest_prompt_ = 0; // tokens
  int64_t longest_ = 0; // tokens of a row, with padding
};

void check_prompts(const PreTrainedModelImpl& model,
                   const std::vector<std::vector<int64_t>>& prompts,
                   const GenerationConfig& config) {
  const int64_t max_new_tokens = config.max_new_tokens;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::string prompt = "prompt " + std::to_string(i) + ": ";
    const int64_t longest = model.config().max_tokens() - std::max<int64_t>(1, max_new_tokens);
    require_value(!prompts[i].empty(), prompt + "it has no tokens", "at least one token");
    if (std::ssize(prompts[i]) > longest) {
      throw InputError(kGenerate,
                       prompt + "tokens=" + std::to_string(prompts[i].size()) +
                           ", max_new_tokens=" + std::to_string(max_new_tokens),
                       "together at most the model's " +
                           std::to_string(model.config().max_tokens()) + " positions",
                       "shorten the prompt, or lower max_new_tokens");
    }
    require_value(
        max_new_tokens > 0 || config.max_length == 0 || std::ssize(prompts[i]) < config.max_length,
        prompt + "tokens=" + std::to_string(prompts[i].size()) +
            ", max_length=" + std::to_string(config.max_length),
        "a prompt that leaves room for an answer, or max_new_tokens");
    for (const int64_t id : prompts[i]) {
      require_value(id >= 0 && id < model.config().vocab_size, prompt + "id=" + std::to_string(id),
                    "0 to " + std::to_string(model.config().vocab_size - 1));
    }
  }
}

/// The values of a key whose value is a list or a single one.
template <typename T>
std::vector<T> listed_option(const nlohmann::json& options, const char* key) {
  const auto found = options.find(key);
  if (found == options.end() || found->is_null()) {
    return {};
  }
  return found->is_array() ? family_option(options, key, std::vector<T>())
                           : std::vector{family_option(options, key, T())};
}

/// The token that is the `most`-th probable of a row, and all that are as probable: transformers keeps
/// them, too, and logits in 16 bits are often equal.
int64_t with_equal_logits(const at::Tensor& logits, int64_t most) {
  const at::Tensor last = std::get<0>(logits.topk(most, 1)).slice(1, most - 1);
  return logits.ge(last).sum(1).max().item<int64_t>();
}

} // namespace detail

TokenCandidates token_candidates(const at::Tensor& logits, const GenerationConfig& config) {
  const int64_t most = config.top_k > 0 ? std::min(config.top_k, logits.size(1)) : logits.size(1);
  const at::Tensor divided = logits.to(at::kFloat) / config.temperature;
  const int64_t kept = most < logits.size(1) ? detail::with_equal_logits(divided, most) : most;
  const auto [scores, tokens] = divided.topk(kept, 1);
  const at::Tensor least = scores.slice(1, most - 1, most);
  at::Tensor probabilities =
      scores.masked_fill(scores < least, -std::numeric_limits<float>::infinity()).softmax(1);
  if (config.top_p < 1) {
    const at::Tensor before = probabilities.cumsum(1) - probabilities; // of more probable tokens
    probabilities = probabilities.masked_fill(before >= config.top_p, 0);
    probabilities = probabilities / probabilities.sum(1, /*keepdim=*/true);
  }
  return {tokens, probabilities};
}

void GenerationConfig::validate() const {
  using detail::require_value;
  require_value(max_new_tokens >= 0, "max_new_tokens=" + std::to_string(max_new_tokens),
                "0 or more");
  require_value(max_length >= 0, "max_length=" + std::to_string(max_length), "0 or more");
  require_value(!do_sample || temperature > 0, "temperature=" + format_digits(temperature),
                "above 0; do_sample=false always takes the most probable token");
  require_value(!do_sample || top_k >= 0, "top_k=" + std::to_string(top_k), "0 or more");
  require_value(!do_sample || (top_p > 0 && top_p <= 1), "top_p=" + format_digits(top_p),
                "above 0, at most 1");
  require_value(repetition_penalty > 0, "repetition_penalty=" + format_digits(repetition_penalty),
                "above 0");
}

GenerationConfig GenerationConfig::from_pretrained(const std::string& model) {
  const std::filesystem::path folder = pretrained_folder(model);
  if (std::error_code ignored;
      LoraConfig::is_adapter(folder) &&
      !std::filesystem::exists(folder / "generation_config.json", ignored)) {
    return from_pretrained(LoraConfig::base_of(folder)); // as PEFT, which writes none
  }
  // The keys of an older model's config.json count only where there is no other file.
  auto path = folder / "generation_config.json";
  std::error_code ignored;
  const bool own = std::filesystem::exists(path, ignored);
  path = own ? path : folder / "config.json";
  nlohmann::json options = std::filesystem::exists(path, ignored)
                               ? read_json_file(detail::kGenerate, path)
                               : nlohmann::json::object();
  detail::require_value(options.is_object(), path.string(), "a JSON object");
  options = own ? options : detail::known_members("generation_config.json", options);
  const auto samples = detail::family_option(options, "do_sample", false);
  detail::check_known_keys("models::pretrained", path.string(), "generation_config.json",
                           samples ? "do_sample" : "*", options);
  GenerationConfig config;
  const auto take = [&](const char* key, auto& field) {
    field = detail::family_option(options, key, field);
  };
  take("max_new_tokens", config.max_new_tokens);
  detail::require_value(config.max_new_tokens > 0 || !options.contains("max_new_tokens"),
                        path.string() + ": max_new_tokens=" + std::to_string(config.max_new_tokens),
                        "1 or more");
  take("max_length", config.max_length);
  detail::require_value(config.max_length > 0 || !options.contains("max_length"),
                        path.string() + ": max_length=" + std::to_string(config.max_length),
                        "1 or more");
  take("do_sample", config.do_sample);
  take("temperature", config.temperature);
  take("top_k", config.top_k);
  take("top_p", config.top_p);
  take("repetition_penalty", config.repetition_penalty);
  config.stop_strings = detail::listed_option<std::string>(options, "stop_strings");
  config.eos_token_id = detail::listed_option<int64_t>(options, "eos_token_id");
  detail::require_value(
      !config.eos_token_id.empty() || options.value("eos_token_id", nlohmann::json()).is_null(),
      path.string() + ": eos_token_id=[]", "an id, or some");
  constexpr int64_t kDefaultMaxLength = 20; // which transformers takes for "not given"
  config.max_length = config.max_length == kDefaultMaxLength ? 0 : config.max_length;
  return config;
}

std::vector<std::vector<int64_t>> generate(PreTrainedModel model,
                                           const std::vector<std::vector<int64_t>>& prompts,
                                           const GenerationConfig& config,
                                           const StoppingCriteria& stopping_criteria) {
  config.validate();
  detail::require_value(model->task() == ModelTask::causal_lm,
                        "the model has a head for " + std::string(task_name(model->task())),
                        "one for " + std::string(task_name(ModelTask::causal_lm)));
  detail::require_value(config.stop_strings.empty() || stopping_criteria,
                        "stop_strings=" + joined(config.stop_strings),
                        "none, because generate() has no tokenizer; generate_texts() has one");
  detail::check_prompts(*model, prompts, config);
  GenerationConfig used = config;
  if (used.max_new_tokens == 0) {
    used.max_new_tokens = used.max_length > 0 ? used.max_length : 256;
    for (const auto& prompt : prompts) {
      used.max_new_tokens =
          std::min(used.max_new_tokens, model->config().max_tokens() - std::ssize(prompt));
    }
  } else {
    used.max_length = 0;
  }
  const c10::InferenceMode inference;
  const bool training = model->is_training();
  const auto put_back = c10::make_scope_exit([&] { model->train(training); });
  model->eval();
  return detail::Generation(model, prompts, used).run(stopping_criteria);
}

} // namespace hasten
