// The state of a LocalSGD.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "averaged_state.h"
#include "hasten/local_sgd/local_sgd.h"

namespace hasten {

namespace detail {

inline constexpr const char* kLocalSGDWhere = "accelerator::LocalSGD";

// Detects that the ranks diverge: the spread, relative to the size of a step (learning rate times
// the parameters' norm), grows from synchronisation to synchronisation.
class SpreadWatch {
 public:
  // Returns true once: in each of the last synchronisations it grew, to more than twice the first.
  bool grows(const AverageReport& report, double learning_rate);

 private:
  static constexpr size_t kRounds = 5;
  std::deque<double> last_{};
  bool said_ = false;
};

// Note [When rounds come]
// A pure function of the attempted steps, so that ranks that were away for a while agree with the
// others as soon as their counts do. A synchronisation is due every H steps, counted from the step
// in which the scope becomes local. With P fragments each has its own time, and the last one is due
// when all would be.
class RoundSchedule {
 public:
  explicit RoundSchedule(const LocalSGDOptions& options) : options_(options) {}
  // H of the synchronisation period that begins after `step`. Throws InputError for H < 1.
  int64_t period(int64_t step) const;
  // What is due after `step`: Averager::kAll, a fragment, or kNothing.
  int64_t due(int64_t step, int64_t fragments);
  static constexpr int64_t kNothing = -2;

 private:
  const LocalSGDOptions& options_;
  int64_t begin_ = -1; // the last period that was computed
  int64_t end_ = -1;
};

} // namespace detail

class LocalSGD::Impl final : public detail::LocalScope {
 public:
  using Clock = std::chrono::steady_clock;

  Impl(std::shared_ptr<detail::AcceleratorCore> accelerator, torch::nn::Module& module,
       LocalSGDOptions settings);

  // local_sgd.cpp
  size_t model() const override { return index; }
  void loaded() override;
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;
  void wait_for_peers() override;

  bool step();
  void synchronize();
  void finish();
  // Without an average; `unwinding`: the peers learn that this rank failed.
  void leave(bool unwinding) noexcept;
  bool is_active() const { return active; }
  int64_t count() const { return progress.steps; }
  LocalSGDReport current_report();

 private:
  // local_sgd.cpp
  void open();
  void log_summary() const;
  double learning_rate() const;

  // local_sgd_rounds.cpp
  // What ranks send to those without batches about a round.
  enum class Part { whole, start, finish, inner };
  bool count_step();
  void begin_local();
  // Announces and makes it, with the ranks that are left where some are lost.
  void make_round(Part part, int64_t fragment);
  void announce(Part part, int64_t fragment);
  WindowTotals agree(WindowTotals mine);
  void join_round(int64_t code);
  std::vector<int64_t> clocks() const;
  void take_clocks(const int64_t* most);
  void run(Part part, int64_t fragment);
  void begin_round(int64_t fragment, bool delayed);
  void close_round(int64_t fragment);
  void committed();
  void average_group();
  void open_groups();
  void close_groups();
  double take_weight(int64_t fragment);
  void report_round();

  // local_sgd_recovery.cpp
  bool survives() const;
  // After a CommunicationError: true if the ranks that are left continue as a smaller world.
  // Collective over them.
  bool recover();
  void finish_moments();
  void settle_round();
  void settle_clocks();
  void open_parts();

  std::shared_ptr<detail::AcceleratorCore> core;
  LocalSGDOptions options;
  detail::RoundSchedule schedule;
  size_t index = 0;
  bool active = false; // from open() to the end
  bool local = false; // windows reduce nothing
  std::vector<std::shared_ptr<detail::OptimizerState>> optimizers{};
  std::shared_ptr<Communicator> copies{}; // ranks that average
  std::shared_ptr<Communicator> transfers{}; // the same ranks; with a delay another group
  std::unique_ptr<Averager> averager{};
  std::shared_ptr<Communicator> group{}; // hierarchical: this rank's
  std::unique_ptr<Averager> group_averager{};
  std::unique_ptr<detail::AveragedBuffers> buffers{};
  std::unique_ptr<detail::AveragedMoments> moments{};
  detail::SpreadWatch watch{};
  bool unread = false; // the last round's spread
  WindowControl control;
  uint64_t read = 0; // WindowShared::read and range of the first batch
  std::string range{};

  // Of a round that may break.
  int64_t closing = kNothing; // what is being averaged, not yet closed
  static constexpr int64_t kNothing = detail::RoundSchedule::kNothing;
  double taken_group_weight = 0;
  RoundOutcome outcome = RoundOutcome::none; // of the last recovery
  int64_t ends = 0; // times that all ranks waited
  std::vector<int64_t> end_clocks{}; // all ranks' at the last of them
  bool ended = false; // the last recovery was one of them

  // What a state has of the scope itself.
  struct Progress {
    int64_t steps = 0; // the clock
    int64_t averaged_at = 0; // its value when all was averaged last
    int64_t finish_at = 0; // of a round that was started
    std::vector<double> own_weight{}; // of this rank since then. [fragment]
    std::vector<double> taken_weight{}; // own_weight's, not committed. [fragment]
    double group_weight = 0; // of this rank since its group's average
    int64_t rounds = 0;
    int64_t inner_rounds = 0;
    double learning_rate = 0; // at the round's beginning
    NLOHMANN_DEFINE_TYPE_INTRUSIVE(Progress, steps, averaged_at, finish_at, own_weight,
                                   taken_weight, group_weight, rounds, inner_rounds, learning_rate)
  };
  Progress progress{};
  uint64_t counted = 0; // the last window that was
  double last_learning_rate = 0; // of the round before
  LocalSGDReport report{}; // without steps and rounds
  Clock::time_point opened = Clock::now();
};

} // namespace hasten
