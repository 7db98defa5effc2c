#include "hasten/text/token_cache.h"

#include <utf8proc.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "encode_parallel.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "token_file.h"
#include "token_lock.h"

namespace hasten {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TextSideReport, rows, counts, least, most, sum)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TextClassificationReport, rows_read, filtered_out, empty_text,
                                   empty_label, duplicates, train, eval, warnings)

namespace detail {

// Increase it with every change of the ids that equal files and options give.
constexpr int kTokenRules = 4;

class TextHasher {
 public:
  TextHasher() { XXH3_128bits_reset(state_.get()); }
  void add(std::string_view text) {
    constexpr size_t kBlock = size_t{64} << 20; // bytes between two checks for Ctrl-C
    for (size_t at = 0; at < text.size(); at += kBlock) {
      const auto block = text.substr(at, kBlock);
      XXH3_128bits_update(state_.get(), block.data(), block.size());
      throw_if_interrupted();
    }
  }
  std::string hex() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
    return format_hex(hash.high64) + format_hex(hash.low64);
  }

 private:
  HashState state_{XXH3_createState(), &XXH3_freeState};
};

std::string text_hash_hex(std::string_view text) {
  TextHasher hasher;
  hasher.add(text);
  return hasher.hex();
}

nlohmann::json described_words(const WordPieceOptions& options) {
  return {{"do_lower_case", options.do_lower_case},
          {"strip_accents", options.strip_accents.value_or(options.do_lower_case)},
          {"tokenize_chinese_chars", options.tokenize_chinese_chars},
          {"special",
           {options.unk_token, options.sep_token, options.pad_token, options.cls_token,
            options.mask_token}}};
}

nlohmann::json described_tokenizer(const TokenizedClassificationOptions& options) {
  if (options.tokenizer) {
    return options.tokenizer->hash();
  }
  auto described = described_words(options.learned);
  described["learned"] = {options.vocab.vocab_size, options.vocab.min_frequency,
                          options.vocab.limit_alphabet};
  return described;
}

nlohmann::json described_files(const TextFiles& files) {
  nlohmann::json described = nlohmann::json::array();
  for (const auto& file : files) {
    TextHasher hasher;
    TextWindow window(file);
    for (hasher.add(window.text()); !window.reaches_end(); hasher.add(window.text())) {
      window.move(window.text().size());
    }
    // The extension determines how the file is read.
    described.push_back({hasher.hex(), file->extension().string()});
  }
  return described;
}

// Hash of everything that determines the ids.
std::string token_cache_key(const TextFiles& train_files, const TextFiles& eval_files,
                            const TokenizedClassificationOptions& options) {
  const TextClassificationOptions& texts = options.texts;
  nlohmann::json described{
      {"rules", kTokenRules},
      {"unicode", utf8proc_unicode_version()},
      {"train", described_files(train_files)},
      {"eval", described_files(eval_files)},
      {"split", {texts.eval_split, texts.eval_split > 0 ? texts.seed : uint64_t{0}}},
      {"columns",
       {texts.table.text_column, texts.table.text_pair_column, texts.table.label_column,
        texts.table.label_columns, texts.table.label_separator,
        static_cast<int>(texts.table.problem_type), static_cast<int>(texts.table.delimiter),
        texts.table.has_header, texts.table.keep_empty_text}},
      {"filters", texts.table.filters},
      {"rows", {texts.max_train_rows, texts.max_eval_rows}},
      {"labels", texts.label_names},
      {"replace", texts.replace_label_names},
      {"tokenizer", described_tokenizer(options)},
      {"max_length", options.max_length}};
  if (texts.table.documents) {
    described["documents"] = static_cast<int>(texts.table.sample_by);
  }
  // Options may have bytes that are not UTF-8.
  return text_hash_hex(described.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

bool of_documents(const TokenizedClassificationOptions& options) {
  return options.texts.table.documents;
}

bool has_pairs(const TokenizedClassificationOptions& options) {
  return !options.texts.table.text_pair_column.empty();
}

// Makes the ids of all files, in order.
class TokenMaker {
 public:
  using Sink = std::function<void(std::span<const int32_t>)>;

  TokenMaker(const TextFiles& train_files, const TextFiles& eval_files,
             const TokenizedClassificationOptions& options,
             std::function<void(int64_t, int64_t)> report_progress)
      : options_(options),
        report_progress_(std::move(report_progress)),
        total_(train_files.bytes() + eval_files.bytes()),
        selection_(select_text_rows(train_files, eval_files, options.texts)),
        tokenizer_(options.tokenizer ? *options.tokenizer : learned_tokenizer()),
        eos_id_(tokenizer_.special_id("eos_token")) {
    if (of_documents(options) && eos_id_ < 0) {
      throw InputError("data::tokenize_text_classification", "the tokenizer's eos_token is not set",
                       "a token that ends each document",
                       "set eos_token in the tokenizer's tokenizer_config.json");
    }
  }

  void make(const Sink& sink) {
    train_.clear();
    eval_.clear();
    checksum_ = {};
    ids_ = tokens_ = truncated_ = 0;
    int64_t before = 0;
    for (const SelectedRows& rows : selection_.files) {
      read_files(rows, before, sink);
      before += rows.files.bytes();
    }
  }

  // Call it after make(). Describes the ids that it made.
  nlohmann::json values() const {
    nlohmann::json values{{"label_names", selection_.label_names},
                          {"report", selection_.report},
                          {"tokens", tokens_},
                          {"truncated", truncated_},
                          {"train_checksum", checksum_.hex()}};
    if (!options_.tokenizer) {
      values["vocab"] = tokenizer_.vocab();
    }
    return values;
  }
  const std::vector<TokenRow>& train() const { return train_; }
  const std::vector<TokenRow>& eval() const { return eval_; }

 private:
  struct Place {
    int32_t label = 0;
    std::vector<TokenRow>* side = nullptr;
  };
  struct Chunk {
    std::vector<std::string> texts{};
    std::vector<std::string> pairs{}; // [text]; empty without pairs
    std::vector<LabelledWords> words{}; // [text]; instead of texts
    std::vector<std::string> positions{}; // [text], of prompts
    std::vector<Place> places{}; // [text]
    size_t bytes = 0;
  };

  Tokenizer learned_tokenizer() {
    WordPieceLearner learner(options_.learned);
    const SelectedRows& rows = selection_.files[0];
    TextRowReader reader(rows.files, rows.table);
    for (size_t row = 0; reader.next(); ++row) {
      if (rows.sides[row] != SelectedRows::Side::train) {
        continue;
      }
      if (type() == ProblemType::word_labels) {
        learner.add(joined(read_labelled_words(reader, rows.table).words, " "));
      } else {
        learner.add(reader.text());
        learner.add(reader.text_pair());
      }
      throw_if_interrupted();
    }
    return WordPieceTokenizer(learner.learn(options_.vocab), options_.learned);
  }

  void read_files(const SelectedRows& rows, int64_t before, const Sink& sink) {
    constexpr size_t kChunkRows = 16384;
    constexpr size_t kChunkBytes = size_t{4} << 20;
    TextRowReader reader(rows.files, rows.table);
    Chunk chunk;
    for (size_t row = 0; reader.next(); ++row) {
      if (rows.sides[row] == SelectedRows::Side::left_out) {
        continue;
      }
      if (type() == ProblemType::word_labels) {
        chunk.words.push_back(read_labelled_words(reader, rows.table));
      } else {
        chunk.texts.emplace_back(reader.text());
      }
      if (has_pairs(options_)) {
        chunk.pairs.emplace_back(reader.text_pair());
        if (of_documents(options_)) {
          chunk.positions.push_back(reader.position());
        }
      }
      chunk.places.push_back(
          {rows.labels[row], rows.sides[row] == SelectedRows::Side::train ? &train_ : &eval_});
      chunk.bytes += reader.text().size() + reader.text_pair().size();
      if (chunk.places.size() == kChunkRows || chunk.bytes >= kChunkBytes) {
        take(chunk, sink);
        report_progress_(before + reader.bytes_read(), total_);
        throw_if_interrupted();
      }
    }
    take(chunk, sink);
    report_progress_(before + reader.bytes_read(), total_);
  }

  void take(Chunk& chunk, const Sink& sink) {
    const auto encodings = encode_parallel(chunk.places.size(), options_.threads,
                                           [&](size_t i) { return encode(chunk, i); });
    std::vector<int32_t> ids;
    for (size_t i = 0; i < encodings.size(); ++i) {
      const auto& row = encodings[i].ids;
      const Place& place = chunk.places[i];
      const bool set = type() == ProblemType::multi_label;
      std::vector<int32_t> after = numbers_after(chunk, i, encodings[i]);
      auto label =
          set ? static_cast<int32_t>(selection_.label_sets[place.label].size()) : place.label;
      if (of_documents(options_)) {
        label = after.empty() ? 0 : after[0];
        after.clear();
        require_completion(chunk, i, row.size(), label);
      }
      if (place.side == &train_) {
        checksum_.add({reinterpret_cast<const char*>(row.data()), row.size() * sizeof(row[0])});
        checksum_.add(
            {reinterpret_cast<const char*>(after.data()), after.size() * sizeof(after[0])});
        checksum_.add("," + std::to_string(label) + ";");
      }
      place.side->push_back({.begin = ids_ + static_cast<int64_t>(ids.size()),
                             .tokens = static_cast<int32_t>(row.size()),
                             .label = label});
      ids.insert(ids.end(), row.begin(), row.end());
      ids.insert(ids.end(), after.begin(), after.end());
      tokens_ += std::ssize(row);
      truncated_ += encodings[i].truncated;
    }
    sink(ids);
    ids_ += static_cast<int64_t>(ids.size());
    chunk = {};
  }

  void require_completion(const Chunk& chunk, size_t i, size_t tokens, int32_t prompt) const {
    if (static_cast<size_t>(prompt) >= tokens) {
      throw InputError(
          "data::tokenize_text_classification",
          chunk.positions[i] + ": the prompt has tokens=" + std::to_string(prompt) +
              " or more, which leaves none for the completion",
          "a prompt shorter than the row",
          "raise --block-size=" + std::to_string(options_.max_length) + ", or shorten the prompt");
    }
  }

  // A document with its end. The second text of a pair is tokenized with the first, so tokens may join
  // them; the prompt ends where its own tokens differ from those.
  Encoding encode_document(const Chunk& chunk, size_t i) const {
    const bool pair = !chunk.pairs.empty();
    Encoding encoding = tokenizer_.encode(pair ? chunk.texts[i] + chunk.pairs[i] : chunk.texts[i]);
    if (encoding.ids.empty() || encoding.ids.back() != eos_id_) {
      encoding.ids.push_back(eos_id_);
    }
    encoding.token_type_ids.clear();
    if (pair) {
      const auto prompt = tokenizer_.encode(chunk.texts[i]).ids;
      const auto differ = std::ranges::mismatch(encoding.ids, prompt).in1;
      encoding.token_type_ids.assign(static_cast<size_t>(differ - encoding.ids.begin()), 0);
      if (options_.max_length > 0 && std::ssize(encoding.ids) > options_.max_length) {
        encoding.truncated = true;
        encoding.ids.resize(static_cast<size_t>(options_.max_length));
      }
      encoding.token_type_ids.resize(encoding.ids.size(), 1);
    }
    return encoding;
  }

  ProblemType type() const { return options_.texts.table.problem_type; }

  Encoding encode(const Chunk& chunk, size_t i) const {
    if (of_documents(options_)) {
      return encode_document(chunk, i);
    }
    EncodeOptions options{.max_length = options_.max_length};
    options.return_word_ids =
        type() == ProblemType::word_labels || type() == ProblemType::unlabelled;
    return !chunk.words.empty()   ? tokenizer_.encode_words(chunk.words[i].words, options)
           : !chunk.pairs.empty() ? tokenizer_.encode(chunk.texts[i], chunk.pairs[i], options)
                                  : tokenizer_.encode(chunk.texts[i], options);
  }

  // The numbers that follow a sample's ids (TokenTable).
  std::vector<int32_t> numbers_after(const Chunk& chunk, size_t i, const Encoding& encoding) {
    std::vector<int32_t> numbers;
    if (!chunk.pairs.empty()) {
      const auto& types = encoding.token_type_ids;
      const auto second = std::ranges::find(types, 1);
      if (std::any_of(second, types.end(), [](int64_t of) { return of != 1; })) {
        throw InputError("data::tokenize_text_classification", "the tokenizer's token_type_ids",
                         "0 for the first text, then 1 for the second");
      }
      numbers.push_back(static_cast<int32_t>(second - types.begin()));
    }
    if (type() == ProblemType::multi_label) {
      const auto& classes = selection_.label_sets[chunk.places[i].label];
      numbers.insert(numbers.end(), classes.begin(), classes.end());
    } else if (type() == ProblemType::unlabelled) {
      numbers.insert(numbers.end(), encoding.word_ids.begin(), encoding.word_ids.end());
    } else if (type() == ProblemType::word_labels) {
      int64_t before = -1;
      for (const int64_t word : encoding.word_ids) {
        numbers.push_back(word < 0 || word == before ? kIgnoredLabel
                                                     : number_of(chunk.words[i].labels[word]));
        before = word;
      }
    }
    return numbers;
  }

  int32_t number_of(const std::string& label) {
    const auto [entry, fresh] = numbers_.try_emplace(label, 0);
    if (fresh) {
      entry->second = static_cast<int32_t>(label_numbers({label}, selection_.label_names)[0]);
    }
    return entry->second;
  }

  const TokenizedClassificationOptions& options_;
  std::function<void(int64_t, int64_t)> report_progress_;
  int64_t total_;
  TextSelection selection_;
  Tokenizer tokenizer_;
  int64_t eos_id_;
  std::vector<TokenRow> train_{};
  std::vector<TokenRow> eval_{};
  std::unordered_map<std::string, int32_t> numbers_{}; // of labels; word_labels only
  TextHasher checksum_{};
  int64_t ids_ = 0; // made so far
  int64_t tokens_ = 0;
  int64_t truncated_ = 0;
};

TokenizedClassification tokenized_from(const TokenFile& file,
                                       const TokenizedClassificationOptions& options) {
  const auto& values = file.values;
  TokenizedClassification result{
      .train = file.train,
      .eval = file.eval,
      .tokenizer = options.tokenizer
                       ? *options.tokenizer
                       : WordPieceTokenizer(values.at("vocab").get<std::vector<std::string>>(),
                                            options.learned)};
  values.at("label_names").get_to(result.label_names);
  for (TokenTable* side : {&result.train, &result.eval}) {
    side->problem_type = options.texts.table.problem_type;
    side->num_labels = std::ssize(result.label_names);
    side->pairs = has_pairs(options) && !of_documents(options);
    side->has_labels = side->problem_type != ProblemType::unlabelled;
  }
  values.at("report").get_to(result.report);
  values.at("tokens").get_to(result.tokens);
  values.at("truncated").get_to(result.truncated);
  values.at("train_checksum").get_to(result.train_checksum);
  return result;
}

TokenizedClassification tokenized_in_memory(TokenMaker& maker,
                                            const TokenizedClassificationOptions& options) {
  const auto stored = std::make_shared<StoredTokens>();
  maker.make([&](std::span<const int32_t> ids) {
    stored->ids.insert(stored->ids.end(), ids.begin(), ids.end());
  });
  stored->rows = maker.train();
  stored->rows.insert(stored->rows.end(), maker.eval().begin(), maker.eval().end());
  const std::span<const TokenRow> rows(stored->rows);
  const size_t train = maker.train().size();
  TokenFile made;
  made.train = {.ids = stored, .rows = rows.first(train), .owner = stored};
  made.eval = {.ids = stored, .rows = rows.subspan(train), .owner = stored};
  made.values = maker.values();
  return tokenized_from(made, options);
}

// One call of tokenize_text_classification.
class TokenCache {
 public:
  TokenCache(const TextFiles& train_files, const TextFiles& eval_files,
             const TokenizedClassificationOptions& options)
      : train_files_(train_files), eval_files_(eval_files), options_(options) {}

  TokenizedClassification get() {
    if (options_.cache_dir.empty()) {
      return in_memory({});
    }
    key_ = token_cache_key(train_files_, eval_files_, options_);
    const auto folder = options_.cache_dir / "tokens";
    path_ = folder / (key_ + ".tokens");
    std::string problem;
    if (auto found = open(problem)) {
      return std::move(*found);
    }
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) {
      return in_memory(folder.string() + ": " + error.message());
    }
    TokenLock lock(folder / (key_ + ".lock"));
    const auto outcome = lock.acquire([&](int64_t done, int64_t total) {
      report({.waiting = true, .done = done, .total = total}, nullptr);
    });
    if (outcome == TokenLock::Outcome::none) {
      return in_memory(folder.string() + ": " + lock.problem());
    }
    std::string after;
    if (auto found = open(after)) { // another process has made it since
      return std::move(*found);
    }
    if (outcome == TokenLock::Outcome::done) {
      return in_memory(path_.string() + ": the process that should have written it failed");
    }
    return make(lock, problem);
  }

 private:
  std::optional<TokenizedClassification> open(std::string& problem) {
    const auto file = open_token_file(path_, key_, problem);
    if (file == nullptr) {
      return std::nullopt;
    }
    try {
      auto result = tokenized_from(*file, options_);
      result.cache.source = TokenCacheReport::Source::read;
      result.cache.path = path_;
      return result;
    } catch (const nlohmann::json::exception& error) {
      problem = error.what();
      return std::nullopt;
    }
  }

  TokenizedClassification make(TokenLock& lock, const std::string& problem) {
    TokenMaker maker = new_maker(&lock);
    std::string unable;
    remove_unfinished();
    try {
      TokenFileWriter writer(path_, key_);
      maker.make([&](std::span<const int32_t> ids) { writer.add(ids); });
      writer.finish(maker.train(), maker.eval(), maker.values());
      if (auto made = open(unable)) {
        made->cache.source = TokenCacheReport::Source::made;
        made->cache.rebuilt = problem;
        return std::move(*made);
      }
    } catch (const std::system_error& error) {
      unable = error.what();
    }
    return in_memory(unable, maker);
  }

  // Removes temporary files of killed processes. No other process has the lock now.
  void remove_unfinished() const {
    const std::string start = path_.filename().string() + ".tmp-";
    std::vector<std::filesystem::path> found;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(path_.parent_path(), ignored)) {
      if (entry.path().filename().string().starts_with(start)) {
        found.push_back(entry.path());
      }
    }
    for (const auto& path : found) {
      std::filesystem::remove(path, ignored);
    }
  }

  TokenMaker new_maker(TokenLock* lock) {
    return {train_files_, eval_files_, options_, [this, lock](int64_t done, int64_t total) {
              report({.done = done, .total = total}, lock);
            }};
  }

  TokenizedClassification in_memory(const std::string& unable, TokenMaker& maker) {
    auto result = tokenized_in_memory(maker, options_);
    result.cache.not_kept = unable;
    return result;
  }
  TokenizedClassification in_memory(const std::string& unable) {
    TokenMaker maker = new_maker(nullptr);
    return in_memory(unable, maker);
  }

  // Reports at most 20 times a second, and at the end.
  void report(const TokenizeProgress& progress, TokenLock* lock) {
    const auto now = std::chrono::steady_clock::now();
    if (progress.done < progress.total && !progress.waiting &&
        now - last_report_ < std::chrono::milliseconds(50)) {
      return;
    }
    last_report_ = now;
    if (lock != nullptr) {
      lock->report_progress(progress.done, progress.total);
    }
    if (options_.progress) {
      options_.progress(progress);
    }
  }

  const TextFiles& train_files_;
  const TextFiles& eval_files_;
  const TokenizedClassificationOptions& options_;
  std::string key_{};
  std::filesystem::path path_{};
  std::chrono::steady_clock::time_point last_report_{};
};

} // namespace detail

std::filesystem::path cache_folder(const std::filesystem::path& given) {
  if (!given.empty()) {
    return given;
  }
  if (const auto own = detail::environment_value("HASTEN_CACHE")) {
    return *own;
  }
  const std::filesystem::path xdg = detail::environment_value("XDG_CACHE_HOME").value_or("");
  if (xdg.is_absolute()) { // the XDG specification says to ignore a relative path
    return xdg / "hasten";
  }
  const std::filesystem::path home = detail::environment_value("HOME").value_or("");
  return home.empty() ? home : home / ".cache" / "hasten";
}

TokenizedClassification tokenize_text_classification(
    const TextFiles& train_files, const TextFiles& eval_files,
    const TokenizedClassificationOptions& options) {
  return detail::TokenCache(train_files, eval_files, options).get();
}

} // namespace hasten
