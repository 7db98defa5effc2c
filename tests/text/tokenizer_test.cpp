#include "hasten/text/tokenizer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::TemporaryFolder;
using Pieces = std::vector<std::string>;

const Pieces kSmallVocab{"[PAD]",  "[UNK]", "[CLS]",       "[SEP]", "[MASK]", "un",   "##aff",
                         "##able", "the",   "caf\xC3\xA9", "cafe",  "Good",   "good", "!"};

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string vocab_text(const Pieces& pieces, const char* line_end = "\n") {
  std::string text;
  for (const auto& piece : pieces) {
    text += piece + line_end;
  }
  return text;
}

std::string load_error(const std::filesystem::path& folder) {
  try {
    AutoTokenizer::from_pretrained(folder);
    return "(no error)";
  } catch (const InputError& error) {
    return error.what();
  }
}

#define EXPECT_PART(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Tokenizer, TakesTheLongestPieceAndUnkForAWordThatDoesNotFit) {
  const WordPieceTokenizer tokenizer(kSmallVocab, {});
  EXPECT_EQ(tokenizer.tokenize("Unaffable unaffx THE! Caf\xC3\xA9"),
            (Pieces{"un", "##aff", "##able", "[UNK]", "the", "!", "cafe"}));
  EXPECT_EQ(tokenizer.encode("the").ids, (std::vector<int64_t>{2, 8, 3}));
}

TEST(Tokenizer, DecodeJoinsPiecesAndLeavesSpecialTokensOut) {
  const WordPieceTokenizer tokenizer(kSmallVocab, {});
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("The unaffable, unaffx good!").ids,
                             {.skip_special_tokens = true}),
            "the unaffable good!");
  EXPECT_EQ(tokenizer.decode({2, 8, 3}), "[CLS] the [SEP]");
  EXPECT_EQ(tokenizer.decode({}), "");
  EXPECT_THROW(tokenizer.decode({9999}), InputError);
}

TEST(Tokenizer, OfEqualPiecesTheLaterCounts) {
  Pieces vocab = kSmallVocab;
  vocab.push_back("the");
  const WordPieceTokenizer tokenizer(vocab, {});
  EXPECT_EQ(tokenizer.encode("the").ids[1], 14);
  EXPECT_EQ(tokenizer.id("the"), 14);
}

TEST(Tokenizer, InvalidUtf8AndLengthsAreNamed) {
  const WordPieceTokenizer tokenizer(kSmallVocab, {});
  try {
    tokenizer.encode("the \xC3");
    FAIL();
  } catch (const InputError& error) {
    EXPECT_PART(std::string(error.what()), "byte 0xC3 at position=4");
  }
  EXPECT_THROW(tokenizer.encode("the", {.max_length = 1}), InputError);
  EXPECT_THROW(tokenizer.encode("the", {.max_length = -1}), InputError);
  EXPECT_THROW(tokenizer.token(14), InputError);
  EXPECT_EQ(tokenizer.id("nothing"), -1);
}

TEST(Tokenizer, SaveAndLoadGiveTheSameTokenizer) {
  Pieces vocab = kSmallVocab;
  vocab[0] = "<pad>";
  const WordPieceTokenizer saved(vocab,
                                 {.do_lower_case = false,
                                  .strip_accents = true,
                                  .tokenize_chinese_chars = false,
                                  .model_max_length = 77,
                                  .pad_token = "<pad>"},
                                 {{.content = "<user>", .id = 14, .special = false}});
  const std::string text = "Good good the<user> Caf\xC3\xA9 [MASK]!";
  const std::vector<int64_t> ids{2, 11, 12, 8, 14, 1, 4, 13, 3};
  EXPECT_EQ(saved.encode(text).ids, ids);
  for (const bool json_only : {false, true}) {
    const TemporaryFolder folder;
    saved.save_pretrained(folder.path());
    if (json_only) {
      std::filesystem::remove(folder / "vocab.txt");
    }
    const auto loaded = AutoTokenizer::from_pretrained(folder.path());
    EXPECT_EQ(loaded.encode(text).ids, ids);
    EXPECT_EQ(loaded.vocab(), vocab);
    EXPECT_EQ(loaded.model_max_length(), 77);
    EXPECT_EQ(loaded.pad_id(), 0);
    EXPECT_EQ(loaded.special_id("mask_token"), 4);
    EXPECT_EQ(loaded.hash(), saved.hash());
  }
}

TEST(Tokenizer, OptionsComeFromTheConfigThenFromTheNormalizer) {
  const TemporaryFolder folder;
  const auto pieces = [&](const std::string& text) {
    return AutoTokenizer::from_pretrained(folder.path()).tokenize(text);
  };
  write_text(folder / "vocab.txt", vocab_text(kSmallVocab, "\r\n"));
  EXPECT_EQ(pieces("GOOD Good"), (Pieces{"good", "good"}));
  write_text(folder / "tokenizer.json", R"({"normalizer": {"lowercase": false}})");
  EXPECT_EQ(pieces("GOOD Good"), (Pieces{"[UNK]", "Good"}));
  const std::string config = R"({"do_lower_case": true, "strip_accents": false,
          "model_max_length": 1000000000000000019884624838656,
          "cls_token": {"__type": "AddedToken", "content": "[CLS]", "lstrip": false}})";
  write_text(folder / "tokenizer_config.json", config);
  const auto tokenizer = AutoTokenizer::from_pretrained(folder.path());
  EXPECT_EQ(tokenizer.model_max_length(), 0);
  EXPECT_EQ(tokenizer.tokenize("Caf\xC3\x89 GOOD"), (Pieces{"caf\xC3\xA9", "good"}));
  // The same for a tokenizer.json with everything.
  WordPieceTokenizer(kSmallVocab, {.do_lower_case = false}).save_pretrained(folder.path());
  EXPECT_EQ(pieces("GOOD Good"), (Pieces{"[UNK]", "Good"}));
  // The options are those of a class. Without one, transformers takes tokenizer.json as it is.
  write_text(folder / "tokenizer_config.json", config);
  EXPECT_EQ(pieces("GOOD Good"), (Pieces{"[UNK]", "Good"}));
  write_text(folder / "tokenizer_config.json",
             R"({"tokenizer_class": "BertTokenizerFast", )" + config.substr(1));
  EXPECT_EQ(pieces("Caf\xC3\x89 GOOD"), (Pieces{"caf\xC3\xA9", "good"}));
}

TEST(Tokenizer, AFolderThatCannotBeUsedIsNamedWithItsFile) {
  const TemporaryFolder folder;
  EXPECT_PART(load_error(folder.path()), "vocab.txt or tokenizer.json");
  Pieces vocab = kSmallVocab;
  vocab[1] = "unknown";
  write_text(folder / "vocab.txt", vocab_text(vocab));
  EXPECT_PART(load_error(folder.path()), "vocab.txt: the vocabulary");
  EXPECT_PART(load_error(folder.path()), "lacks [UNK]");
  write_text(folder / "tokenizer_config.json", "{\"do_lower_case\": tru");
  EXPECT_PART(load_error(folder.path()), "tokenizer_config.json: not JSON near byte=");
  std::filesystem::remove(folder / "vocab.txt");
  std::filesystem::remove(folder / "tokenizer_config.json");
  write_text(folder / "tokenizer.json", R"({"model": {"type": "WordLevel", "vocab": {}}})");
  EXPECT_PART(load_error(folder.path()),
              "model.type=\"WordLevel\". Expected WordPiece, BPE or Unigram.");
  write_text(folder / "tokenizer.json",
             R"({"model": {"type": "WordPiece", "vocab": {"a": 0, "b": 99999999}}})");
  EXPECT_PART(load_error(folder.path()), "has id=99999999");
  write_text(folder / "vocab.txt", "[PAD]\nbad \xFF\n");
  write_text(folder / "tokenizer.json", "{}");
  EXPECT_PART(load_error(folder.path()), "byte 0xFF at offset 10");
}

// Other files of a folder that hasten has written list the special tokens with their ids.
TEST(Tokenizer, AVocabularyThatWasCutIsRefusedByName) {
  const TemporaryFolder folder;
  WordPieceTokenizer(kSmallVocab, {}).save_pretrained(folder.path());
  EXPECT_EQ(AutoTokenizer::from_pretrained(folder.path()).vocab().size(), kSmallVocab.size());
  const Pieces without_unk(kSmallVocab.begin() + 2, kSmallVocab.end());
  const Pieces first(kSmallVocab.begin(), kSmallVocab.begin() + 1);
  for (const Pieces& vocab : {Pieces{}, without_unk, first}) {
    write_text(folder / "vocab.txt", vocab_text(vocab));
    for (const bool with_json : {true, false}) {
      if (!with_json) {
        std::filesystem::remove(folder / "tokenizer.json");
      }
      EXPECT_PART(load_error(folder.path()), "vocab.txt: the vocabulary of");
      EXPECT_PART(load_error(folder.path()), with_json ? "where tokenizer.json has it" : "[UNK]");
    }
    WordPieceTokenizer(kSmallVocab, {}).save_pretrained(folder.path());
  }
}

TEST(Tokenizer, WhatFilesAreIsSaidWithTheirNames) {
  const TemporaryFolder folder;
  write_text(folder / "tokenizer.model", "");
  EXPECT_PART(load_error(folder.path()), "tokenizer.model: a SentencePiece model");
  write_text(folder / "tokenizer.json",
             R"({"model": {"type": "WordPiece", "vocab": {"a": 1e999}}})");
  EXPECT_PART(load_error(folder.path()), "tokenizer.json: not JSON near byte");
  EXPECT_PART(load_error(folder.path()), "1e999");
  write_text(folder / "tokenizer.json",
             "{\"model\": " + std::string(100'000, '[') + std::string(100'000, ']') + "}");
  EXPECT_PART(load_error(folder.path()), "tokenizer.json: it is nested more");
}

TEST(Tokenizer, AddedTokensTakeTheWhiteSpaceThatTheyStrip) {
  const TemporaryFolder folder;
  write_text(folder / "vocab.txt", vocab_text(kSmallVocab));
  write_text(folder / "tokenizer_config.json",
             R"({"added_tokens_decoder": {"4": {"content": "[MASK]", "lstrip": true}}})");
  const auto tokenizer = AutoTokenizer::from_pretrained(folder.path());
  const auto encoding = tokenizer.encode(
      "the \n[MASK] !", {.add_special_tokens = false, .return_offsets_mapping = true});
  EXPECT_EQ(encoding.ids, (std::vector<int64_t>{8, 4, 13}));
  EXPECT_EQ(encoding.offset_mapping[1], (std::pair<int64_t, int64_t>(3, 11)));
}

Pieces learned_vocab(const Pieces& texts, const WordPieceVocabOptions& options = {}) {
  WordPieceLearner learner({});
  for (const auto& text : texts) {
    learner.add(text);
  }
  return learner.learn(options);
}

TEST(WordPieceVocab, JoinsTheMostFrequentPairsFirst) {
  const auto vocab =
      learned_vocab({"low low low low low lower lower newest newest newest newest newest "
                     "newest widest widest widest"},
                    {.vocab_size = 5 + 2 * 10 + 4});
  // 10 characters: d e i l n o r s t w. The most frequent pairs: ##e ##s (9),
  // then ##es ##t (9), then l ##o (7), lo ##w (7).
  EXPECT_EQ(Pieces(vocab.begin(), vocab.begin() + 6),
            (Pieces{"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "d"}));
  EXPECT_EQ(Pieces(vocab.end() - 4, vocab.end()), (Pieces{"##es", "##est", "lo", "low"}));
}

TEST(WordPieceVocab, DoesNotDependOnTheOrderOfTheTexts) {
  const Pieces texts{"the movie was good", "the film was bad", "aaaa aaa abab", "Good good"};
  const Pieces turned(texts.rbegin(), texts.rend());
  const auto vocab = learned_vocab(texts, {.vocab_size = 60});
  EXPECT_EQ(learned_vocab(turned, {.vocab_size = 60}), vocab);
  const WordPieceTokenizer tokenizer(vocab, {});
  EXPECT_EQ(tokenizer.tokenize("the good"), (Pieces{"the", "good"}));
  for (const auto& piece : tokenizer.tokenize("the movie was good bad film")) {
    EXPECT_NE(piece, "[UNK]");
  }
}

TEST(WordPieceVocab, RareCharactersAndTooSmallSizesAreHandled) {
  const Pieces texts{"aaa aab \xE4\xB8\xAD b"};
  const auto vocab = learned_vocab(texts, {.vocab_size = 40, .limit_alphabet = 2});
  EXPECT_EQ(std::count(vocab.begin(), vocab.end(), "\xE4\xB8\xAD"), 0);
  EXPECT_THROW(learned_vocab(texts, {.vocab_size = 10}), InputError);
  EXPECT_THROW(learned_vocab({" "}), InputError);
  EXPECT_THROW(learned_vocab({"\xFF"}), InputError);
}

TEST(Tokenizer, EncodesSeveralMegabytesASecond) {
  std::string text;
  while (text.size() < 1'000'000) {
    text += "The unaffable movie wasn't good, caf\xC3\xA9! xyzzy ";
  }
  const WordPieceTokenizer tokenizer(kSmallVocab, {});
  double best = 1e9;
  for (int round = 0; round < 3; ++round) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_GT(tokenizer.encode(text).ids.size(), 100'000u);
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  const double rate = static_cast<double>(text.size()) / 1e6 / best;
  RecordProperty("megabytes_per_second", std::to_string(rate));
  EXPECT_GT(rate, 1.0);
}

} // namespace hasten
