// Predicts the time of a training step from its computation and a cost model.
//
//   auto recorder = std::make_shared<hasten::StepRecorder>(communicator);
//   hasten::Accelerator accelerator(options, recorder);  // any strategy
//   …
//   const hasten::CostModel costs = hasten::measure_cost_model(*communicator);
//   hasten::predict_step(recorder->record([&] { train_one_step(); }), costs).seconds;
//
// Threading and lifetime: as the communicator, which it shares. Design: docs/design/communication.md
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "hasten/comm/cost_model.h"
#include "hasten/comm/forwarding_communicator.h"

namespace hasten {

namespace detail {
struct StepRecording;
}

/// When a rank's step started operations, and when it waited for them. Seconds are those since the
/// step began, without those of the operations.
struct StepTrace {
  struct Operation {
    Collective::Kind kind = Collective::Kind::all_reduce;
    int64_t bytes = 0;
    /// Operations of one queue (one group) run in their order.
    int queue = 0;
  };
  struct Event {
    double seconds = 0;
    size_t operation = 0; // index into `operations`
    bool starts = true; // else waits
  };

  std::vector<Operation> operations{};
  std::vector<Event> events{};
  double seconds = 0;
};

struct StepPrediction {
  double seconds = 0;
  /// The part of it in which the rank waits for transfers.
  double exposed_seconds = 0;
  /// Of all transfers, each alone.
  double communication_seconds = 0;
};

/// Replays the ranks' traces with the model's times for the operations, which begin when all ranks
/// have started them. While a transfer runs, the computation slows down as the model says
/// (CostModel::stretch and stolen). Local.
/// Throws InputError if the ranks' operations differ.
/// [rank]
std::vector<StepPrediction> predict_step(const std::vector<StepTrace>& ranks,
                                         const CostModel& model);

/// Passes operations on. In a recorded step each one ends before its start returns, and that time is
/// left out, so the record has the computation alone. Groups that are made from a recorder record into
/// the same trace.
class StepRecorder final : public ForwardingCommunicator {
 public:
  explicit StepRecorder(std::shared_ptr<Communicator> inner);

  /// Calls `step`, which computes what it computes without a recorder, and returns the traces of all
  /// ranks. Collective, one more exchange.
  std::vector<StepTrace> record(const std::function<void()>& step);

  Work start(const Collective& what) override;
  Work start_together(const std::vector<Collective>& what) override;
  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override;
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                          const CommunicatorOptions& options) override;

 private:
  StepRecorder(std::shared_ptr<Communicator> inner,
               std::shared_ptr<detail::StepRecording> recording);

  const std::shared_ptr<detail::StepRecording> recording_;
  const int queue_;
};

} // namespace hasten
