#include "hasten/text/token_cache.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <stdexcept>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "support/temporary_folder.h"

namespace hasten {

namespace detail {

using Source = TokenCacheReport::Source;

// Reviews in memory, a cache folder, and calls with changed options.
struct CachedReviews {
  testing_support::TemporaryFolder folder{};
  std::string text = make_text(40);
  std::string eval_text{}; // empty: none
  std::filesystem::path name = "train.csv";

  static std::string make_text(int rows) {
    std::string text = "text,label\n";
    for (int row = 0; row < rows; ++row) {
      text += "film number " + std::to_string(row) +
              (row % 2 == 0 ? " was good fun,pos\n" : " was bad work,neg\n");
    }
    return text;
  }

  TokenizedClassificationOptions options() const {
    TokenizedClassificationOptions options;
    options.texts.eval_split = eval_text.empty() ? 0.25 : 0.0;
    options.vocab.vocab_size = 80;
    options.max_length = 8;
    options.cache_dir = folder / "cache";
    return options;
  }
  TokenizedClassification get(const TokenizedClassificationOptions& options) const {
    return tokenize_text_classification(
        TextFile::of_text(name, text),
        eval_text.empty() ? nullptr : TextFile::of_text("eval.csv", eval_text), options);
  }
  TokenizedClassification get() const { return get(options()); }

  std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder / "cache" / "tokens")) {
      found.push_back(entry.path());
    }
    return found;
  }
};

// Everything that later steps use, as one text.
std::string described_tokens(const TokenizedClassification& data) {
  std::string text = data.train_checksum + " " + std::to_string(data.tokens) + " " +
                     std::to_string(data.truncated);
  for (const auto* side : {&data.train, &data.eval}) {
    const TokenizedDataset dataset(*side);
    for (int64_t row = 0; row < dataset.size(); ++row) {
      text += "\n" + std::to_string(side->rows[static_cast<size_t>(row)].label) + ":";
      const at::Tensor ids = dataset.collate({row})["input_ids"];
      for (int64_t i = 0; i < ids.numel(); ++i) {
        text += " " + data.tokenizer.token(ids.flatten()[i].item<int64_t>());
      }
    }
  }
  for (const auto& line : data.report.lines(data.label_names)) {
    text += "\n" + line;
  }
  return text;
}

} // namespace detail

using detail::CachedReviews;
using detail::described_tokens;
using detail::Source;

TEST(TokenCache, ASecondCallReadsWhatTheFirstOneMade) {
  for (const bool with_eval_file : {false, true}) {
    CachedReviews reviews;
    if (with_eval_file) {
      reviews.eval_text = CachedReviews::make_text(44); // 4 texts are not in the training set
    }
    const auto made = reviews.get();
    EXPECT_EQ(made.cache.source, Source::made);
    const auto read = reviews.get();
    EXPECT_EQ(read.cache.source, Source::read);
    EXPECT_EQ(read.eval.rows.size(), with_eval_file ? 4U : 10U);
    EXPECT_EQ(read.report.duplicates, with_eval_file ? 40 : 0);
    auto options = reviews.options();
    options.cache_dir.clear();
    const auto memory = reviews.get(options);
    EXPECT_EQ(memory.cache.source, Source::memory);
    EXPECT_EQ(described_tokens(made), described_tokens(memory));
    EXPECT_EQ(described_tokens(read), described_tokens(memory));
    EXPECT_EQ(read.tokenizer.vocab(), memory.tokenizer.vocab());
    ASSERT_EQ(reviews.files().size(), 1U); // no lock and no temporary file
  }
}

TEST(TokenCache, SeveralFilesGiveTheIdsOfTheJoinedFile) {
  const CachedReviews joined;
  auto options = joined.options();
  const TextFiles parts{
      TextFile::of_text("a.csv", CachedReviews::make_text(3)),
      TextFile::of_text("b.tsv", "label\ttext\npos\t\"a\tb\"\n"),
      TextFile::of_text("none.csv", "text,label\n"),
      TextFile::of_text("c.jsonl", "{\"label\": \"neg\", \"text\": \"dull, dull\"}\n"),
      TextFile::of_text("d.csv", CachedReviews::make_text(30)),
  };
  const std::string text = CachedReviews::make_text(3) + "a\tb,pos\n\"dull, dull\",neg\n" +
                           CachedReviews::make_text(30).substr(std::string("text,label\n").size());
  int64_t done = 0;
  options.progress = [&](const TokenizeProgress& progress) { done = progress.done; };
  for (const int64_t max_rows : {0, 4, 5, 20}) {
    options.texts.max_train_rows = max_rows;
    const auto of_parts = tokenize_text_classification(parts, {}, options);
    EXPECT_TRUE(max_rows > 0 || done == parts.bytes()) << done;
    const auto whole =
        tokenize_text_classification(TextFile::of_text("whole.csv", text), {}, options);
    EXPECT_EQ(described_tokens(of_parts), described_tokens(whole)) << max_rows;
    EXPECT_EQ(of_parts.tokenizer.vocab(), whole.tokenizer.vocab());
    EXPECT_NE(of_parts.cache.path, whole.cache.path);
    EXPECT_EQ(tokenize_text_classification(parts, {}, options).cache.source, Source::read);
  }
  const TextFiles other_order{parts[0], parts[2], parts[1], parts[3], parts[4]};
  EXPECT_EQ(tokenize_text_classification(other_order, {}, options).cache.source, Source::made);
  options.texts.eval_split = 0;
  options.texts.max_train_rows = 0;
  const auto evaluated =
      tokenize_text_classification({parts[0], parts[1]}, {parts[3], parts[4]}, options);
  EXPECT_EQ(evaluated.report.train.rows, 4);
  EXPECT_EQ(evaluated.report.eval.rows, 28); // 3 of 31 are in the training texts
}

TEST(TokenCache, IdsEqualThoseOfTheTexts) {
  const CachedReviews reviews;
  const auto options = reviews.options();
  const auto data = reviews.get(options);
  const auto selection =
      select_text_rows(TextFile::of_text(reviews.name, reviews.text), {}, options.texts);
  const SelectedRows& file = selection.files.at(0);
  WordPieceLearner learner(options.learned);
  size_t next[2] = {0, 0};
  TextRowReader reader(file.files, file.table);
  for (size_t row = 0; reader.next(); ++row) {
    const bool trains = file.sides[row] == SelectedRows::Side::train;
    const TokenTable& side = trains ? data.train : data.eval;
    const TokenRow& place = side.rows[next[trains]++];
    const auto ids = data.tokenizer.encode(reader.text(), {.max_length = 8}).ids;
    std::vector<int32_t> made(static_cast<size_t>(place.tokens));
    side.ids->read(place.begin, made);
    EXPECT_TRUE(std::equal(ids.begin(), ids.end(), made.begin(), made.end()));
    EXPECT_EQ(place.label, file.labels[row]);
    if (trains) {
      learner.add(reader.text());
    }
  }
  EXPECT_EQ(next[true], data.train.rows.size());
  EXPECT_EQ(next[false], data.eval.rows.size());
  EXPECT_EQ(data.tokenizer.vocab(), learner.learn(options.vocab));
}

// Numbers and sets of labels are stored like class numbers.
TEST(TokenCache, NumbersAndSetsOfLabelsAreKeptToo) {
  CachedReviews reviews;
  reviews.text = "text,stars,tags\na good film,4.5,fun|long\na bad film,-1.5,\nso,0,long\n";
  for (const ProblemType problem_type : {ProblemType::regression, ProblemType::multi_label}) {
    const bool regression = problem_type == ProblemType::regression;
    auto options = reviews.options();
    options.texts.eval_split = 0;
    options.texts.table.problem_type = problem_type;
    options.texts.table.label_column = regression ? "stars" : "tags";
    options.texts.table.label_separator = regression ? "" : "|";
    const auto made = reviews.get(options);
    EXPECT_EQ(made.cache.source, Source::made);
    const auto read = reviews.get(options);
    EXPECT_EQ(read.cache.source, Source::read);
    options.cache_dir.clear();
    const auto memory = reviews.get(options);
    EXPECT_EQ(memory.cache.source, Source::memory);
    EXPECT_EQ(read.train_checksum, memory.train_checksum);
    for (const auto* data : {&made, &read, &memory}) {
      const TokenizedDataset rows(data->train);
      const Batch batch = rows.collate({2, 0, 1});
      const at::Tensor expected =
          regression ? at::tensor({0.0f, 4.5f, -1.5f})
                     : at::tensor({0.0f, 1.0f, 1.0f, 1.0f, 0.0f, 0.0f}).view({3, 2});
      EXPECT_EQ(batch["labels"].scalar_type(), at::kFloat);
      EXPECT_TRUE(batch["labels"].equal(expected)) << batch["labels"];
      EXPECT_EQ(batch["attention_mask"].sum().item<int64_t>(), data->tokens);
      EXPECT_EQ(rows.collate({})["labels"].sizes(),
                regression ? at::IntArrayRef({0}) : at::IntArrayRef({0, 2}));
    }
  }
  // num_labels must equal the number of classes.
  auto options = reviews.options();
  options.texts.eval_split = 0;
  options.texts.table.problem_type = ProblemType::multi_label;
  options.texts.table.label_column = "tags";
  options.texts.table.label_separator = "|";
  auto table = reviews.get(options).train;
  table.num_labels = 1;
  EXPECT_THROW(TokenizedDataset(table).collate({0}), InputError);
}

TEST(TokenCache, WhatIdsDependOnNamesTheFileAndNothingElseDoes) {
  CachedReviews reviews;
  reviews.get();
  const auto source = [&](const std::function<void(TokenizedClassificationOptions&)>& change) {
    auto options = reviews.options();
    change(options);
    return reviews.get(options).cache.source;
  };
  EXPECT_EQ(source([](auto& o) { o.threads = 3; }), Source::read);
  EXPECT_EQ(source([](auto& o) { o.max_length = 7; }), Source::made);
  EXPECT_EQ(source([](auto& o) { o.texts.seed = 43; }), Source::made);
  EXPECT_EQ(source([](auto& o) { o.vocab.vocab_size = 79; }), Source::made);
  EXPECT_EQ(source([](auto& o) { o.learned.do_lower_case = false; }), Source::made);
  EXPECT_EQ(source([](auto& o) { o.texts.max_train_rows = 30; }), Source::made);
  EXPECT_EQ(source([](auto& o) { o.texts.label_names = {"pos", "neg"}; }), Source::made);
  const auto tokenizer = reviews.get().tokenizer;
  EXPECT_EQ(source([&](auto& o) { o.tokenizer = tokenizer; }), Source::made);
  EXPECT_EQ(source([&](auto& o) { o.tokenizer = tokenizer; }), Source::read);
  // Without a split its seed has no effect.
  EXPECT_EQ(source([](auto& o) { o.texts.eval_split = 0; }), Source::made);
  EXPECT_EQ(source([](auto& o) {
              o.texts.eval_split = 0;
              o.texts.seed = 43;
            }),
            Source::read);
  reviews.name = "elsewhere/other.csv";
  EXPECT_EQ(reviews.get().cache.source, Source::read);
  reviews.text[reviews.text.size() - 8] = 'x';
  EXPECT_EQ(reviews.get().cache.source, Source::made);
}

TEST(TokenCache, ADamagedOrForeignFileIsMadeAgainAndSaid) {
  CachedReviews reviews;
  const auto first = reviews.get();
  const auto path = first.cache.path;
  const std::string good = read_file(path);
  std::string flipped = good;
  flipped[good.size() / 2] = static_cast<char>(~flipped[good.size() / 2]);
  std::string other_key = good;
  other_key[20] = other_key[20] == 'a' ? 'b' : 'a';
  const std::pair<std::string, const char*> damages[] = {
      {flipped, "checksum"},
      {good.substr(0, good.size() - 1), "bytes"},
      {good.substr(0, 40), "cut off"},
      {"", "empty"},
      {std::string(4096, 'x'), "not a token file"},
      {other_key, "other data"}};
  for (const auto& [bytes, said] : damages) {
    write_file_atomically(path, bytes);
    const auto again = reviews.get();
    EXPECT_EQ(again.cache.source, Source::made) << said;
    EXPECT_NE(again.cache.rebuilt.find(said), std::string::npos)
        << said << ": " << again.cache.rebuilt;
    EXPECT_EQ(described_tokens(again), described_tokens(first));
    EXPECT_EQ(read_file(path), good);
  }
  EXPECT_EQ(reviews.get().cache.rebuilt, "");
}

// A file of many blocks: each sample read has the ids that were made, or reading throws. A file
// that grew is fine.
TEST(TokenCache, AFileThatIsZeroedOrCutUnderARunIsAnErrorThatNamesIt) {
  CachedReviews reviews;
  reviews.text = CachedReviews::make_text(2000);
  const auto data = reviews.get();
  const std::filesystem::path path = data.cache.path;
  const TokenizedDataset dataset(data.train);
  const std::string good = read_file(path);
  ASSERT_GT(good.size(), 20'000u);
  std::vector<at::Tensor> rows;
  for (int64_t row = 0; row < dataset.size(); ++row) {
    rows.push_back(dataset.collate({row})["input_ids"]);
  }
  const auto overwrite = [&](const std::string& bytes) {
    std::ofstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file << bytes;
  };
  const auto count_errors = [&] {
    int64_t errors = 0;
    for (int64_t row = 0; row < dataset.size(); ++row) {
      try {
        EXPECT_TRUE(dataset.collate({row})["input_ids"].equal(rows[row]));
      } catch (const Error& error) {
        ++errors;
        EXPECT_NE(std::string(error.what()).find(path.string() + " changed"), std::string::npos)
            << error.what();
      }
    }
    return errors;
  };
  std::ofstream(path, std::ios::app) << "grown";
  EXPECT_EQ(count_errors(), 0);
  overwrite(std::string(good.size(), '\0'));
  EXPECT_EQ(count_errors(), dataset.size());
  std::string half_zeroed = good;
  std::fill_n(half_zeroed.begin() + 8192, 4096, '\0');
  overwrite(half_zeroed);
  EXPECT_GT(count_errors(), 0);
  EXPECT_LT(count_errors(), dataset.size());
  overwrite(good);
  EXPECT_EQ(count_errors(), 0);
  std::filesystem::resize_file(path, 8192);
  EXPECT_GT(count_errors(), 0);
  EXPECT_LT(count_errors(), dataset.size());
}

TEST(TokenCache, WhatAKilledMakerLeftIsRemoved) {
  CachedReviews reviews;
  const std::filesystem::path made = reviews.get().cache.path;
  std::filesystem::remove(made);
  std::ofstream(made.string() + ".tmp-a1B2c3") << "half";
  const auto other = made.parent_path() / "other.tokens.tmp-a1B2c3";
  std::ofstream(other) << "somebody's";
  EXPECT_EQ(reviews.get().cache.source, Source::made);
  EXPECT_EQ(reviews.files().size(), 2U);
  EXPECT_TRUE(std::filesystem::exists(other));
}

TEST(TokenCache, WhereNothingCanBeKeptIdsAreInMemoryAndTheReasonIsSaid) {
  CachedReviews reviews;
  const auto expected = described_tokens(reviews.get());
  auto options = reviews.options();
  write_file_atomically(reviews.folder / "file", "x");
  options.cache_dir = reviews.folder / "file" / "cache";
  const auto below_a_file = reviews.get(options);
  EXPECT_EQ(below_a_file.cache.source, Source::memory);
  EXPECT_NE(below_a_file.cache.not_kept, "");
  EXPECT_EQ(described_tokens(below_a_file), expected);

  // Files cannot grow, as on a full disk.
  reviews.text += "one more,neg\n";
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small {
    .rlim_cur = 100, .rlim_max = before.rlim_max
  };
  ::setrlimit(RLIMIT_FSIZE, &small);
  const auto full = reviews.get();
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(full.cache.source, Source::memory);
  EXPECT_NE(full.cache.not_kept.find("too large"), std::string::npos) << full.cache.not_kept;
  EXPECT_EQ(reviews.files().size(), 1U); // the file of the first call
  EXPECT_EQ(described_tokens(full), described_tokens(reviews.get()));
}

TEST(TokenCache, OneMakesTheFileWhileAnotherWaitsAndSeesProgress) {
  const CachedReviews reviews;
  std::atomic<int> waited{0};
  std::atomic<bool> informed{false};
  auto maker = reviews.options();
  std::atomic<bool> making{false};
  maker.progress = [&](const TokenizeProgress& progress) {
    making = true;
    EXPECT_FALSE(progress.waiting);
    while (waited < 3) {
      std::this_thread::yield();
    }
  };
  auto waiter = reviews.options();
  waiter.progress = [&](const TokenizeProgress& progress) {
    informed = informed || (progress.waiting && progress.total > 0);
    ++waited;
  };
  std::optional<TokenizedClassification> a, b;
  std::jthread first([&] { a.emplace(reviews.get(maker)); });
  while (!making) {
    std::this_thread::yield();
  }
  b.emplace(reviews.get(waiter));
  first.join();
  EXPECT_EQ(a->cache.source, Source::made);
  EXPECT_EQ(b->cache.source, Source::read);
  EXPECT_TRUE(informed);
  EXPECT_EQ(reviews.files().size(), 1U);
}

TEST(TokenCache, TheOthersGoOnWhereTheMakerFails) {
  const CachedReviews reviews;
  std::atomic<bool> making{false}, waited{false};
  auto maker = reviews.options();
  maker.progress = [&](const TokenizeProgress&) {
    making = true;
    while (!waited) {
      std::this_thread::yield();
    }
    throw std::runtime_error("stopped");
  };
  auto waiter = reviews.options();
  waiter.progress = [&](const TokenizeProgress& progress) { waited = waited || progress.waiting; };
  std::jthread first([&] { EXPECT_THROW(reviews.get(maker), std::runtime_error); });
  while (!making) {
    std::this_thread::yield();
  }
  const auto data = reviews.get(waiter);
  first.join();
  EXPECT_EQ(data.cache.source, Source::memory);
  EXPECT_NE(data.cache.not_kept, "");
  // The lock file of a killed process blocks no other process.
  EXPECT_TRUE(reviews.files().empty());
  const auto made = reviews.get();
  const auto lock = made.cache.path.parent_path() / (made.cache.path.stem().string() + ".lock");
  std::filesystem::remove(made.cache.path);
  std::ofstream(lock) << "";
  EXPECT_EQ(reviews.get().cache.source, Source::made);
  EXPECT_EQ(reviews.files().size(), 1U);
}

TEST(TokenCache, TheFolderIsGivenOrTheEnvironments) {
  const char* names[] = {"HASTEN_CACHE", "XDG_CACHE_HOME", "HOME"};
  std::vector<std::optional<std::string>> before;
  for (const char* name : names) {
    const char* value = std::getenv(name);
    before.push_back(value ? std::optional<std::string>(value) : std::nullopt);
    ::unsetenv(name);
  }
  EXPECT_EQ(cache_folder(), "");
  ::setenv("HOME", "/somebody", 1);
  EXPECT_EQ(cache_folder(), "/somebody/.cache/hasten");
  ::setenv("XDG_CACHE_HOME", "/xdg", 1);
  EXPECT_EQ(cache_folder(), "/xdg/hasten");
  ::setenv("HASTEN_CACHE", "/own", 1);
  EXPECT_EQ(cache_folder(), "/own");
  EXPECT_EQ(cache_folder("given"), "given");
  for (size_t i = 0; i < before.size(); ++i) {
    before[i] ? ::setenv(names[i], before[i]->c_str(), 1) : ::unsetenv(names[i]);
  }
}

} // namespace hasten
