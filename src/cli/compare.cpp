// One rank of hasten compare: real updates of a classifier under a strategy and a limit.
#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "agreement.h"
#include "checks.h"
#include "classifier.h"
#include "compare.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/process.h"
#include "hasten/core/memory.h"
#include "hasten/optim/make_optimizer.h"
#include "hasten/optim/param_groups.h"
#include "run.h"

namespace hasten {

namespace detail {

CompareTask compare_task() {
  const char* text = std::getenv(CompareTask::kVariable);
  if (text == nullptr) {
    throw InputError("cli::compare", std::string(CompareTask::kVariable) + " is not set",
                     "hasten compare, which starts a world for each strategy",
                     "start hasten compare alone, without another launcher");
  }
  return parse_json("cli::compare", CompareTask::kVariable, text).get<CompareTask>();
}

std::unique_ptr<torch::optim::Optimizer> compared_optimizer(const TrainingArguments& arguments,
                                                            const torch::nn::Module& model) {
  return make_optimizer(spelling(arguments.optim), decay_groups(model, arguments.weight_decay),
                        optimizer_settings(arguments));
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

AcceleratorOptions compared_options(const CompareCommand& command, Strategy strategy) {
  AcceleratorOptions options = accelerator_options(command.arguments);
  options.mixed_precision = command.arguments.effective_precision();
  options.cpu = true; // where the meter counts
  options.strategy = strategy;
  options.shard_size = strategy == Strategy::hsdp ? options.shard_size : 0;
  return options;
}

LoadedBert compared_model(const CompareCommand& command) {
  check_inputs(command);
  LoadBertOptions options;
  options.vocab_size = command.vocab_size;
  LoadedBert bert = load_bert_classifier(command.model, options);
  const int64_t tokens = command.arguments.max_length;
  if (tokens < 2 || tokens > bert.config.max_position_embeddings) {
    throw InputError(
        "cli::compare", "--max-length=" + std::to_string(tokens),
        "2 to the model's " + std::to_string(bert.config.max_position_embeddings) + " tokens");
  }
  compared_optimizer(command.arguments, *bert.model); // its arguments
  return bert;
}

class CompareRun {
 public:
  CompareRun(const CompareCommand& command, Accelerator& accelerator, LoadedBert bert,
             CompareOutcome& outcome)
      : command_(command),
        accelerator_(accelerator),
        config_(bert.config),
        model_(bert.model),
        loss_(classification_loss(bert.model)),
        torch_optimizer_(compared_optimizer(command.arguments, *bert.model)),
        outcome_(outcome) {
    model_->train();
    if (command.arguments.gradient_checkpointing) {
      gradient_checkpointing_enable(model_, {.mode = command.arguments.gradient_checkpointing});
    }
    optimizer_.emplace(std::get<1>(accelerator_.prepare(model_, torch_optimizer_)));
  }

  void run() {
    meet(); // what building the model took
    BatchSearch& search = outcome_.search;
    while (const int64_t rows = search.next_rows()) {
      if (search.foresees_shortage(rows)) {
        time(search.largest_rows()); // nobody may be here afterwards
      }
      attempt(rows);
    }
    time(search.largest_rows());
  }

 private:
  /// The first update brings the optimizer's state, beside which the next one runs.
  /// More micro-batches than two take no more memory.
  void attempt(int64_t rows) {
    outcome_.ran_out_rows = rows;
    accelerator_.set_gradient_accumulation_steps(
        std::min<int64_t>(2, command_.arguments.gradient_accumulation_steps));
    reset_peak_memory();
    const Batch batch = made_up_batch(config_, rows, command_.arguments.max_length);
    update(batch);
    update(batch);
    const int64_t peak = meet().at("peak").get<int64_t>();
    outcome_.search.fitted({rows, peak});
    outcome_.ran_out_rows = 0;
  }

  void time(int64_t rows) {
    if (rows == 0 || (outcome_.timing && outcome_.timing->rows == rows)) {
      return;
    }
    outcome_.ran_out_rows = rows;
    const int64_t accumulation = command_.arguments.gradient_accumulation_steps;
    accelerator_.set_gradient_accumulation_steps(accumulation);
    const Batch batch = made_up_batch(config_, rows, command_.arguments.max_length);
    update(batch);
    std::vector<double> seconds, shares;
    for (int64_t step = 0; step < command_.steps; ++step) {
      accelerator_.wait_for_everyone();
      const auto start = std::chrono::steady_clock::now();
      update(batch);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      seconds.push_back(time.count());
      shares.push_back(accelerator_.last_window().exposed_seconds / time.count());
    }
    const nlohmann::json slowest =
        meet({{"seconds", median_of(seconds)}, {"share", median_of(shares)}});
    BatchTiming timing;
    timing.rows = rows;
    timing.step_seconds = slowest.at("seconds").get<double>();
    timing.exposed_share = slowest.at("share").get<double>();
    timing.samples_per_second =
        static_cast<double>(rows * accumulation * command_.nproc) / timing.step_seconds;
    timing.peak_bytes = outcome_.peak_bytes;
    outcome_.timing = timing;
    outcome_.ran_out_rows = 0;
  }

  /// The largest of each number over ranks, of the peak since its reset too.
  nlohmann::json meet(nlohmann::json numbers = nlohmann::json::object()) {
    numbers["peak"] = memory_stats().peak_bytes;
    for (const auto& theirs :
         accelerator_.communicator()->gather_json(numbers, "compare: a batch that fits")) {
      for (const auto& [name, number] : theirs.items()) {
        if (number > numbers.at(name)) {
          numbers[name] = number;
        }
      }
    }
    outcome_.peak_bytes = std::max(outcome_.peak_bytes, numbers.at("peak").get<int64_t>());
    return numbers;
  }

  /// As Trainer's.
  void update(const Batch& batch) {
    do {
      throw_if_interrupted();
      auto window = accelerator_.accumulate(model_);
      const LossOutput loss = loss_(batch);
      accelerator_.backward(loss.loss_sum, loss.weight);
      if (accelerator_.sync_gradients()) {
        if (command_.arguments.max_grad_norm > 0) {
          accelerator_.clip_grad_norm_(model_, command_.arguments.max_grad_norm);
        }
        optimizer_->step();
        optimizer_->zero_grad();
      }
    } while (!accelerator_.sync_gradients());
  }

  const CompareCommand& command_;
  Accelerator& accelerator_;
  BertConfig config_;
  BertForSequenceClassification model_;
  LossFunction loss_;
  std::shared_ptr<torch::optim::Optimizer> torch_optimizer_;
  std::optional<PreparedOptimizer<torch::optim::Optimizer>> optimizer_{};
  CompareOutcome& outcome_;
};

/// Of a memory that ran out in a thread of the group's, the group tells.
bool ran_out(const std::exception& error) {
  return is_out_of_memory(error) ||
         (dynamic_cast<const CommunicationError*>(&error) != nullptr &&
          std::string_view(error.what()).find("out of memory: ") != std::string_view::npos);
}

void train_compared(const CompareCommand& command, const CompareTask& task,
                    Communicator& communicator, Accelerator& accelerator, CompareOutcome& outcome) {
  const BatchSearch& search = task.search;
  outcome.ran_out_rows = search.next_rows() > 0 ? search.next_rows() : search.largest_rows();
  LoadedBert bert;
  agree_on(communicator, "compare: make the model", [&] { bert = compared_model(command); });
  CompareRun run(command, accelerator, std::move(bert), outcome);
  run.run();
}

} // namespace detail

int run_command(const CompareCommand& command) {
  const CompareTask task = detail::compare_task();
  install_interrupt_handlers();
  const MemoryLimit limit(task.limit_bytes);
  CompareOutcome outcome{.search = task.search};
  const World world = world_from_environment();
  const auto write = [&] {
    write_file_atomically(task.file_of(world.rank), nlohmann::json(outcome).dump());
  };
  const auto communicator = Communicator::create(world);
  try {
    Accelerator accelerator(detail::compared_options(command, task.strategy), communicator);
    detail::train_compared(command, task, *communicator, accelerator, outcome);
    write();
    accelerator.finish();
    communicator->close();
    return kExitOk;
  } catch (const SilentExit&) {
    throw;
  } catch (const std::exception& error) {
    throw_if_interrupted(); // a peer that saw the signal first looks failed
    const std::string what = error.what();
    communicator->abandon(what.substr(0, what.find('\n')));
    if (detail::ran_out(error)) {
      write();
      return kExitOutOfMemory;
    }
    outcome.ran_out_rows = 0;
    if (dynamic_cast<const CommunicationError*>(&error) == nullptr) {
      throw;
    }
    // Of a peer that ran out, mostly; who started us sees which.
    outcome.failure = what;
    write();
    throw SilentExit(kExitFailed);
  }
}

} // namespace hasten
