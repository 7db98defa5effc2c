#include "flags.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <sstream>
#include <utility>

namespace hasten::detail {

constexpr size_t kHelpWidth = 80;
constexpr size_t kHelpColumn = 30;

template <typename T>
bool read_number_flag(const std::string& text, T& value) {
  T read{};
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, read);
  if (result.ec != std::errc() || result.ptr != end) {
    return false;
  }
  value = read;
  return true;
}

template <typename T>
bool read_spelling_flag(const std::string& text, const std::map<std::string, T>& known, T& value) {
  const auto found = known.find(text);
  if (found == known.end()) {
    return false;
  }
  value = found->second;
  return true;
}

template <typename T>
std::string spelling_text(const std::map<std::string, T>& known, T value) {
  for (const auto& [name, candidate] : known) {
    if (candidate == value) {
      return name;
    }
  }
  return {};
}

template <typename T>
std::string spelling_expectation(const std::map<std::string, T>& known) {
  std::string all = "one of ";
  for (const auto& [name, value] : known) {
    all += (all.back() == ' ' ? "" : ", ") + name;
  }
  return all;
}

bool read_flag(const std::string& text, std::string& value) {
  value = text;
  return true;
}
bool read_flag(const std::string& text, bool& value) {
  if (text != "true" && text != "false") {
    return false;
  }
  value = text == "true";
  return true;
}
bool read_flag(const std::string& text, int& value) { return read_number_flag(text, value); }
bool read_flag(const std::string& text, int64_t& value) { return read_number_flag(text, value); }
bool read_flag(const std::string& text, uint64_t& value) { return read_number_flag(text, value); }
bool read_flag(const std::string& text, double& value) { return read_number_flag(text, value); }
bool read_flag(const std::string& text, GradientCheckpointing& value) {
  try {
    value = text;
    return true;
  } catch (const InputError&) {
    return false;
  }
}
bool read_flag(const std::string& text, RankStreams& value) {
  try {
    value = parse_rank_streams(text);
    return true;
  } catch (const InputError&) {
    return false;
  }
}
bool read_flag(const std::string& text, std::filesystem::path& value) {
  value = text;
  return !text.empty();
}
bool read_flag(const std::string& text, char& value) {
  if (text == "tab" || text == "\\t") {
    value = '\t';
    return true;
  }
  if (text.size() != 1) {
    return false;
  }
  value = text[0];
  return true;
}
bool read_flag(const std::string& text, IntervalStrategy& value) {
  return read_spelling_flag(text, interval_strategies(), value);
}
bool read_flag(const std::string& text, SchedulerType& value) {
  return read_spelling_flag(text, scheduler_types(), value);
}
bool read_flag(const std::string& text, OptimizerType& value) {
  return read_spelling_flag(text, optimizer_types(), value);
}
bool read_flag(const std::string& text, SamplingStrategy& value) {
  return read_spelling_flag(text, sampling_strategies(), value);
}
bool read_flag(const std::string& text, GradNormType& value) {
  return read_spelling_flag(text, grad_norm_types(), value);
}
bool read_flag(const std::string& text, LogGradientNorms& value) {
  return read_spelling_flag(text, log_gradient_norms(), value);
}
bool read_flag(const std::string& text, Precision& value) {
  return read_spelling_flag(text, precisions(), value);
}
bool read_flag(const std::string& text, Strategy& value) {
  return read_spelling_flag(text, strategies(), value);
}

std::string flag_text(const std::string& value) { return value; }
std::string flag_text(bool value) { return value ? "true" : "false"; }
std::string flag_text(int value) { return std::to_string(value); }
std::string flag_text(int64_t value) { return std::to_string(value); }
std::string flag_text(uint64_t value) { return std::to_string(value); }
std::string flag_text(double value) {
  std::array<char, 32> text{};
  const auto result = std::to_chars(text.data(), text.data() + text.size(), value);
  return std::string(text.data(), result.ptr);
}
std::string flag_text(const GradientCheckpointing& value) { return value.text(); }
std::string flag_text(const RankStreams&) { return {}; }
std::string flag_text(char value) { return value == '\0' ? std::string() : std::string(1, value); }
std::string flag_text(IntervalStrategy value) {
  return spelling_text(interval_strategies(), value);
}
std::string flag_text(SchedulerType value) { return spelling_text(scheduler_types(), value); }
std::string flag_text(OptimizerType value) { return spelling_text(optimizer_types(), value); }
std::string flag_text(SamplingStrategy value) {
  return spelling_text(sampling_strategies(), value);
}
std::string flag_text(GradNormType value) { return spelling_text(grad_norm_types(), value); }
std::string flag_text(LogGradientNorms value) { return spelling_text(log_gradient_norms(), value); }
std::string flag_text(Precision value) { return spelling_text(precisions(), value); }
std::string flag_text(Strategy value) { return spelling_text(strategies(), value); }

std::string flag_expectation(const GradientCheckpointing&) {
  return "none, full, every:K with K >= 1, ops, or budget:B with B bytes (2GB) "
         "or a share (50%)";
}
std::string flag_expectation(const RankStreams&) {
  return "0, 1 (stdout), 2 (stderr) or 3 (both), or some ranks' like 0:3,1:2";
}
std::string flag_expectation(IntervalStrategy) {
  return spelling_expectation(interval_strategies());
}
std::string flag_expectation(SchedulerType) { return spelling_expectation(scheduler_types()); }
std::string flag_expectation(OptimizerType) { return spelling_expectation(optimizer_types()); }
std::string flag_expectation(SamplingStrategy) {
  return spelling_expectation(sampling_strategies());
}
std::string flag_expectation(GradNormType) { return spelling_expectation(grad_norm_types()); }
std::string flag_expectation(LogGradientNorms) {
  return spelling_expectation(log_gradient_norms());
}
std::string flag_expectation(Precision) { return spelling_expectation(precisions()); }
std::string flag_expectation(Strategy) { return spelling_expectation(strategies()); }

template <typename T>
std::string spelling_fix(const std::string& text, const std::map<std::string, T>& known) {
  std::vector<std::string> names;
  for (const auto& [name, value] : known) {
    names.push_back(name);
  }
  const std::string near = nearest_name(text, names.data(), names.data() + names.size());
  return near.empty() ? near : "write " + near;
}
std::string flag_fix(const std::string& text, SchedulerType) {
  return spelling_fix(text, scheduler_types());
}
std::string flag_fix(const std::string& text, OptimizerType) {
  return spelling_fix(text, optimizer_types());
}
std::string flag_fix(const std::string& text, Precision) {
  return spelling_fix(text, precisions());
}
std::string flag_fix(const std::string& text, Strategy) { return spelling_fix(text, strategies()); }

std::string wrap_text(const std::string& text, size_t indent, size_t width) {
  std::istringstream words(text);
  std::string lines;
  std::string line;
  std::string word;
  const auto end_line = [&] {
    lines += std::string(indent, ' ') + line + "\n";
    line.clear();
  };
  while (words >> word) {
    if (!line.empty() && indent + line.size() + 1 + word.size() > width) {
      end_line();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  if (!line.empty()) {
    end_line();
  }
  return lines;
}

FlagTable::FlagTable(CommandText text) : text_(std::move(text)), app_("", "hasten " + text_.name) {
  app_.set_help_flag("-h,--help");
  app_.get_help_ptr()->group("");
  app_.allow_extras();
  names_.push_back("--help");
}

std::vector<std::string> split_names(const std::string& names) {
  std::vector<std::string> split;
  for (size_t at = 0; at < names.size();) {
    const size_t comma = std::min(names.find(',', at), names.size());
    split.push_back(names.substr(at, comma - at));
    at = comma + 1;
  }
  return split;
}

void FlagTable::note_names(const std::string& names) {
  for (std::string& name : split_names(names)) {
    names_.push_back(std::move(name));
  }
}

void FlagTable::add_config_entry(const std::string& names, ConfigKind kind, bool nullable,
                                 std::function<bool(const std::string&)> read,
                                 std::function<std::string()> expected) {
  config_entries_.push_back(
      {split_names(names), kind, nullable, std::move(read), std::move(expected)});
}

CLI::Option* FlagTable::declare(const std::string& names, const std::string& unit,
                                const std::string& help,
                                std::function<void(const std::string&)> read) {
  note_names(names);
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
            if (!std::exchange(begun, true) && configured(first)) {
              field.clear(); // the file's
            }
            field.push_back(text);
          })
      ->take_all()
      ->allow_extra_args(false);
  add_config_entry(
      names, ConfigKind::texts, false,
      [&field](const std::string& text) {
        field.push_back(text);
        return true;
      },
      [] { return std::string("a value"); });
}

void FlagTable::flag(const std::string& names, bool& field, const std::string& help) {
  note_names(names);
  last_ = app_.add_flag(names, field, help)->group(group_);
  add_config_entry(
      names, ConfigKind::boolean, false,
      [&field](const std::string& text) { return read_flag(text, field); },
      [] { return std::string("true or false"); });
}

void FlagTable::required() { required_.push_back(last_); }

bool FlagTable::given(const std::string& name) const { return written(name) || configured(name); }

void FlagTable::refuse_unknown(const std::string& argument) const {
  const std::string name = argument.substr(0, argument.find('='));
  const std::string near = nearest_name(name, names_.data(), names_.data() + names_.size());
  throw InputError(where(), "unknown flag: " + name, {},
                   near.empty() ? "see hasten " + text_.name + " --help" : "write " + near);
}

bool FlagTable::parse(std::vector<std::string> arguments) {
  const auto words = parse_words(std::move(arguments), false);
  if (words && !words->empty()) {
    throw InputError(where(), "not a flag: \"" + words->front() + "\"", {},
                     "see hasten " + text_.name + " --help");
  }
  return words.has_value();
}

std::optional<std::vector<std::string>> FlagTable::parse_words(std::vector<std::string> arguments,
                                                               bool stop_at_word) {
  if (stop_at_word) {
    app_.prefix_command();
  }
  std::reverse(arguments.begin(), arguments.end()); // as CLI11 wants them
  try {
    app_.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    return std::nullopt;
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
  const size_t checked = stop_at_word ? std::min<size_t>(1, words.size()) : words.size();
  for (size_t i = 0; i < checked; ++i) {
    if (words[i].size() > 1 && words[i][0] == '-') {
      refuse_unknown(words[i]);
    }
  }
  for (const CLI::Option* option : required_) {
    if (option->count() == 0 && !configured(option->get_name())) {
      const std::string name = option->get_name();
      throw InputError(where(), name + " is missing", name + " " + option->get_type_name(),
                       "see hasten " + text_.name + " --help");
    }
  }
  return words;
}

std::string FlagTable::help() const {
  std::string text = "hasten " + text_.name + ": " + text_.summary + "\n\n" + "Usage: hasten " +
                     text_.name + " " + text_.usage + "\n";
  if (!text_.notes.empty()) {
    text += "\n" + wrap_text(text_.notes, 0, kHelpWidth);
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
    std::string left = "  ";
    for (const char c : option->get_name(false, true)) {
      left += c == ',' ? std::string(", ") : std::string(1, c);
    }
    if (!option->get_type_name().empty()) {
      left += " " + option->get_type_name();
    }
    std::string right = option->get_description();
    if (std::find(required_.begin(), required_.end(), option) != required_.end()) {
      right += " (required)";
    } else if (!option->get_default_str().empty()) {
      right += " [" + option->get_default_str() + "]";
    }
    std::string body = wrap_text(right, kHelpColumn, kHelpWidth);
    if (left.size() + 2 > kHelpColumn) {
      text += left + "\n" + body;
    } else {
      text += left + body.substr(left.size());
    }
  }
  text += text_.examples.size() == 1 ? "\nExample:\n" : "\nExamples:\n";
  for (const std::string& example : text_.examples) {
    text += "  " + example + "\n";
  }
  return text +
         "\nExit codes: 0 ok, 1 training failed, 2 bad input, 128+n signal n (130: Ctrl-C)\n";
}

std::string FlagTable::with_flag_names(std::string message) const {
  const auto is_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
  };
  for (const std::string& name : names_) {
    std::string field = name.substr(2);
    std::replace(field.begin(), field.end(), '-', '_');
    if (field.find('_') == std::string::npos) {
      continue; // an ordinary word of the sentence
    }
    for (size_t at = message.find(field); at != std::string::npos;
         at = message.find(field, at + name.size())) {
      const size_t end = at + field.size();
      if ((at > 0 && is_word(message[at - 1])) || (end < message.size() && is_word(message[end]))) {
        continue;
      }
      message.replace(at, field.size(), name);
    }
  }
  return message;
}

void require_flag(const FlagTable& flags, bool good, const std::string& flag_and_value,
                  const std::string& expected) {
  if (!good) {
    throw InputError(flags.where(), flag_and_value, expected);
  }
}

void declare_processes(FlagTable& flags, int& nproc, bool& oversubscribe, bool required) {
  flags.value("--nproc,--nproc-per-node", nproc, "N", "processes on this machine", kProcesses);
  if (required) {
    flags.required();
  }
  flags.flag("--oversubscribe", oversubscribe, "allow more than 16 processes a core");
}

void declare_shard_size(FlagTable& flags, int64_t& shard_size) {
  flags.value("--shard-size", shard_size, "N",
              "of hsdp: processes that hold a copy together (default: all of one host)");
}

void require_shard_size(const FlagTable& flags, int64_t shard_size, bool hsdp, int nproc) {
  require_flag(flags, shard_size == 0 || (hsdp && shard_size > 0 && nproc % shard_size == 0),
               "--shard-size=" + std::to_string(shard_size),
               "with strategy hsdp a divisor of --nproc");
}

void declare_table(FlagTable& flags, TableFlags& table, bool labels) {
  flags.value("--text-column", table.text_column, "NAME", "column with the text");
  if (labels) {
    flags.value("--label-column", table.label_column, "NAME", "column with the label");
    flags.value("--label-columns", table.label_columns, "NAME,NAME",
                "several labels a row: columns that hold 0 or 1, named like the labels");
    flags.value("--label-separator", table.label_separator, "TEXT",
                "several labels a row: what stands between them in the label column");
  }
  flags.value("--delimiter", table.delimiter, "CHAR",
              "between fields; a character or tab (default: tab for .tsv and .tab, else comma)");
  flags.flag("--no-header", table.no_header,
             "the first record is data; columns are named 0, 1, ...");
  flags.values("--filter", table.filters, "COLUMN=VALUE",
               "only rows whose column holds the value; several must all hold");
}

void check_columns(const FlagTable& flags, const TableFlags& table) {
  std::vector<std::string> names = split_names(table.label_columns);
  if (names.empty()) {
    names.push_back(table.label_column);
  }
  names.push_back(table.text_column);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  require_flag(flags, twice == names.end(),
               "column " + (twice == names.end() ? "" : *twice) +
                   " is named twice by --text-column and " +
                   (table.label_columns.empty() ? "--label-column" : "--label-columns"),
               "each column once");
}

} // namespace hasten::detail
