// One rank of hasten compare: trains a classifier with one strategy under the memory limit.
#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>

#include "classifier.h"
#include "compare.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "hasten/comm/step_prediction.h"
#include "hasten/core/device.h"
#include "hasten/core/memory.h"
#include "hasten/optim/make_optimizer.h"
#include "hasten/optim/param_groups.h"
#include "run.h"

namespace hasten {

namespace detail {

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

AcceleratorOptions compared_options(const CompareCommand& command, Strategy strategy) {
  AcceleratorOptions options = accelerator_options(command.arguments);
  options.mixed_precision = command.arguments.effective_precision();
  options.strategy = strategy;
  options.shard_size = strategy == Strategy::hsdp ? options.shard_size : 0;
  return options;
}

/// The least of the ranks' shares of memory. Collective.
int64_t least_share(const CompareCommand& command, Accelerator& accelerator) {
  at::Tensor share = at::tensor(memory_share(accelerator.device(), command.arguments.device));
  accelerator.communicator()->all_reduce(share, ReduceOp::MIN, "compare: a process's memory");
  if (const auto bytes = share.item<int64_t>(); bytes > 0) {
    return bytes;
  }
  throw InputError("cli::compare", "cannot find out how much memory is free",
                   "--memory-limit BYTES");
}

class CompareRun {
 public:
  /// `trying`: the batch size at which memory runs out, if it does. Collective.
  CompareRun(const CompareCommand& command, Accelerator& accelerator, StepRecorder& recorder,
             const CostModel& costs, CompareState& state, int64_t& trying)
      : arguments_(command.arguments),
        command_(command),
        accelerator_(accelerator),
        recorder_(recorder),
        costs_(costs),
        state_(state),
        trying_(trying) {
    agree_on(*accelerator_.communicator(), "compare::make_model", [this] { make_model(); });
    model_->train();
    if (arguments_.gradient_checkpointing) {
      gradient_checkpointing_enable(model_, {.mode = arguments_.gradient_checkpointing});
    }
    optimizer_.emplace(std::get<1>(accelerator_.prepare(model_, torch_optimizer_)));
    meet(); // includes the peak of building the model
  }

  void run() {
    while (const int64_t rows = state_.search.next_rows()) {
      if (state_.search.foresees_shortage(rows)) {
        time(state_.search.largest_rows()); // the attempt may end this world
      }
      attempt(rows);
    }
    time(state_.search.largest_rows());
  }

 private:
  void make_model() {
    model_ = AutoModelForSequenceClassification::from_pretrained(
        command_.model, {.vocab_size = command_.vocab_size});
    const int64_t tokens = arguments_.max_length;
    const int64_t most = model_->config().max_tokens();
    if (tokens < 2 || tokens > most) {
      throw InputError("cli::compare", "--max-length=" + std::to_string(tokens),
                       "2 to the model's " + std::to_string(most) + " tokens");
    }
    loss_ = find_task("text-classification").loss(model_, ProblemType::single_label);
    torch_optimizer_ =
        make_optimizer(spelling(arguments_.optim), decay_groups(*model_, arguments_.weight_decay),
                       optimizer_settings(arguments_));
  }

  /// Two steps, because the first one allocates the optimizer's state. More than two
  /// micro-batches take no more memory.
  void attempt(int64_t rows) {
    reset_peak_memory(device_);
    const Batch batch = begin(rows, std::min<int64_t>(2, arguments_.gradient_accumulation_steps));
    update(batch);
    update(batch);
    const auto peak = static_cast<int64_t>(*meet().data_ptr<double>());
    if (const int64_t limit = state_.search.limit_bytes; peak > limit) { // on devices only
      throw Error("cli::compare",
                  "a peak of " + format_bytes(peak) + " on " + device_.str() +
                      " exceeds the limit of " + format_bytes(limit),
                  {}, {}, ErrorKind::out_of_memory);
    }
    state_.search.trials.push_back({rows, peak});
  }

  void time(int64_t rows) {
    if (rows == state_.timing.rows) {
      return; // nothing fits, or it has been timed
    }
    const int64_t accumulation = arguments_.gradient_accumulation_steps;
    const Batch batch = begin(rows, accumulation);
    update(batch);
    std::vector<double> seconds, shares, predicted, predicted_shares;
    for (int64_t step = 0; step < command_.steps; ++step) {
      accelerator_.wait_for_everyone();
      const double waited = seconds_waited();
      const auto start = std::chrono::steady_clock::now();
      update_and_synchronize(batch);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      seconds.push_back(time.count());
      shares.push_back((seconds_waited() - waited) / time.count());
    }
    const at::Tensor numbers = meet(median_of(seconds), median_of(shares));
    for (int64_t step = 0; step < command_.steps; ++step) {
      accelerator_.wait_for_everyone();
      const StepPrediction of_step =
          predict_step(recorder_.record([&] { update_and_synchronize(batch); }), costs_)
              .at(static_cast<size_t>(accelerator_.process_index()));
      predicted.push_back(of_step.seconds);
      predicted_shares.push_back(of_step.exposed_seconds / of_step.seconds);
    }
    const at::Tensor foretold = meet(median_of(predicted), median_of(predicted_shares));
    const double* slowest = numbers.const_data_ptr<double>();
    const double* slowest_foretold = foretold.const_data_ptr<double>();
    state_.timing = {.rows = rows,
                     .samples_per_second =
                         static_cast<double>(rows * accumulation * command_.nproc) / slowest[1],
                     .step_seconds = slowest[1],
                     .exposed_share = slowest[2],
                     .predicted_seconds = slowest_foretold[1],
                     .predicted_exposed_share = slowest_foretold[2],
                     .peak_bytes = peak_bytes_};
  }

  Batch begin(int64_t rows, int64_t accumulation) {
    trying_ = rows;
    accelerator_.set_gradient_accumulation_steps(accumulation);
    return made_up_batch(*model_, rows, arguments_.max_length).to(device_);
  }

  void update_and_synchronize(const Batch& batch) {
    update(batch);
    synchronize(device_);
  }

  /// The maximum over ranks of each: peak since its reset, seconds, share.
  at::Tensor meet(double seconds = 0, double share = 0) {
    const auto peak = static_cast<double>(memory_stats(device_).peak_bytes);
    at::Tensor numbers = at::tensor({peak, seconds, share}, at::kDouble);
    accelerator_.communicator()->all_reduce(numbers, ReduceOp::MAX, "compare: a batch that fits");
    peak_bytes_ = std::max(peak_bytes_, static_cast<int64_t>(*numbers.data_ptr<double>()));
    return numbers;
  }

  /// Same as the Trainer's.
  void update(const Batch& batch) {
    do {
      throw_if_interrupted();
      auto window = accelerator_.accumulate(model_);
      const LossOutput loss = loss_(batch);
      accelerator_.backward(loss.loss_sum, loss.weight);
      if (accelerator_.sync_gradients()) {
        if (arguments_.max_grad_norm > 0) {
          accelerator_.clip_grad_norm_(model_, arguments_.max_grad_norm);
        }
        optimizer_->step();
        optimizer_->zero_grad();
      }
    } while (!accelerator_.sync_gradients());
  }

  const TrainingArguments& arguments_;
  const CompareCommand& command_;
  Accelerator& accelerator_;
  StepRecorder& recorder_;
  const CostModel& costs_;
  const at::Device device_ = accelerator_.device();
  CompareState& state_;
  int64_t& trying_;
  PreTrainedModel model_{nullptr};
  LossFunction loss_{};
  std::shared_ptr<torch::optim::Optimizer> torch_optimizer_{};
  std::optional<PreparedOptimizer<torch::optim::Optimizer>> optimizer_{};
  int64_t peak_bytes_ = 0;
};

} // namespace detail

int run_command(const CompareCommand& command) {
  const char* file = std::getenv(CompareState::kVariable);
  if (file == nullptr) {
    throw InputError("cli::compare", std::string(CompareState::kVariable) + " is not set",
                     "a start by hasten compare, which starts a world for each strategy",
                     "start hasten compare alone, without another launcher");
  }
  CompareState state = read_compare_state(file);
  const int64_t next = state.search.next_rows();
  int64_t trying = next > 0 ? next : state.search.largest_rows();
  install_interrupt_handlers();
  const World world = world_from_environment();
  const std::string& backend = command.arguments.ddp_backend;
  const auto communicator = Communicator::create(
      world,
      {.device = detail::choose_device(command.arguments.device, world, backend == "gloo").device,
       .backend = backend});
  try {
    const CostModel costs = measure_cost_model(*communicator); // before the limit of memory
    reset_peak_memory(communicator->options().device);
    const auto recorder = std::make_shared<StepRecorder>(communicator);
    Accelerator accelerator(detail::compared_options(command, state.strategy), recorder);
    int64_t& limit_bytes = state.search.limit_bytes;
    if (limit_bytes == 0) {
      limit_bytes = detail::least_share(command, accelerator);
    }
    std::optional<MemoryLimit> limit;
    if (accelerator.device().is_cpu()) {
      limit.emplace(limit_bytes);
    }
    detail::CompareRun(command, accelerator, *recorder, costs, state, trying).run();
    if (accelerator.is_main_process()) {
      write_compare_state(file, state);
    }
    accelerator.end_training();
    communicator->close();
    return kExitOk;
  } catch (const SilentExit&) {
    throw;
  } catch (const std::exception& error) {
    throw_if_interrupted(); // a peer that got the signal first looks like a failed one
    communicator->abort(error);
    // If a peer or a thread of the group runs out of memory, the error is a CommunicationError.
    if (error_kind(error) != ErrorKind::out_of_memory) {
      throw;
    }
    state.search.ran_out(trying);
    state.timing = state.timing.rows < trying ? state.timing : BatchTiming{};
    write_compare_state(file, state);
    return kExitOutOfMemory;
  }
}

} // namespace hasten
