#include "flags.h"

#include <algorithm>
#include <filesystem>
#include <regex>
#include <utility>

#include "hasten/base/world.h"

namespace hasten::detail {

constexpr int kHelpWidth = 80;
constexpr size_t kHelpColumn = 30;

/// True if `read` accepts the text.
template <typename Read>
bool takes(const Read& read) {
  try {
    read();
    return true;
  } catch (const InputError&) {
    return false;
  }
}

bool read_flag(const std::string& text, GradientCheckpointing& value) {
  return takes([&] { value = text; });
}
bool read_flag(const std::string& text, RankStreams& value) {
  return takes([&] { value = parse_rank_streams(text); });
}
bool read_flag(const std::string& text, std::set<int>& value) {
  value.clear();
  for (const std::string& part : split(text)) {
    int rank = -1;
    if (!read_flag(part, rank) || rank < 0) {
      return false;
    }
    value.insert(rank);
  }
  return true;
}
bool read_flag(const std::string& text, std::vector<int>& value) {
  return !text.empty() && takes([&] { value = parse_signals(text); });
}

FlagTable::FlagTable(const CommandEntry& entry, CommandText text)
    : name_(entry.name), text_(std::move(text)), app_("", "hasten " + name_) {
  text_.summary = text_.summary.empty() ? entry.help : text_.summary;
  app_.set_help_flag("-h,--help");
  app_.get_help_ptr()->group("");
  app_.allow_extras();
}

std::vector<std::string> FlagTable::names() const {
  std::vector<std::string> all;
  for (const CLI::Option* option : app_.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      all.push_back("--" + name);
    }
  }
  return all;
}

CLI::Option* FlagTable::declare(const std::string& names, const std::string& unit,
                                const std::string& help,
                                std::function<void(const std::string&)> read) {
  last_ = app_.add_option(
      names,
      [read = std::move(read)](const CLI::results_t& results) {
        for (const std::string& text : results) {
          read(text);
        }
        return true;
      },
      help);
  last_->type_name(unit)->type_size(1)->expected(1)->group(group_);
  return last_;
}

void FlagTable::values(const std::string& names, std::vector<std::string>& field,
                       const std::string& unit, const std::string& help) {
  const std::string first = names.substr(0, names.find(','));
  declare(names, unit, help,
          [this, first, &field, begun = false](const std::string& text) mutable {
            if (!std::exchange(begun, true) && configured_.contains(first)) {
              field.clear(); // the file's or the environment's
            }
            field.push_back(text);
          })
      ->take_all()
      ->allow_extra_args(false);
  const auto set = [&field](const std::string&, const std::string& text) { field = {text}; };
  const auto read = [&field](const nlohmann::json& value) {
    const auto is_text = [](const nlohmann::json& element) { return element.is_string(); };
    const bool good = value.is_array() && std::all_of(value.begin(), value.end(), is_text);
    if (good) {
      field = value.get<std::vector<std::string>>();
    }
    return good;
  };
  config_entries_.push_back({split(names),
                             last_,
                             false,
                             set,
                             read,
                             [] { return "an array of strings"; },
                             [&field] { return nlohmann::json(field); },
                             {}});
}

void FlagTable::flag(const std::string& names, bool& field, const std::string& help) {
  last_ = app_.add_flag(names, field, help)->group(group_);
  const auto read = [&field](const std::string& text) { return read_flag(text, field); };
  const auto set = [this, read](const std::string& name, const std::string& text) {
    require(read(text == "1"   ? "true"
                 : text == "0" ? "false"
                               : text),
            name + "=" + text, flag_expectation<bool>());
  };
  set_by_config(names, field, set, read, flag_expectation<bool>);
}

void FlagTable::required() { required_.push_back(last_); }

bool FlagTable::given(const std::string& name) const {
  return written(name) || configured_.contains(name);
}

void FlagTable::parse(std::vector<std::string> arguments) {
  const auto words = parse_words(std::move(arguments));
  if (!words.empty()) {
    throw InputError(where(), "not a flag: \"" + words.front() + "\"", {},
                     "see hasten " + name_ + " --help");
  }
}

std::vector<std::string> FlagTable::parse_words(std::vector<std::string> arguments,
                                                bool stop_at_word) {
  app_.prefix_command(stop_at_word);
  std::reverse(arguments.begin(), arguments.end()); // as CLI11 wants them
  try {
    app_.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    HelpAsked asked{help()};
    for (const ConfigEntry& entry : config_entries_) {
      asked.flags.push_back({entry.names, entry.option->get_description(),
                             !entry.option->get_type_name().empty(), entry.values});
    }
    throw asked;
  } catch (const CLI::ArgumentMismatch& error) {
    for (const CLI::Option* option : app_.get_options()) {
      const std::string name = option->get_name();
      if (std::string(error.what()).rfind(name + ":", 0) == 0) {
        throw InputError(where(),
                         option->count() > 1
                             ? name + " is given " + std::to_string(option->count()) + " times"
                             : name + " has no value",
                         name + " " + option->get_type_name());
      }
    }
    throw InputError(where(), error.what());
  } catch (const CLI::ParseError& error) {
    throw InputError(where(), error.what());
  }
  std::vector<std::string> words = app_.remaining();
  const auto end = stop_at_word && !words.empty() ? words.begin() + 1 : words.end();
  const auto mark = std::find(words.begin(), end, "--"); // no flags follow it
  const auto unknown = std::find_if(words.begin(), mark, [](const std::string& word) {
    return word.size() > 1 && word[0] == '-';
  });
  if (unknown != mark) {
    const std::string name = unknown->substr(0, unknown->find('='));
    throw InputError(where(), "unknown flag: " + name, {},
                     write_nearest(name, names(), "see hasten " + name_ + " --help"));
  }
  if (mark != end) {
    words.erase(mark);
  }
  for (const CLI::Option* option : required_) {
    const std::string name = option->get_name();
    if (!given(name)) {
      throw InputError(where(), name + " is missing", name + " " + option->get_type_name(),
                       "see hasten " + name_ + " --help");
    }
  }
  return words;
}

std::string FlagTable::described(const CLI::Option& option) const {
  const bool required = std::find(required_.begin(), required_.end(), &option) != required_.end();
  const std::string otherwise = option.get_default_str();
  return option.get_description() + (required            ? " (required)"
                                     : otherwise.empty() ? ""
                                                         : " [" + otherwise + "]");
}

std::string FlagTable::help() const {
  std::string text = "hasten " + name_ + ": " + text_.summary + "\n\n" + "Usage: hasten " + name_ +
                     " " + text_.usage + "\n";
  if (!text_.notes.empty()) {
    text += "\n" + wrapped(text_.notes, kHelpWidth, 0) + "\n";
  }
  std::string group;
  for (const CLI::Option* option : app_.get_options()) {
    if (option->get_group().empty()) {
      continue;
    }
    if (option->get_group() != group) {
      group = option->get_group();
      text += "\n" + group + ":\n";
    }
    std::string left = "  " + joined(split(option->get_name(false, true), ","));
    if (!option->get_type_name().empty()) {
      left += " " + option->get_type_name();
    }
    const bool fits = left.size() + 2 <= kHelpColumn;
    text += left + (fits ? "" : "\n") + std::string(kHelpColumn - (fits ? left.size() : 0), ' ') +
            wrapped(described(*option), kHelpWidth, kHelpColumn) + "\n";
  }
  text += text_.examples.size() == 1 ? "\nExample:\n" : "\nExamples:\n";
  for (const std::string& example : text_.examples) {
    text += "  " + example + "\n";
  }
  return text +
         "\nExit codes: 0 ok, 1 training failed, 2 bad input, 128+n signal n (130: Ctrl-C)\n";
}

std::string FlagTable::with_flag_names(std::string message) const {
  for (const std::string& name : names()) {
    std::string field = name.substr(2);
    std::replace(field.begin(), field.end(), '-', '_');
    if (field.find('_') != std::string::npos) { // otherwise it may be a word of the sentence
      const auto variable = from_environment_.find(name);
      const bool by_it = variable != from_environment_.end() && !written(name);
      message = std::regex_replace(message, std::regex("\\b" + field + "\\b"),
                                   by_it ? variable->second : name);
    }
  }
  return message;
}

void FlagTable::require(bool good, const std::string& flag_and_value, const std::string& expected,
                        const std::string& fix) const {
  if (!good) {
    throw InputError(where(), flag_and_value, expected, fix);
  }
}

/// torchrun's words: "cpu" is the number of allowed cores, "gpu" that of GPUs, "auto" GPUs if
/// there are any, else cores.
static std::string process_count(const std::string& text) {
  if (text != "auto" && text != "cpu" && text != "gpu") {
    return text;
  }
  int gpus = 0;
  std::error_code error;
  while (std::filesystem::exists("/dev/nvidia" + std::to_string(gpus), error)) {
    ++gpus;
  }
  return std::to_string(text == "gpu" || (text == "auto" && gpus > 0) ? gpus : allowed_cores());
}

void declare_processes(FlagTable& flags, int& nproc, bool& oversubscribe, bool required) {
  flags.value("--nproc,--nproc-per-node", nproc, "N",
              "processes on this machine: a number, cpu (one per core), gpu (one per GPU), or auto",
              kProcesses, {.names = "auto, cpu or gpu", .number = process_count});
  if (required) {
    flags.required();
  }
  flags.flag("--oversubscribe", oversubscribe, "allow more than 16 processes a core");
}

void declare_shard_size(FlagTable& flags, int64_t& shard_size) {
  flags.value("--shard-size", shard_size, "N",
              "for hsdp: processes that share a replica (default: all of one host)");
}

void declare_table(FlagTable& flags, TableFlags& table, bool labels) {
  flags.value("--text-column", table.text_column, "NAME",
              "column with the text (default: text), or with the words (default: tokens)");
  flags.value("--text-pair-column", table.text_pair_column, "NAME",
              "column with the second text of a pair");
  if (labels) {
    flags.value("--label-column", table.label_column, "NAME",
                "column with the label (default: label), or with the words' tags (default: "
                "ner_tags)");
    flags.value("--label-columns", table.label_columns, "NAME,NAME",
                "several labels per sample: columns of 0 or 1, named after the labels");
    flags.value("--label-separator", table.label_separator, "TEXT",
                "several labels per sample: the text between them in the label column");
  }
  flags.value("--delimiter", table.delimiter, "CHAR",
              "character between fields, or tab (default: tab for .tsv and .tab, else comma)");
  flags.flag("--no-header", table.no_header,
             "the first record is data; columns are named 0, 1, ...");
  flags.values("--filter", table.filters, "COLUMN=VALUE",
               "use only samples whose column has the value; several filters must all match");
}

void require_task(const FlagTable& flags, const std::string& task) {
  flags.require(task.empty() || std::ranges::find(task_choices(), task) != task_choices().end(),
                "--task=" + task, "one of " + joined(task_choices()),
                write_nearest(task, task_choices()));
}

void check_columns(const FlagTable& flags, const TableFlags& table) {
  std::vector<std::string> names = table.label_columns.empty()
                                       ? std::vector<std::string>{table.label_column}
                                       : split(table.label_columns);
  names.push_back(table.text_column);
  names.push_back(table.text_pair_column);
  std::erase(names, "");
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  flags.require(twice == names.end(),
                "column " + (twice == names.end() ? "" : *twice) +
                    " is named twice by --text-column, --text-pair-column and " +
                    (table.label_columns.empty() ? "--label-column" : "--label-columns"),
                "each column once");
}

} // namespace hasten::detail
