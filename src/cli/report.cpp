#include "hasten/report/report.h"

#include "flags.h"
#include "hasten/base/log.h"
#include "hasten/trainer/output_folder.h"

namespace hasten {

namespace detail {

Command parse_report(const CommandEntry& entry, std::vector<std::string> arguments) {
  ReportCommand command;
  std::string texts = "on";
  FlagTable flags(entry,
                  {.usage = "FOLDER... [flags]",
                   .examples = {"hasten report out", "hasten report out1 out2 --output both.html"},
                   .notes = "Writes one HTML page without any request to a network: the curves and "
                            "results of a run, finished or not, or of several side by side."});
  flags.value("--output", command.output, "FILE",
              "the page (default: report.html in the first folder)");
  flags.value("--report-texts", texts, "on|off", "show texts of samples; off leaves them out");
  command.folders = flags.parse_words(std::move(arguments));
  flags.require(texts == "on" || texts == "off", "--report-texts=" + texts, "on or off");
  flags.require(!command.folders.empty(), "no folder", "the output folder of a run");
  command.texts = texts == "on";
  return command;
}

bool is_running(const std::string& folder) {
  try {
    require_unlocked_output_dir(folder);
    return false;
  } catch (const InputError&) {
    return true;
  }
}

} // namespace detail

void make_report(const ReportCommand& command) {
  std::vector<RunFolder> runs;
  for (const std::string& folder : command.folders) {
    std::error_code error;
    const bool exists = std::filesystem::is_directory(folder, error);
    runs.push_back({.path = folder, .running = exists && detail::is_running(folder)});
  }
  const std::filesystem::path output =
      command.output.empty() ? runs.front().path / "report.html" : command.output;
  write_report(runs, output, {.texts = command.texts});
  log_info("wrote " + output.string());
}

} // namespace hasten
