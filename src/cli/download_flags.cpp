#include "commands.h"
#include "flags.h"

namespace hasten::detail {

void declare_offline(FlagTable& flags, bool& offline) {
  flags.flag("--offline", offline,
             "fetch nothing: a NAME has to be in Hugging Face's cache; as HF_HUB_OFFLINE=1");
}

Command parse_download(const CommandEntry& entry, std::vector<std::string> arguments) {
  DownloadCommand command;
  DownloadOptions& options = command.options;
  FlagTable flags(entry,
                  {.usage = "NAME[@REVISION] [flags]",
                   .examples = {"hasten download google-bert/bert-base-uncased",
                                "hasten download org/name --revision v1 --local-dir model"},
                   .notes = "Prints the folder. Fetches configuration, tokenizer and weights in "
                            "safetensors, never pickles. Python's libraries use the same cache. "
                            "HF_ENDPOINT, HF_HOME, HF_HUB_CACHE and HF_TOKEN mean what they mean "
                            "there. hasten train and others fetch --model NAME themselves."});
  flags.group("Files");
  flags.value("--revision", options.revision, "NAME",
              "branch, tag or whole commit hash (default: main)");
  flags.values("--include", options.include, "PATTERN",
               "fetch the files that match instead; may be repeated");
  flags.values("--exclude", options.exclude, "PATTERN", "leave these out; may be repeated");
  flags.value("--local-dir", options.local_dir, "FOLDER", "write there and not into the cache");
  flags.value("--max-workers", options.max_workers, "N", "files fetched at once",
              NumberRange{1, 64});
  flags.flag("--update", options.update, "ask for a newer commit even if the cache has the name");
  flags.group("Access");
  flags.value("--token", options.token, "TOKEN",
              "of a user of the hub (default: HF_TOKEN, or the file of hf auth login)");
  const auto words = flags.parse_words(std::move(arguments));
  flags.require(words.size() == 1, words.empty() ? "no name" : "names=" + joined(words),
                "the name of one repository, such as org/name");
  flags.require(options.revision.empty() || words[0].find('@') == std::string::npos,
                words[0] + " with --revision=" + options.revision, "one revision");
  command.name = words[0];
  return command;
}

} // namespace hasten::detail
