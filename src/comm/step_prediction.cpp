// Records when a step communicates, and replays it with the times of a cost model.
#include "hasten/comm/step_prediction.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "group_core.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"

namespace hasten {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepTrace::Operation, kind, bytes, queue)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepTrace::Event, seconds, operation, starts)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepTrace, operations, events, seconds)

namespace detail {

struct StepRecording {
  std::mutex mutex; // backward may start operations in other threads
  std::atomic<bool> on = false;
  int64_t steps = 0; // begun so far
  int queues = 0;
  CommClock::time_point began{}; // later by each operation
  StepTrace trace{};

  double seconds() const { return std::chrono::duration<double>(CommClock::now() - began).count(); }
};

/// Of an operation that has ended.
struct RecordedWork final : Work::State {
  void wait() override {
    const std::lock_guard<std::mutex> lock(recording->mutex);
    if (recording->on && recording->steps == step) {
      recording->trace.events.push_back({recording->seconds(), operation, false});
    }
  }
  bool done() const noexcept override { return true; }
  CommClock::time_point ended() const noexcept override { return end; }

  std::shared_ptr<StepRecording> recording{};
  int64_t step = 0;
  size_t operation = 0;
  CommClock::time_point end{};
};

/// All ranks of a step that is replayed. An operation runs when all ranks have started it.
class StepReplay {
 public:
  StepReplay(const std::vector<StepTrace>& traces, const CostModel& model)
      : model_(model), share_(std::max(0.05, 1 - model.stolen / model.stretch)) {
    for (const StepTrace& trace : traces) {
      ranks_.push_back({.trace = &trace});
    }
    for (const StepTrace::Operation& operation : traces.at(0).operations) {
      left_.push_back(model.seconds(operation.kind, operation.bytes));
    }
    started_.resize(left_.size());
  }

  std::vector<StepPrediction> run() {
    const double communication = std::accumulate(left_.begin(), left_.end(), 0.0);
    while (take_events()) {
      advance();
    }
    return mapped(ranks_, [&](const Rank& rank) {
      return StepPrediction{rank.seconds, rank.exposed, communication};
    });
  }

 private:
  struct Rank {
    const StepTrace* trace = nullptr;
    size_t next = 0; // event
    double computed = 0;
    double exposed = 0;
    double seconds = 0; // until it ended
    bool waits = false; // for the operation of the last event

    double to_compute() const {
      return (next < trace->events.size() ? trace->events[next].seconds : trace->seconds) -
             computed;
    }
    bool ended() const { return !waits && next == trace->events.size() && to_compute() <= 0; }
  };

  bool has_ended(size_t operation) const { return left_.at(operation) <= 0; }

  /// Takes all events that are due. False if all ranks have ended.
  bool take_events() {
    for (Rank& rank : ranks_) {
      const std::vector<StepTrace::Event>& events = rank.trace->events;
      rank.waits = rank.waits && !has_ended(events[rank.next - 1].operation);
      while (!rank.waits && rank.next < events.size() && rank.to_compute() <= 0) {
        const StepTrace::Event& event = events[rank.next++];
        rank.waits = !event.starts && !has_ended(event.operation);
        if (event.starts && ++started_.at(event.operation) == ranks_.size()) {
          queues_[rank.trace->operations[event.operation].queue].push_back(event.operation);
        }
      }
    }
    return !std::ranges::all_of(ranks_, &Rank::ended);
  }

  /// Until the next event, or the end of a transfer.
  void advance() {
    bool computes = false;
    double seconds = std::numeric_limits<double>::infinity();
    const double share = queues_.empty() ? 1 : share_;
    for (const Rank& rank : ranks_) {
      if (!rank.waits && !rank.ended()) {
        computes = true;
        seconds = std::min(seconds, rank.to_compute() / share);
      }
    }
    // The first transfers of all queues together are as fast as one.
    const double speed = (computes ? 1 / model_.stretch : 1) /
                         static_cast<double>(std::max<size_t>(1, queues_.size()));
    for (const auto& [queue, operations] : queues_) {
      seconds = std::min(seconds, left_[operations.front()] / speed);
    }
    if (seconds > std::numeric_limits<double>::max()) {
      throw InputError("comm::predict_step", "ranks wait for operations that others never start",
                       "the same operations on every rank", "record the same step on all ranks");
    }
    constexpr double kRounding = 1e-12;
    for (Rank& rank : ranks_) {
      if (rank.ended()) {
        continue;
      }
      rank.seconds += seconds;
      if (rank.waits) {
        rank.exposed += seconds;
      } else {
        rank.computed += std::min(rank.to_compute(), seconds * share + kRounding);
      }
    }
    for (auto& [queue, operations] : queues_) {
      if ((left_[operations.front()] -= seconds * speed + kRounding) <= 0) {
        operations.pop_front();
      }
    }
    std::erase_if(queues_, [](const auto& queue) { return queue.second.empty(); });
  }

  const CostModel& model_;
  const double share_; // of a second in which a transfer runs: what the computation has
  std::vector<Rank> ranks_{};
  std::vector<double> left_{}; // [operation] seconds, alone
  std::vector<size_t> started_{}; // [operation] by how many ranks
  std::map<int, std::deque<size_t>> queues_{}; // of operations that all have started
};

} // namespace detail

std::vector<StepPrediction> predict_step(const std::vector<StepTrace>& ranks,
                                         const CostModel& model) {
  return detail::StepReplay(ranks, model).run();
}

StepRecorder::StepRecorder(std::shared_ptr<Communicator> inner)
    : StepRecorder(std::move(inner), std::make_shared<detail::StepRecording>()) {}

StepRecorder::StepRecorder(std::shared_ptr<Communicator> inner,
                           std::shared_ptr<detail::StepRecording> recording)
    : ForwardingCommunicator(std::move(inner)),
      recording_(std::move(recording)),
      queue_(recording_->queues++) {}

std::vector<StepTrace> StepRecorder::record(const std::function<void()>& step) {
  {
    const std::lock_guard<std::mutex> lock(recording_->mutex);
    recording_->trace = {};
    ++recording_->steps;
    recording_->began = detail::CommClock::now();
    recording_->on = true;
  }
  step();
  {
    const std::lock_guard<std::mutex> lock(recording_->mutex);
    recording_->trace.seconds = recording_->seconds();
    recording_->on = false;
  }
  return mapped(all_gather_object(recording_->trace, "recorded step"),
                [](const nlohmann::json& trace) { return trace.get<StepTrace>(); });
}

Work StepRecorder::start(const Collective& what) {
  auto work = std::make_shared<detail::RecordedWork>();
  {
    const std::lock_guard<std::mutex> lock(recording_->mutex);
    if (recording_->on) {
      StepTrace& trace = recording_->trace;
      work->recording = recording_;
      work->step = recording_->steps;
      work->operation = trace.operations.size();
      trace.events.push_back({recording_->seconds(), work->operation, true});
      trace.operations.push_back({what.kind, bytes_of(what), queue_});
    }
  }
  const auto start = detail::CommClock::now();
  Work inner = inner_->start(what);
  if (!work->recording) {
    return inner;
  }
  inner.wait();
  work->end = detail::CommClock::now();
  const std::lock_guard<std::mutex> lock(recording_->mutex);
  recording_->began += work->end - start;
  return Work(std::move(work));
}

Work StepRecorder::start_together(const std::vector<Collective>& what) {
  return recording_->on ? Communicator::start_together(what) : inner_->start_together(what);
}

std::shared_ptr<Communicator> StepRecorder::duplicate(const CommunicatorOptions& options) {
  return std::shared_ptr<StepRecorder>(new StepRecorder(inner_->duplicate(options), recording_));
}

std::shared_ptr<Communicator> StepRecorder::new_group(const std::vector<int>& ranks,
                                                      const CommunicatorOptions& options) {
  return std::shared_ptr<StepRecorder>(
      new StepRecorder(inner_->new_group(ranks, options), recording_));
}

} // namespace hasten
