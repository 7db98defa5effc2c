#include <dlfcn.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <future>

#include "hasten/base/error.h"
#include "hasten/text/tokenizer.h"
#include "hasten/text/utf8.h"
#include "support/error_of.h"
#include "text/tokenizer_texts.h"

namespace hasten {

using testing_support::error_of;
using testing_support::KindFolder;
using testing_support::TemporaryFolder;
using testing_support::TokenizerTexts;
using Ids = std::vector<int64_t>;

void write_json(const std::filesystem::path& path, const nlohmann::json& json) {
  std::ofstream(path, std::ios::binary) << json.dump();
}

nlohmann::json kind_json(const std::string& kind) {
  return nlohmann::json::parse(read_file(testing_support::tokenizer_file(kind + ".json")));
}

// The error of a tokenizer.json of the kind that `change` has changed.
std::string changed_error(const std::string& kind,
                          const std::function<void(nlohmann::json&)>& change) {
  const TemporaryFolder folder;
  auto json = kind_json(kind);
  change(json);
  write_json(folder / "tokenizer.json", json);
  return error_of<InputError>([&] { AutoTokenizer::from_pretrained(folder.path()); });
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(AutoTokenizer, APartThatHastenLacksIsNamed) {
  const auto put = [](const char* part, nlohmann::json value) {
    return [=](nlohmann::json& json) { json[part] = value; };
  };
  EXPECT_HAS(changed_error("bert", put("normalizer", {{"type", "Nmt"}})),
             "normalizer.type=\"Nmt\"");
  EXPECT_HAS(changed_error(
                 "bert", put("pre_tokenizer", {{"type", "Sequence"},
                                               {"pretokenizers", {{{"type", "UnicodeScripts"}}}}})),
             "pre_tokenizer.pretokenizers[0].type=\"UnicodeScripts\"");
  EXPECT_HAS(changed_error("bert", put("post_processor", {{"type", "Other"}})),
             "post_processor.type=\"Other\"");
  EXPECT_HAS(changed_error("bert", put("decoder", {{"type", "CTC"}})), "decoder.type=\"CTC\"");
  EXPECT_HAS(changed_error("gpt2", [](auto& json) { json["model"]["dropout"] = 0.1; }),
             "model: dropout=0.1. Expected 0, or no such key");
  EXPECT_HAS(changed_error("gpt2", [](auto& json) { json["model"]["merges"][3] = "a zzzz"; }),
             "the merge number 3 is \"a zzzz\"");
  EXPECT_HAS(changed_error("llama3",
                           [](auto& json) {
                             json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a";
                           }),
             "the pattern (a is wrong: end pattern");
  EXPECT_HAS(changed_error("xlm_roberta", [](auto& json) { json["model"]["unk_id"] = 99999; }),
             "model.unk_id=99999");
  EXPECT_HAS(changed_error("bert", [](auto& json) { json["added_tokens"][1]["id"] = 7; }),
             "the added token [UNK] has id=7. Expected 1, its id in the vocabulary.");
}

// vocab.json and merges.txt of a golden tokenizer, and what says of which kind they are.
void write_byte_pairs(const std::filesystem::path& folder, const std::string& kind,
                      const std::string& config_file, const nlohmann::json& config) {
  const auto model = kind_json(kind)["model"];
  write_json(folder / "vocab.json", model["vocab"]);
  std::ofstream merges(folder / "merges.txt", std::ios::binary);
  merges << "#version: 0.2\n";
  for (const auto& merge : model["merges"]) {
    merges << merge[0].get<std::string>() << " " << merge[1].get<std::string>() << "\n";
  }
  write_json(folder / config_file, config);
}

TEST(AutoTokenizer, OldFilesOfGpt2AndRobertaGiveTheIdsOfTokenizerJson) {
  TokenizerTexts texts;
  for (const auto& [kind, file, config] :
       {std::tuple{"gpt2", "config.json", nlohmann::json{{"model_type", "gpt2"}}},
        {"roberta", "config.json", {{"model_type", "roberta"}}},
        {"roberta",
         "tokenizer_config.json",
         {{"tokenizer_class", "RobertaTokenizer"}, {"model_max_length", 512}}}}) {
    const TemporaryFolder folder;
    write_byte_pairs(folder.path(), kind, file, config);
    const auto old = AutoTokenizer::from_pretrained(folder.path());
    const KindFolder now_folder(kind);
    const auto now = AutoTokenizer::from_pretrained(now_folder.path());
    for (int number = 0; number < 300; ++number) {
      const std::string text = replace_invalid_utf8(texts[number]);
      const EncodeOptions options{.return_offsets_mapping = true};
      const auto expected = now.encode(text, text, options);
      EXPECT_EQ(old.encode(text, text, options).ids, expected.ids) << kind << ": " << text;
      EXPECT_EQ(old.encode(text, text, options).offset_mapping, expected.offset_mapping) << text;
    }
    EXPECT_EQ(old.pad_id(), std::string(kind) == "roberta" ? 1 : -1);
    EXPECT_EQ(old.special_id("eos_token"), std::string(kind) == "roberta" ? 2 : 0);
  }
  const TemporaryFolder folder;
  write_byte_pairs(folder.path(), "gpt2", "config.json", {{"model_type", "qwen2"}});
  EXPECT_HAS(error_of<InputError>([&] { AutoTokenizer::from_pretrained(folder.path()); }),
             "vocab.json and merges.txt of qwen2. Expected tokenizer.json");
}

TEST(AutoTokenizer, SavingKeepsIdsSpecialTokensAndHash) {
  for (const auto& kind : testing_support::tokenizer_kinds()) {
    const KindFolder folder(kind);
    write_json(folder / "tokenizer_config.json",
               {{"model_max_length", 99}, {"padding_side", "left"}});
    write_json(folder / "special_tokens_map.json",
               {{"eos_token", {{"content", "</s>"}, {"lstrip", false}}}});
    const auto first = AutoTokenizer::from_pretrained(folder.path());
    const TemporaryFolder copy;
    first.save_pretrained(copy.path());
    const auto second = AutoTokenizer::from_pretrained(copy.path());
    EXPECT_EQ(second.hash(), first.hash());
    EXPECT_EQ(second.model_max_length(), 99);
    EXPECT_EQ(second.padding().padding_side, TokenSide::left);
    EXPECT_EQ(second.special_id("eos_token"), first.special_id("eos_token"));
    const std::string text = "Hello <mask> world, \xE4\xBD\xA0\xE5\xA5\xBD 123 <s>";
    EXPECT_EQ(second.encode(text).ids, first.encode(text).ids);
    EXPECT_EQ(std::filesystem::exists(copy / "vocab.txt"), first.model_type() == "WordPiece");
  }
}

TEST(AutoTokenizer, EverythingThatDeterminesIdsChangesTheHash) {
  const KindFolder folder("bert");
  const auto hash = [&] { return AutoTokenizer::from_pretrained(folder.path()).hash(); };
  const std::string first = hash();
  EXPECT_EQ(hash(), first);
  write_json(folder / "tokenizer_config.json", {{"do_lower_case", false}});
  const std::string second = hash();
  EXPECT_NE(second, first);
  auto json = kind_json("bert");
  json["added_tokens"][4]["lstrip"] = true;
  write_json(folder / "tokenizer.json", json);
  EXPECT_NE(hash(), second);
}

TEST(AutoTokenizer, TruncationThatCannotReachTheLengthIsAnError) {
  const KindFolder folder("bert");
  const auto tokenizer = AutoTokenizer::from_pretrained(folder.path());
  EXPECT_HAS(error_of<InputError>([&] {
               tokenizer.encode("good", "movie movie movie movie",
                                {.max_length = 5, .truncation = TruncationStrategy::only_first});
             }),
             "truncation=only_first cannot remove tokens=");
  EXPECT_HAS(error_of<InputError>([&] {
               tokenizer.encode("good",
                                {.max_length = 5, .truncation = TruncationStrategy::only_second});
             }),
             "only_second without a second text");
  const EncodeOptions never{.max_length = 3, .truncation = TruncationStrategy::do_not_truncate};
  EXPECT_EQ(tokenizer.encode("the movie was good", never).ids,
            tokenizer.encode("the movie was good").ids);
  EXPECT_FALSE(tokenizer.encode("the movie was good", never).truncated);
  EXPECT_TRUE(tokenizer.encode("the movie was good", {.max_length = 3}).truncated);
}

TEST(AutoTokenizer, PaddingFillsTheSideThatIsSaid) {
  const KindFolder folder("bert");
  const auto tokenizer = AutoTokenizer::from_pretrained(folder.path());
  const EncodeOptions offsets{.return_offsets_mapping = true};
  std::vector<Encoding> batch{tokenizer.encode("the", offsets),
                              tokenizer.encode("the movie", "good", offsets)};
  const auto shorter = batch[0];
  Tokenizer::pad(batch, {.pad_id = 9, .pad_to_multiple_of = 8, .padding_side = TokenSide::left});
  ASSERT_EQ(batch[0].ids.size() % 8, 0u);
  const size_t missing = batch[0].ids.size() - shorter.ids.size();
  EXPECT_EQ(Ids(batch[0].ids.begin(), batch[0].ids.begin() + missing), Ids(missing, 9));
  EXPECT_EQ(Ids(batch[0].ids.begin() + missing, batch[0].ids.end()), shorter.ids);
  EXPECT_EQ(std::count(batch[0].attention_mask.begin(), batch[0].attention_mask.end(), 1),
            std::ssize(shorter.ids));
  EXPECT_EQ(batch[0].attention_mask[missing - 1], 0);
  EXPECT_EQ(batch[0].special_tokens_mask[0], 1);
  EXPECT_EQ(batch[0].offset_mapping.size(), batch[0].ids.size());
  EXPECT_EQ(batch[1].ids.size(), batch[0].ids.size());
  EXPECT_THROW(Tokenizer::pad(batch, {.pad_id = 0, .pad_to_length = 3}), InputError);
  EXPECT_THROW(Tokenizer::pad(batch, {.pad_id = -1}), InputError);
}

TEST(AutoTokenizer, ThreadsGiveTheSameIds) {
  for (const std::string kind : {"llama3", "xlm_roberta", "bert"}) {
    const KindFolder folder(kind);
    const auto tokenizer = AutoTokenizer::from_pretrained(folder.path());
    const auto all = [&tokenizer] {
      TokenizerTexts texts;
      std::vector<Ids> ids;
      for (int number = 0; number < 400; ++number) {
        ids.push_back(tokenizer.encode(replace_invalid_utf8(texts[number])).ids);
      }
      return ids;
    };
    std::vector<std::future<std::vector<Ids>>> others;
    for (int thread = 0; thread < 3; ++thread) {
      others.push_back(std::async(std::launch::async, all));
    }
    const auto expected = all();
    for (auto& other : others) {
      EXPECT_EQ(other.get(), expected) << kind;
    }
  }
}

TEST(AutoTokenizer, LongWordsTakeTimeAsTheirLength) {
  const KindFolder folder("llama2"); // one word for the whole text
  const auto tokenizer = AutoTokenizer::from_pretrained(folder.path());
  std::string text;
  for (int i = 0; i < 100'000; ++i) {
    text += "the movie ";
  }
  const auto encoding = tokenizer.encode(text);
  EXPECT_GT(encoding.ids.size(), 200'000u);
  EXPECT_EQ(tokenizer.decode(encoding.ids, {.skip_special_tokens = true}), text);
}

TEST(Utf8, InvalidBytesAreReplacedAsPythonDoesIt) {
  for (const auto& [text, expected] :
       {std::pair{"a\xC3", "a\xEF\xBF\xBD"},
        {"\xE2\x82 x", "\xEF\xBF\xBD x"},
        {"\xE0\x80\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\xF0\x9F\x98y", "\xEF\xBF\xBDy"},
        {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\xC3\xA9", "\xC3\xA9"},
        {"\xF4\x90\x80\x80z", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBDz"}}) {
    EXPECT_EQ(replace_invalid_utf8(text), expected);
  }
}

TEST(AutoTokenizer, AProgramKeepsTheRegcompOfLibc) {
  // Oniguruma has one, too, for another regex_t. A sanitizer's calls that of libc.
  Dl_info found{};
  ASSERT_NE(::dladdr(::dlsym(RTLD_DEFAULT, "regcomp"), &found), 0);
  EXPECT_EQ(std::string(found.dli_fname).find("libonig"), std::string::npos) << found.dli_fname;
}

} // namespace hasten
