// hasten predict for token-classification and fill-mask.
#include <cmath>
#include <nlohmann/json.hpp>

#include "classifier.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/tasks/pipelines.h"
#include "hasten/text/conll.h"
#include "predictions.h"
#include "run.h"

namespace hasten::detail {

using Json = nlohmann::ordered_json;

/// Six digits: further ones of a float are noise.
double score_of(double probability) { return std::round(1e6 * probability) / 1e6; }

Json entities_json(const std::string& text, const std::vector<EntityGroup>& entities) {
  Json found = Json::array();
  for (const EntityGroup& entity : entities) {
    found.push_back({{"entity_group", entity.entity_group},
                     {"score", score_of(entity.score)},
                     {"word", entity.word},
                     {"start", entity.start},
                     {"end", entity.end}});
  }
  return {{"text", text}, {"entities", found}};
}

Json words_json(const std::vector<std::string>& words, const std::vector<TaggedWord>& tagged) {
  Json tags = Json::array(), scores = Json::array();
  for (const TaggedWord& word : tagged) {
    tags.push_back(word.label.empty() ? Json() : Json(word.label));
    scores.push_back(word.label.empty() ? Json() : Json(score_of(word.score)));
  }
  return {{"tokens", words}, {"ner_tags", tags}, {"scores", scores}};
}

Json masks_json(const std::string& text, const std::vector<std::vector<FilledMask>>& masks) {
  Json all = Json::array();
  for (const auto& answers : masks) {
    Json mask = Json::array();
    for (const FilledMask& answer : answers) {
      mask.push_back({{"score", score_of(answer.score)},
                      {"token", answer.token},
                      {"token_str", answer.token_str},
                      {"sequence", answer.sequence}});
    }
    all.push_back(mask);
  }
  return {{"text", text}, {"masks", all}};
}

/// An answer for people: a line for each entity, word or token.
std::string answer_lines(const Json& answer) {
  std::string text;
  const auto line = [&](const Json& score, const std::string& first, const std::string& second) {
    text += "  " + (score.is_null() ? "      " : format_fixed(score.get<double>(), 4)) + "  " +
            first + (second.empty() ? "" : "  ") + second + "\n";
  };
  if (answer.contains("tokens")) {
    for (size_t i = 0; i < answer["tokens"].size(); ++i) {
      const Json& tag = answer["ner_tags"][i];
      line(answer["scores"][i], tag.is_null() ? "-" : tag.get<std::string>(), answer["tokens"][i]);
    }
    return text + "\n";
  }
  text = answer["text"].get<std::string>() + "\n";
  for (const Json& entity : answer.value("entities", Json::array())) {
    line(entity["score"], entity["entity_group"], entity["word"]);
  }
  for (const Json& mask : answer.value("masks", Json::array())) {
    for (const Json& token : mask) {
      line(token["score"], token["token_str"], token["sequence"]);
    }
  }
  return text;
}

void predict_tokens(const PredictCommand& command, const TextModel& model,
                    const std::vector<std::string>& texts) {
  if (command.output.ends_with(".csv") || command.with_logits) {
    throw InputError("cli::predict",
                     (command.with_logits ? "--with-logits" : "--output=" + command.output) +
                         " with a model for " + model.task->name,
                     "--json, or --output with a name that ends in .jsonl");
  }
  const PipelineOptions options{.batch_size = command.batch_size, .max_length = model.max_length};
  std::vector<Json> answers;
  if (model.task->head == ModelTask::masked_lm) {
    const auto filled = fill_masks(model.model, model.tokenizer, texts, command.top_k, options);
    for (size_t i = 0; i < texts.size(); ++i) {
      answers.push_back(masks_json(texts[i], filled[i]));
    }
  } else if (command.file.empty()) {
    const auto entities = find_entities(model.model, model.tokenizer, texts, options);
    for (size_t i = 0; i < texts.size(); ++i) {
      answers.push_back(entities_json(texts[i], entities[i]));
    }
  } else { // lists of words
    const auto words = mapped(texts, [&](const std::string& list) {
      return read_word_list(list, command.file, "the words");
    });
    const auto tagged = tag_words(model.model, model.tokenizer, words, options);
    for (size_t i = 0; i < words.size(); ++i) {
      answers.push_back(words_json(words[i], tagged[i]));
    }
  }
  std::string text;
  for (const Json& answer : answers) {
    text += command.json || !command.output.empty() ? answer.dump() + "\n" : answer_lines(answer);
  }
  write_answers("cli::predict", command.output, text, std::ssize(answers));
}

} // namespace hasten::detail
