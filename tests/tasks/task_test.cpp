#include "hasten/tasks/task.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "commands.h"
#include "hasten/base/error.h"
#include "hasten/core/random.h"
#include "hasten/models/auto_model.h"
#include "hasten/tasks/pipelines.h"
#include "support/error_of.h"

namespace hasten {

using testing_support::error_of;

namespace {

WordPieceTokenizer small_tokenizer() {
  return WordPieceTokenizer({"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ada", "love", "##lace",
                             "wrote", "in", "london", "."});
}

PreTrainedModel small_model(const std::string& task, std::vector<std::string> labels) {
  set_seed(1);
  const bool decoder = find_task(task).head == ModelTask::causal_lm;
  PreTrainedConfig config =
      AutoConfig::from_shape(decoder ? "gpt2-mini" : "bert-tiny", small_tokenizer().size());
  config.id2label = std::move(labels);
  PreTrainedModel model = model_from_config(config, find_task(task).head);
  model->eval();
  return model;
}

} // namespace

TEST(Tasks, TheCommandLineTakesThoseThatAreRegistered) {
  EXPECT_EQ(task_names(), task_choices());
  const std::string error = error_of([] { find_task("text-clasification"); });
  EXPECT_NE(error.find("fill-mask"), std::string::npos) << error;
}

TEST(Tasks, AHeadNamesItsTask) {
  for (const std::string& name : task_names()) {
    EXPECT_EQ(task_of(small_model(name, {"O", "B-PER"})->config()).name, name);
  }
  EXPECT_EQ(task_of(PreTrainedConfig()).name, "text-classification");
}

TEST(Tasks, ATaskOfAProgramIsFoundByItsName) {
  // [register]
  Task task = find_task("token-classification"); // with the same head, collator and loss
  task.name = "part-of-speech";
  task.label_column = "pos_tags";
  register_task(task);
  // [/register]
  EXPECT_NE(error_of([&] { register_task(task); }).find("registered already"), std::string::npos);
  EXPECT_EQ(find_task("part-of-speech").head, ModelTask::token_classification);
  task.name = "no loss";
  task.loss = nullptr;
  EXPECT_NE(error_of([&] { register_task(task); }).find("lacks a field"), std::string::npos);
}

TEST(Pipelines, AWordHasTheLabelOfItsFirstToken) {
  const WordPieceTokenizer tokenizer = small_tokenizer();
  PreTrainedModel model = small_model("token-classification", {"O", "B-PER", "I-PER"});
  const std::vector<std::vector<std::string>> sentences{
      {"Ada", "Lovelace", "wrote", "."}, {"London"}, {}};
  for (const int64_t batch_size : {1, 2, 8}) {
    const auto tagged = tag_words(model, tokenizer, sentences, {.batch_size = batch_size});
    for (size_t row = 0; row < sentences.size(); ++row) {
      ASSERT_EQ(tagged[row].size(), sentences[row].size());
      const Encoding encoding = tokenizer.encode_words(sentences[row], {.return_word_ids = true});
      const at::Tensor probabilities = at::softmax(
          model->forward({.input_ids = at::tensor(encoding.ids).unsqueeze(0)}).logits[0], 1);
      for (size_t token = encoding.ids.size(); token-- > 0;) { // the first token comes last
        if (encoding.word_ids[token] < 0) {
          continue;
        }
        const TaggedWord& word = tagged[row][static_cast<size_t>(encoding.word_ids[token])];
        if (token > 0 && encoding.word_ids[token - 1] == encoding.word_ids[token]) {
          continue;
        }
        const auto [score, label] = probabilities[static_cast<int64_t>(token)].max(0);
        EXPECT_EQ(word.label, model->config().id2label[static_cast<size_t>(label.item<int64_t>())]);
        EXPECT_NEAR(word.score, score.item<double>(), 1e-6);
      }
    }
  }
}

TEST(Pipelines, AWordThatWasTruncatedHasNoLabel) {
  const auto tagged =
      tag_words(small_model("token-classification", {"O", "B-PER"}), small_tokenizer(),
                {{"ada", "wrote", "london", "."}}, {.max_length = 4});
  EXPECT_FALSE(tagged[0][1].label.empty());
  EXPECT_TRUE(tagged[0][2].label.empty());
}

TEST(Pipelines, TheTokensForAMaskAreTheMostProbableOnes) {
  const WordPieceTokenizer tokenizer = small_tokenizer();
  PreTrainedModel model = small_model("fill-mask", {"LABEL_0", "LABEL_1"});
  const auto filled = fill_masks(model, tokenizer, {"ada [MASK] in london", "[MASK] [MASK]"}, 3);
  ASSERT_EQ(filled[0].size(), 1U);
  ASSERT_EQ(filled[1].size(), 2U);
  const auto ids = tokenizer.encode("ada [MASK] in london").ids;
  const at::Tensor probabilities =
      at::softmax(model->forward({.input_ids = at::tensor(ids).unsqueeze(0)}).logits[0][2], 0);
  const auto [scores, best] = probabilities.topk(3);
  for (int64_t k = 0; k < 3; ++k) {
    const FilledMask& answer = filled[0][0][static_cast<size_t>(k)];
    EXPECT_EQ(answer.token, best[k].item<int64_t>());
    EXPECT_NEAR(answer.score, scores[k].item<double>(), 1e-6);
    EXPECT_EQ(answer.token_str, tokenizer.decode({answer.token}));
  }
  EXPECT_NE(error_of([&] { fill_masks(model, tokenizer, {"ada wrote"}); }).find("has no mask"),
            std::string::npos);
  EXPECT_NE(error_of([&] { tag_words(model, tokenizer, {{"ada"}}); }).find("MaskedLM"),
            std::string::npos);
}

TEST(Pipelines, APromptsContinuationEndsWithAStopString) {
  const WordPieceTokenizer tokenizer = small_tokenizer();
  PreTrainedConfig config = AutoConfig::for_model("gpt2");
  config.vocab_size = tokenizer.size() + 5; // rows that no token has
  config.hidden_size = 16;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 2;
  config.max_position_embeddings = 40;
  config.initializer_range = 1;
  set_seed(3);
  PreTrainedModel model = model_from_config(config, ModelTask::causal_lm);
  const std::vector<std::string> prompts{"ada", "in london", "lovelace wrote"};
  const GenerationConfig drawn{.max_new_tokens = 30, .do_sample = true, .top_k = 0};
  const auto whole = generate_texts(model, tokenizer, prompts, drawn, {.batch_size = 2});
  const auto again = generate_texts(model, tokenizer, prompts, drawn, {.batch_size = 3});
  GenerationConfig stopping = drawn;
  stopping.stop_strings = {"wrote", "london"};
  const auto stopped = generate_texts(model, tokenizer, prompts, stopping);
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(whole[i].token_ids, again[i].token_ids);
    EXPECT_LT(*std::ranges::max_element(whole[i].token_ids), tokenizer.size());
    const auto ids = tokenizer.encode(prompts[i]).ids;
    std::vector<int64_t> all = ids;
    all.insert(all.end(), whole[i].token_ids.begin(), whole[i].token_ids.end());
    EXPECT_EQ(tokenizer.decode(ids, {.skip_special_tokens = true}) + whole[i].generated_text,
              tokenizer.decode(all, {.skip_special_tokens = true}));
    EXPECT_FALSE(whole[i].stopped);
    ASSERT_TRUE(stopped[i].stopped) << whole[i].generated_text;
    EXPECT_TRUE(stopped[i].generated_text.ends_with("wrote") ||
                stopped[i].generated_text.ends_with("london"))
        << stopped[i].generated_text;
    EXPECT_TRUE(whole[i].generated_text.starts_with(stopped[i].generated_text));
  }
  stopping.stop_strings = {""};
  EXPECT_NE(error_of([&] {
              generate_texts(model, tokenizer, prompts, stopping);
            }).find("an empty stop string"),
            std::string::npos);
}

} // namespace hasten
