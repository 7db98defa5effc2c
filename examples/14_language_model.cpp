// A language model from nothing: a small GPT-2 learns the texts of the reviews, then it continues some.
// Its tokens are bytes, so that no trained tokenizer is needed.
//
//   14_language_model examples/reviews.csv [FOLDER]
//   hasten launch --nproc 2 14_language_model examples/reviews.csv [FOLDER]
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "hasten/accelerator/accelerator.h"
#include "hasten/models/auto_model.h"
#include "hasten/tasks/pipelines.h"
#include "hasten/tasks/task.h"
#include "hasten/text/token_cache.h"
#include "hasten/trainer/trainer.h"
#include "reviews.h"

namespace examples {

// tokenizer.json of byte-level BPE without merges: a token for each byte, by GPT-2's letters for bytes.
hasten::Tokenizer byte_tokenizer() {
  nlohmann::json vocab{{"<|endoftext|>", 0}};
  int letter = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool shown = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int code = shown ? byte : letter++;
    std::string text(1, static_cast<char>(code));
    if (code >= 0x80) {
      text = {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
    }
    vocab[text] = byte + 1;
  }
  nlohmann::json file{{"version", "1.0"}, {"normalizer", nullptr}, {"post_processor", nullptr}};
  file["added_tokens"] = {{{"id", 0},
                           {"content", "<|endoftext|>"},
                           {"single_word", false},
                           {"lstrip", false},
                           {"rstrip", false},
                           {"normalized", false},
                           {"special", true}}};
  file["pre_tokenizer"] = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"use_regex", true},
                           {"trim_offsets", true}};
  file["decoder"] = file["pre_tokenizer"];
  file["model"] = {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}};
  std::string pattern = (std::filesystem::temp_directory_path() / "bytes-XXXXXX").string();
  const std::filesystem::path folder = ::mkdtemp(pattern.data());
  std::ofstream(folder / "tokenizer.json") << file;
  std::ofstream(folder / "tokenizer_config.json") << R"({"eos_token": "<|endoftext|>"})";
  const hasten::Tokenizer tokenizer = hasten::AutoTokenizer::from_pretrained(folder);
  std::filesystem::remove_all(folder);
  return tokenizer;
}

void train(const std::string& csv, const std::string& folder) {
  torch::manual_seed(42);
  const hasten::Tokenizer tokenizer = byte_tokenizer();
  // [data]
  hasten::TokenizedClassificationOptions options{.tokenizer = tokenizer};
  options.texts.table = {.label_column = {}, .problem_type = hasten::ProblemType::unlabelled};
  options.texts.table.documents = true; // each text ends with the tokenizer's eos_token
  options.texts.eval_split = 0.1;
  const auto texts = hasten::tokenize_text_classification(hasten::TextFile::open(csv), {}, options);
  const hasten::Task& task = hasten::find_task("text-generation");
  const hasten::TaskDataOptions rows{.block_size = 192}; // several texts in each
  const auto train_rows = hasten::task_dataset(task, texts.train, tokenizer, rows);
  const auto eval_rows = hasten::task_dataset(task, texts.eval, tokenizer, rows);
  // [/data]

  // [model]
  auto config = hasten::AutoConfig::for_model("gpt2");
  config.vocab_size = tokenizer.size();
  config.num_hidden_layers = 2;
  config.hidden_size = 128;
  config.num_attention_heads = 4;
  config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0;
  auto model = hasten::AutoModelForCausalLM::from_config(config);
  // [/model]
  hasten::TrainingArguments arguments;
  arguments.num_train_epochs = 36;
  arguments.per_device_train_batch_size = 2;
  arguments.learning_rate = 3e-3;
  arguments.save_strategy = hasten::SaveStrategy::no;
  arguments.disable_tqdm = true;
  const auto unlabelled = task.problem_types[0];
  hasten::Trainer trainer(model.ptr(), task.loss(model, unlabelled), arguments, train_rows,
                          eval_rows, task.metrics(unlabelled, {}));
  trainer.train();
  const double perplexity = trainer.evaluate().at("eval_perplexity");
  trainer.accelerator().print("perplexity per byte: " + std::to_string(perplexity));
  // [generate]
  const auto answers = hasten::generate_texts(model, tokenizer, {"the new", "this film"},
                                              {.max_new_tokens = 60, .eos_token_id = {0}});
  // [/generate]
  for (const hasten::GeneratedText& answer : answers) {
    trainer.accelerator().print("continues:" + answer.generated_text);
  }
  if (!folder.empty() && trainer.accelerator().is_main_process()) {
    model->save_pretrained(folder);
    tokenizer.save_pretrained(folder);
  }
  trainer.accelerator().end_training();
}

} // namespace examples

int main(int argc, char** argv) { return examples::run_example(argc, argv, examples::train); }
