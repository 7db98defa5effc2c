// The report of training runs: one HTML page without any request to a network. For one folder it
// shows the run; for several it lays the runs side by side.
//
// The page reads the files of an output folder (hasten/trainer/output_folder.h): metrics.jsonl,
// hasten_state.json, training_args.json, the names of checkpoint-N, and
// eval_results.json if it exists. It knows these keys:
//   records "eval", or eval_results.json
//     "confusion_matrix": {"labels": [NAME, …], "counts": [[N, …], …]}   [label][predicted]
//     "per_class": {NAME: {"precision", "recall", "f1", "support"}}
//     "most_wrong": [{"sample", "text", "label", "predicted", "loss"}, …]
//   records "train"
//     "step_seconds": {"compute", "recompute", "communication", "data", "save"}   of one step
//   records "epoch"
//     "peak_tensor_bytes_by_rank", "peak_resident_bytes_by_rank": [BYTES, …]      [rank]
//   a record "start": facts of the run, {"command": …, "cpu": …, …}
// Each other number of a record has a chart.
//
// Without LibTorch. Threading: free functions. Local: rank 0 calls these.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace hasten {

struct RunFolder {
  /// The output folder of a run: finished, interrupted or still running.
  std::filesystem::path path{};
  /// Empty: the path.
  std::string name{};
  /// A process trains in it now.
  bool running = false;
};

struct ReportOptions {
  /// False: no texts of samples on the page.
  bool texts = true;
  /// While a run is running, the browser reads the page again after this many seconds; 0: never.
  int refresh_seconds = 0;
};

/// The page. Takes about 0.7 s for 100,000 records; a curve has at most 2,000 points.
/// Accepts a last line that is cut off, lines that are no records, unknown keys and newer formats;
/// the page names them. Throws InputError for a folder without metrics.jsonl.
std::string report_page(const std::vector<RunFolder>& runs, const ReportOptions& options = {});

/// Replaces the file `path` by the page, as write_file_atomically() does. Throws what both throw.
void write_report(const std::vector<RunFolder>& runs, const std::filesystem::path& path,
                  const ReportOptions& options = {});

} // namespace hasten
