// The flags of one command, based on CLI11: typed values with hasten's own messages, and help with
// group, default and unit. Private to src/cli.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "commands.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"
#include "hasten/config/spelling.h"
#include "hasten/config/training_arguments.h"

namespace hasten::detail {

/// Parses `text` into `value`; returns false if it is not a T. An enumeration is parsed by its
/// spelling, a character is one character, "tab" or "\t".
template <typename T>
bool read_flag(const std::string& text, T& value) {
  if constexpr (std::is_enum_v<T>) {
    const std::optional<T> found = spelled<T>(text);
    value = found.value_or(value);
    return found.has_value();
  } else if constexpr (std::is_same_v<T, bool>) {
    value = text == "true";
    return value || text == "false";
  } else if constexpr (std::is_same_v<T, char>) {
    const bool tab = text == "tab" || text == "\\t";
    value = tab || text.empty() ? '\t' : text[0];
    return tab || text.size() == 1;
  } else if constexpr (std::is_arithmetic_v<T>) {
    const std::optional<T> number = parse_number<T>(text);
    value = number.value_or(value);
    return number.has_value();
  } else {
    value = text;
    return !std::is_same_v<T, std::filesystem::path> || !text.empty();
  }
}
bool read_flag(const std::string& text, GradientCheckpointing& value);
bool read_flag(const std::string& text, RankStreams& value);
/// Ranks: "0,2".
bool read_flag(const std::string& text, std::set<int>& value);
/// "NAME=1,OTHER=2".
template <typename Number>
bool read_flag(const std::string& text, std::map<std::string, Number>& value) {
  return std::ranges::all_of(split(text), [&](const std::string& item) {
    const size_t at = item.rfind('=');
    return at != std::string::npos && read_flag(item.substr(at + 1), value[item.substr(0, at)]);
  });
}
/// Signals: "SIGTERM,SIGINT".
bool read_flag(const std::string& text, std::vector<int>& value);

/// The value as text in help; empty shows no default.
template <typename T>
std::string flag_text(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return spelling(value);
  } else if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_same_v<T, char>) {
    return value == '\0' ? std::string() : std::string(1, value);
  } else if constexpr (std::is_same_v<T, double>) {
    return format_exact(value);
  } else if constexpr (std::is_integral_v<T>) {
    return std::to_string(value);
  } else if constexpr (std::is_same_v<T, GradientCheckpointing>) {
    return value.text();
  } else if constexpr (std::is_same_v<T, RankStreams>) {
    const auto number = [](auto of) { return std::to_string(static_cast<int>(of)); };
    const auto ranks = mapped(
        value.ranks, [&](const auto& of) { return number(of.first) + ":" + number(of.second); });
    return value.others == Std::none ? joined(ranks, ",") : number(value.others);
  } else if constexpr (std::is_same_v<T, std::set<int>>) {
    return joined(mapped(value, [](int rank) { return std::to_string(rank); }), ",");
  } else if constexpr (std::is_same_v<T, std::vector<int>>) {
    return signal_names(value);
  } else if constexpr (requires { typename T::mapped_type; }) {
    return joined(
        mapped(value, [](const auto& of) { return of.first + "=" + flag_text(of.second); }), ",");
  } else {
    return value;
  }
}
template <typename T>
std::string flag_text(const std::optional<T>& value) {
  return value ? flag_text(*value) : std::string();
}

/// "Expected …" for a value that is not a T.
template <typename T>
std::string flag_expectation() {
  if constexpr (std::is_enum_v<T>) {
    return any_spelling<T>();
  } else if constexpr (std::is_same_v<T, GradientCheckpointing>) {
    return "none, full, every:K with K >= 1, ops, or budget:B with B bytes (2GB) "
           "or a percentage (50%)";
  } else if constexpr (std::is_same_v<T, RankStreams>) {
    return "0, 1 (stdout), 2 (stderr) or 3 (both), or for some ranks, e.g. 0:3,1:2";
  } else if constexpr (std::is_same_v<T, std::set<int>>) {
    return "numbers, e.g. 0,1";
  } else if constexpr (std::is_same_v<T, std::vector<int>>) {
    return "names of signals that the launcher can pass on, e.g. SIGTERM,SIGINT,SIGHUP,SIGUSR1";
  } else if constexpr (requires { typename T::mapped_type; }) {
    return "numbers by pattern, e.g. q_proj=16,v_proj=4";
  } else {
    return std::is_same_v<T, bool>       ? "true or false"
           : std::is_same_v<T, double>   ? "a number"
           : std::is_same_v<T, uint64_t> ? "a whole number, 0 or more"
           : std::is_same_v<T, char>     ? "one character, or tab"
           : std::is_integral_v<T>       ? "a whole number"
                                         : "a value";
  }
}

/// The spellings of an enumeration; none of other types.
template <typename T>
std::vector<std::string> spelling_values() {
  if constexpr (std::is_enum_v<T>) {
    return spelling_names<T>();
  } else {
    return {};
  }
}

/// T of an optional<T>, otherwise the type itself.
template <typename T>
struct FlagValue {
  using Type = T;
};
template <typename T>
struct FlagValue<std::optional<T>> {
  using Type = T;
};

// Values in a configuration file.

/// The value is true, false or a number in JSON.
template <typename T>
inline constexpr bool kPlainJson = std::is_arithmetic_v<T> && !std::is_same_v<T, char>;

/// The value as on the command line; empty if it has another JSON type.
template <typename T>
std::optional<std::string> config_text(const nlohmann::json& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value.is_boolean() ? std::optional(value.dump()) : std::nullopt;
  } else if constexpr (kPlainJson<T>) {
    return value.is_number() ? std::optional(value.dump()) : std::nullopt;
  } else if (std::is_same_v<T, GradientCheckpointing> && value.is_boolean()) {
    return value.get<bool>() ? "full" : "none";
  } else {
    return value.is_string() ? std::optional(value.get<std::string>()) : std::nullopt;
  }
}

/// "Expected …" in the file; `values`: on the command line.
template <typename T>
std::string config_expectation(const std::string& values) {
  if constexpr (kPlainJson<T>) {
    return values;
  } else {
    return std::string(std::is_same_v<T, GradientCheckpointing> ? "true, false, or " : "") +
           (values == "a value" ? "a string" : "a string: " + values);
  }
}

/// A flag that a configuration file or the environment may set.
struct ConfigEntry {
  /// "--num-train-epochs", then its aliases.
  std::vector<std::string> names{};
  /// Has group and help.
  const CLI::Option* option = nullptr;
  /// null leaves the default.
  bool nullable = false;
  /// Sets the flag to a text. Throws InputError "name=text. Expected …".
  std::function<void(const std::string& name, const std::string& text)> set{};
  /// Returns false if the JSON is not a value of the flag.
  std::function<bool(const nlohmann::json&)> read{};
  /// "Expected …".
  std::function<std::string()> expected{};
  /// The current value. null: a file cannot have it.
  std::function<nlohmann::json()> now{};
  /// Of an enumeration.
  std::vector<std::string> values{};
};

/// The range of a whole number, both ends included.
struct NumberRange {
  int64_t least = 0;
  int64_t most = 0;

  bool holds(int64_t value) const { return value >= least && value <= most; }
  std::string text() const { return std::to_string(least) + " to " + std::to_string(most); }
};

// Ranges of several flags; TrainingArguments::validate() has its own.
inline constexpr NumberRange kAnyRows{0, 1'000'000'000'000};
inline constexpr NumberRange kBatchRows{1, 16'777'216};
inline constexpr NumberRange kTokens{0, 1'048'576};
inline constexpr NumberRange kPieces{6, 16'777'216};
inline constexpr NumberRange kProcesses{1, kMaxWorldSize};

/// A row of the table of commands.
struct CommandEntry {
  const char* name;
  /// One line, without a final stop.
  const char* help;
  /// Parses what follows the name. Throws HelpAsked.
  Command (*parse)(const CommandEntry& entry, std::vector<std::string> arguments);
};

struct CommandText {
  /// Empty: the table's help.
  std::string summary{};
  /// After "hasten <name> ".
  std::string usage{};
  /// Complete command lines.
  std::vector<std::string> examples{};
  /// Printed above the flags; may be empty.
  std::string notes{};
};

struct FlagRow {
  /// "--learning-rate", "--lr".
  std::vector<std::string> names{};
  std::string help{};
  bool takes_value = false;
  /// Of an enumeration.
  std::vector<std::string> values{};
};

/// Thrown if --help is among the arguments.
struct HelpAsked {
  /// The help.
  std::string text{};
  std::vector<FlagRow> flags{};
};

/// In the order of hasten's help.
std::span<const CommandEntry> commands();
/// The flags of a command; none for an unknown one.
std::vector<FlagRow> flags_of(const std::string& command);
/// The answer of hasten completion: a shell's script (bash, zsh, fish), or after "--" the words
/// that can replace the last of those given. Throws InputError for another shell.
std::string completion(std::vector<std::string> arguments);

/// Words that stand for a number: "auto, cpu or gpu".
struct FlagWords {
  std::string names{};
  /// The number as text; other texts as they are.
  std::function<std::string(const std::string& text)> number{};
};

class FlagTable {
 public:
  FlagTable(const CommandEntry& entry, CommandText text);

  /// Title of the flags declared from here on.
  void group(const std::string& title) { group_ = title; }

  /// A flag with a value. `names`: "--a,--b"; messages use the first. `unit` is the placeholder of
  /// the value in help: "N", "FILE".
  template <typename T>
  void value(const std::string& names, T& field, const std::string& unit, const std::string& help,
             const std::optional<NumberRange>& range = {}, const FlagWords& words = {}) {
    using Value = typename FlagValue<T>::Type;
    const std::string first = names.substr(0, names.find(','));
    const auto read = [&field, range, number = words.number](const std::string& text) {
      Value given{};
      bool good = read_flag(number ? number(text) : text, given);
      if constexpr (std::is_integral_v<Value>) {
        good = good && (!range || range->holds(static_cast<int64_t>(given)));
      }
      if (good) {
        field = given;
      }
      return good;
    };
    const auto expected = [range, more = words.names] {
      return (range ? range->text() : flag_expectation<Value>()) +
             (more.empty() ? "" : ", " + more);
    };
    const auto set = [this, read, expected](const std::string& name, const std::string& text) {
      if (!read(text)) {
        throw InputError(where(), name + "=" + text, expected(),
                         write_nearest(text, spelling_values<Value>()));
      }
    };
    declare(names, unit, help, [first, set](const std::string& text) {
      set(first, text);
    })->default_str(flag_text(field));
    set_by_config(names, field, set, read, expected);
  }
  /// A flag that can be repeated.
  void values(const std::string& names, std::vector<std::string>& field, const std::string& unit,
              const std::string& help);
  /// A flag without a value.
  void flag(const std::string& names, bool& field, const std::string& help);
  /// Makes the flag declared last required.
  void required();

  /// "cli::<command>".
  std::string where() const { return "cli::" + name_; }
  /// True if the flag is set on the command line, in the environment or in the --config file.
  bool given(const std::string& name) const;
  /// True if it is set on the command line.
  bool written(const std::string& name) const { return app_.count(name) > 0; }
  /// True if it is set in the environment.
  bool in_environment(const std::string& name) const { return from_environment_.contains(name); }

  /// Sets fields from the file of --config, if the arguments or HASTEN_CONFIG have it: a JSON
  /// object whose keys are flags spelled with "_". A later parse() overrides them. Does nothing if
  /// the arguments have --help.
  /// Throws InputError for a file that is not a JSON object, a key that is not a flag (suggesting
  /// the nearest), or a value of another type, naming its path and the expected type.
  void read_config(const std::vector<std::string>& arguments);
  /// Sets fields from variables of the environment: --learning-rate from HASTEN_LEARNING_RATE. An
  /// empty variable sets none. A later parse() overrides them. Does nothing if the arguments have
  /// --help. Throws InputError for a wrong value, and for an unknown variable whose name is near
  /// that of a flag.
  void read_environment(const std::vector<std::string>& arguments);
  /// All values of now, as a file that read_config() reads.
  std::string config() const;
  /// The same with the flags' groups and help as comments. A flag without a value is a comment.
  std::string commented_config() const;

  /// Parses the arguments of a command that takes only flags. Throws HelpAsked if --help is
  /// among them.
  void parse(std::vector<std::string> arguments);
  /// The same for a command that also takes words. Returns them in order; with `stop_at_word`
  /// everything from the first word on.
  std::vector<std::string> parse_words(std::vector<std::string> arguments,
                                       bool stop_at_word = false);

  /// Throws InputError "[cli::<command>] --flag=value. Expected …" unless `good`.
  void require(bool good, const std::string& flag_and_value, const std::string& expected,
               const std::string& fix = {}) const;
  std::string help() const;
  /// `message` with names of fields (learning_rate) replaced by flags (--learning-rate), or by the
  /// variables of the environment that set them.
  std::string with_flag_names(std::string message) const;

 private:
  CLI::Option* declare(const std::string& names, const std::string& unit, const std::string& help,
                       std::function<void(const std::string&)> read);
  template <typename T>
  void set_by_config(const std::string& names, T& field,
                     const std::function<void(const std::string&, const std::string&)>& set,
                     const std::function<bool(const std::string&)>& read,
                     const std::function<std::string()>& expected) {
    using Value = typename FlagValue<T>::Type;
    config_entries_.push_back({split(names), last_, !std::is_same_v<T, Value>, set,
                               [read](const nlohmann::json& value) {
                                 const auto text = config_text<Value>(value);
                                 return text && read(*text);
                               },
                               [expected] { return config_expectation<Value>(expected()); },
                               [&field] {
                                 const std::string text = flag_text(field);
                                 return text.empty()        ? nlohmann::json()
                                        : kPlainJson<Value> ? nlohmann::json::parse(text)
                                                            : nlohmann::json(text);
                               },
                               spelling_values<Value>()});
  }
  /// All names with "--".
  std::vector<std::string> names() const;
  /// Its help, with "(required)" or its default.
  std::string described(const CLI::Option& option) const;

  std::string name_;
  CommandText text_;
  CLI::App app_;
  std::string group_ = "Flags";
  CLI::Option* last_ = nullptr;
  std::vector<CLI::Option*> required_{};
  std::vector<ConfigEntry> config_entries_{};
  std::set<std::string> configured_{}; // flags that the file or the environment sets
  std::map<std::string, std::string> from_environment_{}; // the variables that set flags, by flag
};

/// --nproc and --oversubscribe, for the commands that start processes.
void declare_processes(FlagTable& flags, int& nproc, bool& oversubscribe, bool required = false);
void declare_shard_size(FlagTable& flags, int64_t& shard_size);

/// For the notes of the commands that call read_environment().
inline constexpr const char* kEnvironmentNote =
    "A flag that the command line leaves out is read from the environment: --max-length from "
    "HASTEN_MAX_LENGTH.";

/// Flags of signals, restarts and output, for the commands that launch ranks.
void declare_launch(FlagTable& flags, ProcessFlags& processes);
/// Also settles what the flags of several hosts mean.
void check_launch(const FlagTable& flags, ProcessFlags& processes);
/// The flags by which the launchers of several hosts meet.
void declare_nodes(FlagTable& flags, ProcessFlags& processes);
void settle_nodes(const FlagTable& flags, ProcessFlags& processes);

/// Flags of a CSV or TSV file, for the commands that read one.
void declare_table(FlagTable& flags, TableFlags& table, bool labels);
/// An empty task is accepted.
void require_task(const FlagTable& flags, const std::string& task);
/// Throws InputError for a label column that is named twice or is the text column.
void check_columns(const FlagTable& flags, const TableFlags& table);
/// --lora-r and the flags that need it.
void declare_lora(FlagTable& flags, LoraFlags& lora);
void check_lora(const FlagTable& flags, const LoraFlags& lora);
/// --optim and --optim-args.
void declare_optimizer(FlagTable& flags, TrainingArguments& arguments);
/// --offline, for the commands that take the name of a model.
void declare_offline(FlagTable& flags, bool& offline);
/// --precision, --bf16 and --fp16.
void declare_precision(FlagTable& flags, TrainingArguments& arguments);
void declare_checkpointing(FlagTable& flags, TrainingArguments& arguments);
/// --backend; and its check against the back ends that hasten-worker has.
void declare_backend(FlagTable& flags, TrainingArguments& arguments);
void check_backend(const FlagTable& flags, const TrainingArguments& arguments);
/// Gives --gradient-checkpointing without a value the value full.
void complete_checkpointing(std::vector<std::string>& arguments);
/// TrainingArguments' own checks, with names of flags in the messages.
void validate_arguments(const FlagTable& flags, const TrainingArguments& arguments);
Command parse_train(const CommandEntry& entry, std::vector<std::string> arguments);
Command parse_merge(const CommandEntry& entry, std::vector<std::string> arguments);
Command parse_export(const CommandEntry& entry, std::vector<std::string> arguments);
Command parse_generate(const CommandEntry& entry, std::vector<std::string> arguments);
Command parse_tokenizer(const CommandEntry& entry, std::vector<std::string> arguments);
Command parse_download(const CommandEntry& entry, std::vector<std::string> arguments);
Command parse_report(const CommandEntry& entry, std::vector<std::string> arguments);

} // namespace hasten::detail
