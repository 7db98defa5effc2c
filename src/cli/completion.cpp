// Completion of command lines in shells: the scripts, and the words that these list.
#include <algorithm>

#include "flags.h"

namespace hasten::detail {

// Where nothing is listed, the shell completes names of files.
constexpr const char* kBashScript = R"sh(# Load with: source <(hasten completion bash)
_hasten() {
  mapfile -t COMPREPLY < <("${COMP_WORDS[0]/#\~/$HOME}" completion -- \
    "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null | cut -f1)
}
complete -o bashdefault -o default -F _hasten hasten
)sh";
constexpr const char* kZshScript = R"sh(# Load with: source <(hasten completion zsh)
_hasten() {
  local word text
  local -a found
  while IFS=$'\t' read -r word text; do
    found+=("${word//:/\\:}:$text")
  done < <("${words[1]/#\~/$HOME}" completion -- "${(@)words[2,CURRENT]}" 2> /dev/null)
  if (( $#found )); then
    _describe hasten found
  else
    compset -P '--*='
    _files
  fi
}
compdef _hasten hasten
)sh";
constexpr const char* kFishScript = R"sh(# Load with: hasten completion fish | source
function __hasten_words
  set -l words (commandline -opc)
  set -l program (string replace -r '^~' ~ -- $words[1])
  $program completion -- $words[2..-1] (commandline -ct) 2> /dev/null
end
complete -c hasten -n 'count (__hasten_words) > /dev/null' -f -a '(__hasten_words)'
)sh";

/// Lines "word<tab>help" of what can replace the last of `words`, which follow "hasten".
std::string completed(std::vector<std::string> words) {
  std::string current = words.empty() ? std::string() : words.back();
  std::string lines;
  const auto add = [&](const std::string& word, const std::string& help) {
    if (word.starts_with(current)) {
      lines += word + "\t" + help + "\n";
    }
  };
  if (words.size() <= 1) {
    for (const CommandEntry& entry : commands()) {
      add(entry.name, entry.help);
    }
    add("--help", "list the commands");
    add("--version", "print the version");
    return lines;
  }
  words.pop_back();
  if (current == "=") { // bash makes three words of --flag=value
    current.clear();
  } else if (words.back() == "=") {
    words.pop_back();
  }
  const size_t equals = current.starts_with("--") ? current.find('=') : std::string::npos;
  const std::string flag = equals == std::string::npos ? words.back() : current.substr(0, equals);
  const auto flags = flags_of(words[0]);
  for (const FlagRow& row : flags) {
    if (row.takes_value && std::ranges::find(row.names, flag) != row.names.end()) {
      for (const std::string& value : row.values) {
        add(equals == std::string::npos ? value : flag + "=" + value, {});
      }
      return lines;
    }
  }
  if (current.starts_with("-") && !flags.empty()) { // none: no such command
    for (const FlagRow& row : flags) {
      for (const std::string& name : row.names) {
        add(name, row.help);
      }
    }
    add("--help", "list the flags");
  }
  return lines;
}

std::string completion(std::vector<std::string> arguments) {
  const std::string first = arguments.empty() ? std::string() : arguments[0];
  if (first == "--") {
    arguments.erase(arguments.begin());
    return completed(std::move(arguments));
  }
  static const std::map<std::string, const char*> scripts{
      {"bash", kBashScript}, {"zsh", kZshScript}, {"fish", kFishScript}};
  const auto script = scripts.find(first);
  if (arguments.size() != 1 || script == scripts.end()) {
    throw InputError("cli::completion", first.empty() ? "the shell is missing" : "shell=" + first,
                     "bash, zsh or fish, and nothing else");
  }
  return script->second;
}

} // namespace hasten::detail
