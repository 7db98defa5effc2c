// Tokenizer files that are damaged at random places: an InputError, or a tokenizer that works.
#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "hasten/base/error.h"
#include "hasten/text/tokenizer.h"
#include "text/tokenizer_texts.h"

namespace hasten {

using testing_support::TemporaryFolder;

class Damage {
 public:
  explicit Damage(uint32_t seed) : random_(seed) {}

  size_t draw(size_t below) { return below == 0 ? 0 : random_() % below; }

  // Replaces, removes or adds a value somewhere in `json`.
  void change(nlohmann::json& json, int depth = 0) {
    if (json.is_structured() && !json.empty() && (depth == 0 || draw(5) != 0)) {
      auto place = json.begin();
      std::advance(place, static_cast<ptrdiff_t>(draw(json.size())));
      if (draw(8) != 0) {
        return change(*place, depth + 1);
      }
      json.erase(place);
      return;
    }
    json = value();
  }

  // Changes bytes of a text.
  void change(std::string& text) {
    switch (draw(4)) {
      case 0:
        text.resize(draw(text.size()));
        return;
      case 1:
        text.insert(draw(text.size()), std::string(draw(200), "[{\"\\0"[draw(5)]));
        return;
      default:
        for (size_t count = 1 + draw(4); count > 0; --count) {
          text[draw(text.size())] = static_cast<char>(draw(256));
        }
    }
  }

 private:
  nlohmann::json value() {
    switch (draw(12)) {
      case 0:
        return nullptr;
      case 1:
        return draw(2) == 0;
      case 2:
        return -1;
      case 3:
        return int64_t{1} << (20 + draw(43));
      case 4:
        return 1e300;
      case 5:
        return "";
      case 6:
        return std::string(draw(300), 'x');
      case 7:
        return nlohmann::json::array();
      case 8:
        return nlohmann::json::object();
      case 9:
        return {{"type", "Sequence"}, {"normalizers", {nullptr}}};
      case 10:
        return "\xE2\x96\x81";
      default:
        return draw(100);
    }
  }

  std::mt19937 random_;
};

// Whether the folder could be loaded.
bool loads_or_is_refused(const TemporaryFolder& folder) {
  try {
    const auto tokenizer = AutoTokenizer::from_pretrained(folder.path());
    for (const char* text : {"", " Hello  world, \xE4\xBD\xA0\xF0\x9F\x98\x80 it's 123 <s>[MASK]",
                             "e\xCC\x81\xCC\xA3 \n\t \xD8\xB3 xxxxxxxxxxxxxxxxxxxxxxxxx"}) {
      try {
        const auto encoding = tokenizer.encode(text, text, {.return_offsets_mapping = true});
        tokenizer.encode(text, {.max_length = 9, .truncation_side = TokenSide::left});
        tokenizer.decode(encoding.ids);
        tokenizer.padding();
      } catch (const InputError&) { // such as an id that the template has and the vocabulary lacks
      }
    }
    return true;
  } catch (const InputError&) {
    return false;
  }
}

TEST(TokenizerDamage, ChangedValuesAreInputErrorsOrOtherTokenizers) {
  constexpr uint32_t kRounds = 40;
  size_t loaded = 0;
  size_t refused = 0;
  for (const auto& kind : testing_support::tokenizer_kinds()) {
    const auto json =
        nlohmann::json::parse(read_file(testing_support::tokenizer_file(kind + ".json")));
    for (uint32_t seed = 0; seed < kRounds; ++seed) {
      SCOPED_TRACE(kind + " " + std::to_string(seed));
      Damage damage(seed);
      const TemporaryFolder folder;
      nlohmann::json config{{"pad_token", "<pad>"}, {"model_max_length", 9}, {"cls_token", "<s>"}};
      auto changed = json;
      damage.change(changed);
      damage.change(config);
      std::ofstream(folder / "tokenizer.json") << changed.dump();
      std::ofstream(folder / "tokenizer_config.json") << config.dump();
      loads_or_is_refused(folder) ? ++loaded : ++refused;
    }
  }
  EXPECT_GT(loaded, 50u);
  EXPECT_GT(refused, 50u);
}

TEST(TokenizerDamage, ChangedBytesAreInputErrorsOrOtherTokenizers) {
  constexpr uint32_t kRounds = 20;
  size_t refused = 0;
  for (const auto& kind : testing_support::tokenizer_kinds()) {
    const std::string text = read_file(testing_support::tokenizer_file(kind + ".json"));
    for (uint32_t seed = 0; seed < kRounds; ++seed) {
      SCOPED_TRACE(kind + " " + std::to_string(seed));
      Damage damage(seed);
      std::string changed = text;
      damage.change(changed);
      const TemporaryFolder folder;
      std::ofstream(folder / "tokenizer.json", std::ios::binary) << changed;
      refused += !loads_or_is_refused(folder);
    }
  }
  EXPECT_GT(refused, 50u);
}

TEST(TokenizerDamage, DamagedOldFilesAreInputErrors) {
  const auto model =
      nlohmann::json::parse(read_file(testing_support::tokenizer_file("gpt2.json")))["model"];
  for (uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    Damage damage(seed);
    const TemporaryFolder folder;
    auto vocab = model["vocab"];
    std::string merges = "#version: 0.2\na b\n";
    nlohmann::json config{{"model_type", seed % 2 == 0 ? "gpt2" : "roberta"}};
    seed % 3 == 0 ? damage.change(vocab) : damage.change(merges);
    damage.change(config);
    std::ofstream(folder / "vocab.json") << vocab.dump();
    std::ofstream(folder / "merges.txt", std::ios::binary) << merges;
    std::ofstream(folder / "config.json") << config.dump();
    loads_or_is_refused(folder);
  }
}

} // namespace hasten
