// What records the values of a run: files, TensorBoard, or a service. A tracker of your own derives
// from GeneralTracker, as in Accelerate; examples/12_tracker.cpp has one.
//
//   hasten::Accelerator accelerator({.log_with = {"tensorboard", my_tracker}, .project_dir = "out"});
//   accelerator.init_trackers("reviews", {{"learning_rate", 1e-3}});
//   accelerator.log({{"train/loss", loss}}, step);
//   accelerator.end_training();
//
// Threading: one thread calls a tracker. Only rank 0's tracker is called, and it must not
// communicate. Guide: docs/guides/records.md
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace hasten {

class GeneralTracker {
 public:
  virtual ~GeneralTracker() = default;
  /// For log_with, get_tracker() and messages.
  virtual std::string name() const = 0;
  /// Hyper-parameters, as a JSON object; called once, before log().
  virtual void store_init_configuration(const nlohmann::json&) {}
  /// `values` is a JSON object of names and numbers, texts or such objects. Training waits for the
  /// call.
  virtual void log(const nlohmann::json& values, std::optional<int64_t> step) = 0;
  virtual void log_histogram(const std::string& /*tag*/, const std::vector<double>& /*values*/,
                             std::optional<int64_t> /*step*/) {}
  /// The run has ended well. Not called after an exception; the destructor is.
  virtual void finish() {}
};

/// Passes calls to a tracker and never throws. The tracker's first exception is logged as a
/// warning. Then the tracker is destroyed, so it costs no time at later steps.
class SafeTracker final : public GeneralTracker {
 public:
  /// Calls `make` at once. If it throws or is empty, later calls do nothing.
  SafeTracker(std::string name, const std::function<std::shared_ptr<GeneralTracker>()>& make);

  std::string name() const override { return name_; }
  void store_init_configuration(const nlohmann::json& values) override;
  void log(const nlohmann::json& values, std::optional<int64_t> step) override;
  void log_histogram(const std::string& tag, const std::vector<double>& values,
                     std::optional<int64_t> step) override;
  void finish() override;

 private:
  template <typename Call>
  void guard(const Call& call);

  std::string name_;
  std::shared_ptr<GeneralTracker> tracker_{}; // null: none, finished, or it has failed
};

/// A tracker of hasten that writes into `folder`, which it makes:
///   * tensorboard: "events.out.tfevents.…", as torch.utils.tensorboard does. Numbers are scalars,
///     texts are in the TEXT tab, hyper-parameters in the HPARAMS tab. Objects in `values` give tags
///     with a slash. Histograms have torch's default bins and ignore values that are not finite.
///   * csv: metrics.csv with lines "step,tag,value". Hyper-parameters have tags "config/…" and no
///     step. A table with a column for each tag would have to be written anew for each new tag;
///     lines are only appended, so a killed run leaves a whole file.
///   * json: metrics.jsonl. Each call is one line, written before it returns.
/// The first two write on a thread of their own, each record with one write(2). After a kill at
/// most the last record is incomplete; readers skip it. At most 1,024 records wait; if the disk
/// accepts none for ten seconds, the next call throws. finish() and the destructor write what waits.
/// `resumed_step`: the run continues after this step. TensorBoard then hides what earlier files of
/// the folder have after it, and such lines of metrics.csv are removed.
/// Other names are those of register_tracker(). Throws InputError for an unknown name. The function
/// and the tracker throw Error or InputError "[where] …" if a file cannot be written.
std::shared_ptr<GeneralTracker> make_tracker(const std::string& name,
                                             const std::filesystem::path& folder,
                                             std::optional<int64_t> resumed_step = {},
                                             const char* where = "tracking::make_tracker");

/// What make_tracker() was called with.
struct TrackerRequest {
  std::filesystem::path folder{};
  std::optional<int64_t> resumed_step{};
  const char* where = "";
};
using TrackerFactory =
    std::function<std::shared_ptr<GeneralTracker>(const TrackerRequest& request)>;

/// Adds a tracker, for the rest of the process: then TrainingArguments::report_to and log_with have
/// its name. Throws InputError for an empty name, one with a comma, one that is there, and without a
/// factory.
void register_tracker(const std::string& name, TrackerFactory factory);
/// The names of all trackers, sorted. "html" is one that only a Trainer makes.
std::vector<std::string> registered_trackers();
/// Throws InputError "[where] argument=name" for one of `names`, as in TrainingArguments::report_to,
/// that no tracker has.
void check_trackers(const char* where, const std::string& names,
                    const char* argument = "report_to");

/// "runs/Nov23_16-31-30_host": the folder of a run's trackers under its output folder, as
/// transformers names it.
std::filesystem::path default_logging_dir();

} // namespace hasten
