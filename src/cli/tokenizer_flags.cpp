#include "commands.h"
#include "flags.h"

namespace hasten::detail {

Command parse_tokenizer(const CommandEntry& entry, std::vector<std::string> arguments) {
  TokenizerCommand command;
  FlagTable flags(entry,
                  {.summary = "learn a WordPiece vocabulary, or print texts as ids",
                   .usage = "train|encode FILE... [flags]",
                   .examples = {"hasten tokenizer train reviews.csv more.txt --output vocabulary",
                                "hasten tokenizer encode reviews.csv --tokenizer vocabulary",
                                "hasten train --model bert-mini --tokenizer vocabulary \\\n"
                                "    --train-file reviews.csv --output-dir out"},
                   .notes = "A FILE that ends in .csv, .tsv or .jsonl has a column with texts; "
                            "any other has one text per line. train writes vocab.txt, "
                            "tokenizer.json and tokenizer_config.json, which Python's "
                            "transformers reads, too. Equal texts give equal files. encode "
                            "prints one JSON object per text."});
  flags.group("Texts");
  flags.value("--text-column", command.text_column, "NAME", "column with the text");
  flags.group("Flags of train");
  flags.value("--output", command.output, "FOLDER", "folder to write the tokenizer to (required)");
  flags.value("--vocab-size", command.vocab_size, "PIECES", "maximum size of the vocabulary",
              kPieces);
  flags.value("--min-frequency", command.min_frequency, "N",
              "merge only pairs of pieces that occur at least N times",
              NumberRange{1, kAnyRows.most});
  flags.value("--limit-alphabet", command.limit_alphabet, "N",
              "keep only the N most frequent characters", NumberRange{1, 1'114'112});
  flags.flag("--cased", command.cased, "keep upper case and accents");
  flags.group("Flags of encode");
  flags.value("--tokenizer", command.tokenizer, "FOLDER|NAME",
              "folder with vocab.txt or tokenizer.json, or the name of a repository on Hugging "
              "Face's hub (required)");
  declare_offline(flags, command.offline);
  flags.value("--max-length", command.max_length, "TOKENS",
              "truncate longer texts; 0: truncate none", kTokens);
  auto words = flags.parse_words(std::move(arguments));
  flags.require(!words.empty() && (words.front() == "train" || words.front() == "encode"),
                words.empty() ? "the action is missing" : "action=" + words.front(),
                "train FILE... --output FOLDER or encode FILE... --tokenizer FOLDER");
  command.action = words.front();
  command.files.assign(words.begin() + 1, words.end());
  flags.require(!command.files.empty(), "a file is missing", "FILE...");
  const bool train = command.action == "train";
  flags.require(
      train ? !command.output.empty() && command.tokenizer.empty()
            : command.output.empty() && !command.tokenizer.empty(),
      command.action + " with --output=" + command.output + " and --tokenizer=" + command.tokenizer,
      train ? "--output FOLDER alone" : "--tokenizer FOLDER alone");
  flags.require(command.max_length == 0 || command.max_length >= 2,
                "--max-length=" + std::to_string(command.max_length), "at least 2, or 0");
  return command;
}

} // namespace hasten::detail
