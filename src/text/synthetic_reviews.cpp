#include "hasten/text/synthetic_reviews.h"

#include <nlohmann/json.hpp>
#include <string_view>

#include "hasten/base/error.h"
#include "hasten/core/random.h"
#include "hasten/text/csv.h"

namespace hasten {

namespace detail {

using Phrases = std::vector<std::string_view>;

struct ReviewedProduct {
  std::string_view name;
  Phrases parts;
};

const std::vector<ReviewedProduct>& reviewed_products() {
  static const std::vector<ReviewedProduct> products{
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
  return products;
}

// Words about a feature; polarity 0 is bad, 1 is good.
const Phrases& adjectives(int polarity) {
  static const Phrases bad{"awful",     "flimsy",   "poor",       "disappointing", "useless",
                           "dreadful",  "shoddy",   "unreliable", "terrible",      "cheap",
                           "annoying",  "crude",    "weak",       "horrible",      "clumsy",
                           "worthless", "careless", "miserable",  "inferior",      "faulty"};
  static const Phrases good{"excellent", "sturdy",   "lovely",     "great",    "reliable",
                            "superb",    "solid",    "brilliant",  "pleasant", "wonderful",
                            "fantastic", "clever",   "impressive", "perfect",  "outstanding",
                            "flawless",  "splendid", "practical",  "elegant",  "delightful"};
  return polarity == 1 ? good : bad;
}

const Phrases& verdicts(int polarity) {
  static const Phrases bad{"I would not buy it again.",
                           "It goes back to the shop tomorrow.",
                           "I wish I could recommend it.",
                           "Save your money.",
                           "I cannot see why anybody would keep it.",
                           "One week was enough for me."};
  static const Phrases good{"I would buy it again.",
                            "It will not go back to the shop.",
                            "I cannot recommend it enough.",
                            "Money well spent.",
                            "I cannot see why anybody would return it.",
                            "I have since bought a second one."};
  return polarity == 1 ? good : bad;
}

// Neutral sentences.
const Phrases& openings() {
  static const Phrases phrases{"I bought this {product} three weeks ago.",
                               "My sister gave me the {product} for my birthday.",
                               "Ordered on Monday, and it was here on Thursday.",
                               "This is my second {product} in four years.",
                               "I compared several shops before I chose this {product}.",
                               "I have used the {product} every day for a month.",
                               "We needed a new {product} before the holidays.",
                               "The colour is the one in the picture.",
                               "I do not write many reviews."};
  return phrases;
}

const Phrases& asides() {
  static const Phrases phrases{"It comes in a plain brown box.",
                               "There is a blue one as well.",
                               "The manual has forty pages.",
                               "My neighbour has the larger model.",
                               "It weighs about as much as the one before.",
                               "A second set of screws is in the bag."};
  return phrases;
}

class ReviewWriter {
 public:
  ReviewWriter(uint64_t seed, uint64_t row) : rng_(seed, row) {}

  SyntheticReview write() {
    const int label = static_cast<int>(rng_.below(2));
    const auto& products = reviewed_products();
    product_ = &products[rng_.below(products.size())];
    std::string text;
    const auto add = [&](const std::string& sentence) {
      text += (text.empty() ? "" : " ") + sentence;
    };
    if (chance(55)) {
      add(filled(pick(openings())));
    }
    // Usually one sentence, at most four.
    int64_t sentences = 1;
    while (sentences < 4 && chance(40)) {
      ++sentences;
    }
    for (int64_t i = 0; i < sentences; ++i) {
      add(chance(60) ? contrast(label) : plain(label));
      if (chance(15)) {
        add(std::string(pick(asides())));
      }
    }
    if (chance(20)) {
      add(std::string(pick(verdicts(label))));
    }
    return {std::move(text), label == 1 ? "positive" : "negative", std::string(product_->name)};
  }

 private:
  bool chance(uint64_t percent) { return rng_.below(100) < percent; }
  std::string_view pick(const Phrases& phrases) { return phrases[rng_.below(phrases.size())]; }
  std::string filled(std::string_view phrase) const {
    std::string text(phrase);
    const size_t at = text.find("{product}");
    return at == std::string::npos ? text : text.replace(at, 9, product_->name);
  }

  std::string adjective(int polarity) { return std::string(pick(adjectives(polarity))); }
  std::string part() { return "the " + std::string(pick(product_->parts)); }

  static std::string with_article(const std::string& word) {
    return (std::string("aeiou").find(word[0]) == std::string::npos ? "a " : "an ") + word;
  }

  // "the strap is really sturdy", or the same by negating the opposite.
  std::string clause(int polarity) {
    const std::string thing = part();
    if (chance(35)) {
      const std::string other = adjective(1 - polarity);
      switch (rng_.below(5)) {
        case 0:
          return thing + " is not " + other + " at all";
        case 1:
          return "nobody could call " + thing + " " + other;
        case 2:
          return thing + " is anything but " + other;
        case 3:
          return "I would never say that " + thing + " is " + other;
        default:
          return "there is nothing " + other + " about " + thing;
      }
    }
    static const Phrases degrees{"", "", "really ", "very ", "simply ", "quite "};
    const std::string degree(pick(degrees));
    const std::string word = adjective(polarity);
    switch (rng_.below(4)) {
      case 0:
        return "I find " + thing + " " + degree + word;
      case 1:
        return thing + " turned out to be " + degree + word;
      default:
        return thing + " is " + degree + word;
    }
  }

  static std::string sentence(std::string text) {
    if (text[0] >= 'a' && text[0] <= 'z') {
      text[0] = static_cast<char>(text[0] - 'a' + 'A');
    }
    return text + (text.back() == '.' ? "" : ".");
  }

  // Each draw is a statement of its own, because the compiler chooses the order in which the
  // operands of + are evaluated.
  std::string plain(int polarity) {
    const std::string first = clause(polarity);
    return sentence(chance(25) ? first + ", and " + clause(polarity) : first);
  }

  // Has both polarities; one of them decides the label.
  std::string contrast(int polarity) {
    const uint64_t form = rng_.below(7);
    if (form < 3) {
      const std::string yields = clause(1 - polarity);
      const std::string counts = clause(polarity);
      return sentence(form == 0   ? "although " + yields + ", " + counts
                      : form == 1 ? yields + ", but " + counts
                                  : counts + ", even though " + yields);
    }
    const std::string before = adjective(1 - polarity);
    const std::string now = adjective(polarity);
    switch (form) {
      case 3:
        return sentence("my old one was " + before + ", this one is " + now);
      case 4:
        return sentence("other reviews call it " + before + ", I call it " + now);
      case 5:
        return sentence("I was told to expect something " + before + ", and what I got is " + now);
      default:
        return sentence("for all the " + before + " packing it is " + with_article(now) + " " +
                        std::string(product_->name) + ", and " + clause(polarity));
    }
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
  const auto reviews = synthetic_reviews(options);
  std::string table;
  if (delimiter != '\0') {
    table = std::string("text") + delimiter + "label" + delimiter + "product\n";
  }
  for (const SyntheticReview& review : reviews) {
    if (delimiter == '\0') {
      table +=
          nlohmann::ordered_json{
              {"text", review.text}, {"label", review.label}, {"product", review.product}}
              .dump();
    } else {
      table += csv_field(review.text, delimiter) + delimiter + review.label + delimiter +
               csv_field(review.product, delimiter);
    }
    table += "\n";
  }
  return table;
}

} // namespace hasten
