// One rank of hasten compare: runs of the Trainer with one strategy under the memory limit.
#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>

#include "classifier.h"
#include "compare.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "hasten/comm/backend.h"
#include "hasten/core/device.h"
#include "hasten/core/memory.h"
#include "run.h"

namespace hasten {

namespace detail {

/// Steps before the timed ones. The first one allocates the optimizer's state.
constexpr int64_t kWarmUp = 2;

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Random samples of one length.
class MadeUpSamples final : public Dataset {
 public:
  MadeUpSamples(PreTrainedModel model, int64_t tokens, int64_t size)
      : model_(std::move(model)), tokens_(tokens), size_(size) {}
  int64_t size() const override { return size_; }
  int64_t length(int64_t) const override { return tokens_; }
  Batch collate(const std::vector<int64_t>& indices) const override {
    Batch batch = made_up_batch(*model_, std::ssize(indices), tokens_);
    batch.indices = indices;
    return batch;
  }

 private:
  const PreTrainedModel model_;
  const int64_t tokens_;
  const int64_t size_;
};

/// What a rank's steps after the first ones cost.
struct StepMeter final : TrainerCallback {
  explicit StepMeter(at::Device of) : device(of) {}
  void on_step_end(const StepProgress& progress) override {
    synchronize(device);
    const auto now = std::chrono::steady_clock::now();
    const double waited = seconds_waited();
    if (progress.global_step > kWarmUp) {
      seconds.push_back(std::chrono::duration<double>(now - start).count());
      shares.push_back((waited - waited_before) / seconds.back());
    } else {
      sent_before = bytes_sent();
    }
    sent = bytes_sent() - sent_before;
    start = now;
    waited_before = waited;
  }
  void on_epoch_end(const EpochReport& report) override { peak_bytes = report.peak_tensor_bytes; }

  const at::Device device;
  std::vector<double> seconds{}, shares{}; // [step]
  int64_t sent = 0;
  /// Of the run, the maximum over ranks.
  int64_t peak_bytes = 0;
  double waited_before = 0;
  int64_t sent_before = 0;
  std::chrono::steady_clock::time_point start{};
};

/// The least of the ranks' shares of memory. Collective.
int64_t least_share(const CompareCommand& command, Communicator& communicator) {
  const at::Device device = communicator.options().device;
  at::Tensor share = at::tensor(memory_share(device, command.arguments.device));
  communicator.all_reduce(share, ReduceOp::MIN, "compare: a process's memory");
  if (const auto bytes = share.item<int64_t>(); bytes > 0) {
    return bytes;
  }
  throw InputError("cli::compare", "cannot find out how much memory is free",
                   "--memory-limit BYTES");
}

class CompareRun {
 public:
  /// `trying`: the batch size at which memory runs out, if it does.
  CompareRun(const CompareCommand& command, std::shared_ptr<Communicator> communicator,
             CompareState& state, int64_t& trying)
      : command_(command),
        arguments_(command.arguments),
        communicator_(std::move(communicator)),
        state_(state),
        trying_(trying) {
    arguments_.strategy = state.strategy;
    arguments_.shard_size = state.strategy == Strategy::hsdp ? arguments_.shard_size : 0;
    arguments_.save_strategy = SaveStrategy::no;
    arguments_.disable_tqdm = true;
  }

  void run() {
    const int64_t accumulation = command_.arguments.gradient_accumulation_steps;
    const auto time = [&](int64_t rows) {
      if (rows != state_.timing.rows) { // else nothing fits, or it has been timed
        state_.timing = train(rows, accumulation, kWarmUp + command_.steps);
      }
    };
    while (const int64_t rows = state_.search.next_rows()) {
      if (state_.search.foresees_shortage(rows)) {
        time(state_.search.largest_rows()); // the attempt may end this world
      }
      // More than two micro-batches take no more memory.
      train(rows, std::min<int64_t>(2, accumulation), kWarmUp);
    }
    time(state_.search.largest_rows());
  }

 private:
  PreTrainedModel make_model() const {
    auto model = AutoModelForSequenceClassification::from_pretrained(
        command_.model, {.vocab_size = command_.vocab_size});
    const int64_t tokens = arguments_.max_length;
    const int64_t most = model->config().max_tokens();
    if (tokens < 2 || tokens > most) {
      throw InputError("cli::compare", "--max-length=" + std::to_string(tokens),
                       "2 to the model's " + std::to_string(most) + " tokens");
    }
    return model;
  }

  /// A run of the Trainer. Collective.
  BatchTiming train(int64_t rows, int64_t accumulation, int64_t steps) {
    trying_ = rows;
    const at::Device device = communicator_->options().device;
    reset_peak_memory(device);
    PreTrainedModel model{nullptr};
    agree_on(*communicator_, "compare::make_model", [&] { model = make_model(); });
    arguments_.per_device_train_batch_size = rows;
    arguments_.gradient_accumulation_steps = accumulation;
    arguments_.max_steps = steps;
    const int64_t samples = rows * accumulation * command_.nproc; // of a step
    const auto accelerator =
        std::make_shared<Accelerator>(accelerator_options(arguments_), communicator_);
    Trainer trainer(
        model.ptr(), find_task("text-classification").loss(model, ProblemType::single_label),
        arguments_, std::make_shared<MadeUpSamples>(model, arguments_.max_length, samples * steps),
        nullptr, {}, accelerator);
    const auto meter = std::make_shared<StepMeter>(device);
    trainer.add_callback(meter);
    const int64_t peak_before = memory_stats(device).peak_bytes; // of building the model
    trainer.train();
    arguments_.precision = trainer.arguments().precision; // if it was automatic
    arguments_.bf16 = trainer.arguments().bf16;
    accelerator->end_training();
    note_peak(rows, meter->peak_bytes);
    if (meter->seconds.empty()) {
      return {};
    }
    at::Tensor most = at::tensor(
        {median_of(meter->seconds), median_of(meter->shares),
         static_cast<double>(std::max(peak_before, meter->peak_bytes)),
         static_cast<double>(meter->sent) / static_cast<double>(std::ssize(meter->seconds))},
        at::kDouble);
    communicator_->all_reduce(most, ReduceOp::MAX, "compare: a run");
    const double* of_ranks = most.const_data_ptr<double>();
    return {.rows = rows,
            .samples_per_second = static_cast<double>(samples) / of_ranks[0],
            .step_seconds = of_ranks[0],
            .exposed_share = of_ranks[1],
            .sent_bytes = static_cast<int64_t>(of_ranks[3]),
            .peak_bytes = static_cast<int64_t>(of_ranks[2])};
  }

  void note_peak(int64_t rows, int64_t peak) {
    BatchSearch& search = state_.search;
    if (peak > search.limit_bytes) { // on devices only
      throw Error("cli::compare",
                  "a peak of " + format_bytes(peak) + " on " +
                      communicator_->options().device.str() + " exceeds the limit of " +
                      format_bytes(search.limit_bytes),
                  {}, {}, ErrorKind::out_of_memory);
    }
    if (rows > search.largest_rows()) {
      search.trials.push_back({rows, peak});
    }
  }

  const CompareCommand& command_;
  TrainingArguments arguments_;
  const std::shared_ptr<Communicator> communicator_;
  CompareState& state_;
  int64_t& trying_;
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
  const bool shared = moves_host_memory(command.arguments.ddp_backend);
  const auto communicator = Communicator::create(
      world, {.device = detail::choose_device(command.arguments.device, world, shared).device,
              .backend = command.arguments.ddp_backend});
  try {
    int64_t& limit_bytes = state.search.limit_bytes;
    if (limit_bytes == 0) {
      limit_bytes = detail::least_share(command, *communicator);
    }
    std::optional<MemoryLimit> limit;
    if (communicator->options().device.is_cpu()) {
      limit.emplace(limit_bytes);
    }
    detail::CompareRun(command, communicator, state, trying).run();
    if (communicator->is_main()) {
      write_compare_state(file, state);
    }
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
