#include "hasten/text/synthetic_reviews.h"

#include <array>
#include <initializer_list>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/core/random.h"

namespace hasten {

namespace detail {

using Phrases = std::span<const std::string_view>;

struct ReviewedProduct {
  std::string_view name;
  std::array<std::string_view, 5> parts;
};

constexpr ReviewedProduct kProducts[] = {
    {"headset", {"sound", "battery", "headband", "microphone", "case"}},
    {"kettle", {"lid", "handle", "switch", "spout", "base"}},
    {"jacket", {"zip", "lining", "hood", "fabric", "collar"}},
    {"backpack", {"strap", "zip", "back padding", "main pocket", "buckle"}},
    {"desk lamp", {"light", "hinge", "switch", "base", "dimmer"}},
    {"pair of running shoes", {"sole", "fit", "heel", "lacing", "grip"}},
    {"office chair", {"seat", "backrest", "armrest", "gas spring", "fabric"}},
    {"tent", {"groundsheet", "pole set", "zip", "ventilation", "bag"}},
    {"blender", {"motor", "jug", "blade", "lid", "control panel"}},
    {"phone", {"screen", "camera", "battery", "speaker", "software"}},
    {"coffee grinder", {"burr", "hopper", "motor", "timer", "finish"}},
    {"suitcase", {"handle", "lock", "shell", "lining", "wheel set"}}};

// Words and sentences with a polarity: [0] is bad, [1] is good.
constexpr std::string_view kAdjectives[2][20] = {
    {"awful",      "flimsy",    "poor",     "disappointing", "useless",  "dreadful", "shoddy",
     "unreliable", "terrible",  "cheap",    "annoying",      "crude",    "weak",     "horrible",
     "clumsy",     "worthless", "careless", "miserable",     "inferior", "faulty"},
    {"excellent",   "sturdy",   "lovely",    "great",     "reliable", "superb",     "solid",
     "brilliant",   "pleasant", "wonderful", "fantastic", "clever",   "impressive", "perfect",
     "outstanding", "flawless", "splendid",  "practical", "elegant",  "delightful"}};
constexpr std::string_view kVerdicts[2][6] = {
    {"I would not buy it again.", "It goes back to the shop tomorrow.",
     "I wish I could recommend it.", "Save your money.", "I cannot see why anybody would keep it.",
     "One week was enough for me."},
    {"I would buy it again.", "It will not go back to the shop.", "I cannot recommend it enough.",
     "Money well spent.", "I cannot see why anybody would return it.",
     "I have since bought a second one."}};

constexpr std::string_view kOpenings[] = {"I bought this {product} three weeks ago.",
                                          "My sister gave me the {product} for my birthday.",
                                          "Ordered on Monday, and it was here on Thursday.",
                                          "This is my second {product} in four years.",
                                          "I compared several shops before I chose this {product}.",
                                          "I have used the {product} every day for a month.",
                                          "We needed a new {product} before the holidays.",
                                          "The colour is the one in the picture.",
                                          "I do not write many reviews."};
constexpr std::string_view kRemarks[] = {"It comes in a plain brown box.",
                                         "There is a blue one as well.",
                                         "The manual has forty pages.",
                                         "My neighbour has the larger model.",
                                         "It weighs about as much as the one before.",
                                         "A second set of screws is in the bag."};

constexpr std::string_view kDegrees[] = {"", "", "really ", "very ", "simply ", "quite "};
constexpr std::string_view kStatements[] = {"I find {part} {word}",
                                            "{part} turned out to be {word}", "{part} is {word}",
                                            "{part} is {word}"};
constexpr std::string_view kNegations[] = {
    "{part} is not {word} at all", "nobody could call {part} {word}",
    "{part} is anything but {word}", "I would never say that {part} is {word}",
    "there is nothing {word} about {part}"};
// {counts} decides the label. Both are clauses in the first three forms, then adjectives.
constexpr size_t kClauseContrasts = 3;
constexpr std::string_view kContrasts[] = {
    "although {yields}, {counts}",
    "{yields}, but {counts}",
    "{counts}, even though {yields}",
    "my old one was {yields}, this one is {counts}",
    "other reviews call it {yields}, I call it {counts}",
    "I was told to expect something {yields}, and what I got is {counts}",
    "for all the {yields} packing it is {a counts} {product}, and {clause}"};

// Replaces the first occurrence of each name.
std::string filled(std::string_view form,
                   std::initializer_list<std::pair<std::string_view, std::string_view>> values) {
  std::string text(form);
  for (const auto& [name, value] : values) {
    if (const size_t at = text.find(name); at != std::string::npos) {
      text.replace(at, name.size(), value);
    }
  }
  return text;
}

// Each draw is a statement of its own, because the compiler chooses the order in which operands
// and arguments are evaluated.
class ReviewWriter {
 public:
  ReviewWriter(uint64_t seed, uint64_t row) : rng_(seed, row) {}

  SyntheticReview write() {
    const int label = static_cast<int>(rng_.below(2));
    product_ = &kProducts[rng_.below(std::size(kProducts))];
    std::string text;
    const auto add = [&](const std::string& sentence) {
      text += (text.empty() ? "" : " ") + sentence;
    };
    if (chance(55)) {
      add(filled(pick(kOpenings), {{"{product}", product_->name}}));
    }
    // Usually one sentence, at most four.
    int64_t sentences = 1;
    while (sentences < 4 && chance(40)) {
      ++sentences;
    }
    for (int64_t i = 0; i < sentences; ++i) {
      add(chance(60) ? contrast(label) : plain(label));
      if (chance(15)) {
        add(std::string(pick(kRemarks)));
      }
    }
    if (chance(20)) {
      add(std::string(pick(kVerdicts[label])));
    }
    return {std::move(text), label == 1 ? "positive" : "negative", std::string(product_->name)};
  }

 private:
  bool chance(uint64_t percent) { return rng_.below(100) < percent; }
  std::string_view pick(Phrases phrases) { return phrases[rng_.below(phrases.size())]; }

  // "the strap is really sturdy", or the same by negating the opposite.
  std::string clause(int polarity) {
    const std::string part = "the " + std::string(pick(product_->parts));
    if (chance(35)) {
      const std::string_view opposite = pick(kAdjectives[1 - polarity]);
      return filled(pick(kNegations), {{"{part}", part}, {"{word}", opposite}});
    }
    std::string word(pick(kDegrees));
    word += pick(kAdjectives[polarity]);
    return filled(pick(kStatements), {{"{part}", part}, {"{word}", word}});
  }

  static std::string sentence(std::string text) {
    if (text[0] >= 'a' && text[0] <= 'z') {
      text[0] = static_cast<char>(text[0] - 'a' + 'A');
    }
    return text + ".";
  }

  std::string plain(int polarity) {
    const std::string first = clause(polarity);
    return sentence(chance(25) ? first + ", and " + clause(polarity) : first);
  }

  // Has both polarities; one of them decides the label.
  std::string contrast(int polarity) {
    const uint64_t form = rng_.below(std::size(kContrasts));
    const auto draw = [&](int of) {
      return form < kClauseContrasts ? clause(of) : std::string(pick(kAdjectives[of]));
    };
    const std::string yields = draw(1 - polarity);
    const std::string counts = draw(polarity);
    const bool last = form + 1 == std::size(kContrasts);
    const std::string more = last ? clause(polarity) : "";
    const bool vowel = std::string_view("aeiou").find(counts[0]) != std::string_view::npos;
    return sentence(filled(kContrasts[form], {{"{yields}", yields},
                                              {"{counts}", counts},
                                              {"{a counts}", (vowel ? "an " : "a ") + counts},
                                              {"{product}", product_->name},
                                              {"{clause}", more}}));
  }

  OrderRng rng_;
  const ReviewedProduct* product_ = nullptr;
};

} // namespace detail

std::vector<SyntheticReview> synthetic_reviews(const SyntheticReviewsOptions& options) {
  if (options.rows < 1) {
    throw InputError("data::synthetic_reviews", "rows=" + std::to_string(options.rows),
                     "at least 1");
  }
  const uint64_t seed = stream_seed("synthetic_reviews", options.seed);
  std::vector<SyntheticReview> reviews;
  reviews.reserve(static_cast<size_t>(options.rows));
  for (int64_t row = 0; row < options.rows; ++row) {
    reviews.push_back(detail::ReviewWriter(seed, static_cast<uint64_t>(row)).write());
  }
  return reviews;
}

std::string synthetic_reviews_table(const SyntheticReviewsOptions& options, char delimiter) {
  const std::string_view between(&delimiter, 1);
  std::string table = delimiter == '\0' ? "" : joined({"text", "label", "product\n"}, between);
  for (const SyntheticReview& review : synthetic_reviews(options)) {
    if (delimiter == '\0') {
      table +=
          nlohmann::ordered_json{
              {"text", review.text}, {"label", review.label}, {"product", review.product}}
              .dump();
    } else {
      table += joined(
          {csv_field(review.text, delimiter), review.label, csv_field(review.product, delimiter)},
          between);
    }
    table += "\n";
  }
  return table;
}

} // namespace hasten
