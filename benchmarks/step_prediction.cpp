// The time of a training step as predict_step() has it, and as it is, one thread a rank. Started by
// `hasten launch`.
//   step_prediction [shm|gloo] [--rows N] [--tokens N] [--rounds N]
// Measures the cost model, then for ddp, fsdp and local_sgd (an average after every 4th step) steps
// and recorded steps, in turns. Rank 0 prints a JSON line for each, with the median of the rounds:
// seconds of a step, measured and predicted, and the seconds that every rank waits. A rank that waits
// longer than another rank waits for the other's computation. That part is left out.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/comm/step_prediction.h"
#include "hasten/local_sgd/local_sgd.h"
#include "hasten/models/auto_model.h"
#include "hasten/optim/adamw.h"

namespace hasten {

using Numbers = std::map<std::string, int64_t>;
constexpr int64_t kLocalSteps = 4;

struct PredictionRow {
  std::vector<double> seconds{}, exposed{}, predicted{}, predicted_exposed{};
};

/// `update` makes `updates` optimizer steps.
static PredictionRow measure_prediction(StepRecorder& recorder, const CostModel& costs,
                                        int64_t rounds, int64_t updates,
                                        const std::function<void()>& update) {
  PredictionRow row;
  const auto count = static_cast<double>(updates);
  for (int64_t round = -2; round < rounds; ++round) {
    for (const bool record : {false, true}) {
      double waited = 0, seconds = 0;
      const auto turn = [&] {
        waited = -seconds_waited();
        const auto start = std::chrono::steady_clock::now();
        for (int64_t i = 0; i < updates; ++i) {
          update();
        }
        seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        waited += seconds_waited();
      };
      recorder.barrier("start");
      if (record) {
        const StepPrediction predicted =
            predict_step(recorder.record(turn), costs).at(static_cast<size_t>(recorder.rank()));
        seconds = predicted.seconds;
        waited = predicted.exposed_seconds;
      } else {
        turn();
      }
      if (round >= 0) {
        (record ? row.predicted : row.seconds).push_back(seconds / count);
        (record ? row.predicted_exposed : row.exposed).push_back(waited / count);
      }
    }
  }
  return row;
}

static void print_prediction(Communicator& group, const std::string& name,
                             const PredictionRow& row) {
  const auto usual = [&](const std::vector<double>& values, ReduceOp op) {
    const at::Tensor rounds = torch::tensor(values, torch::kDouble);
    group.all_reduce(rounds, op, "rounds");
    return rounds.median().item<double>();
  };
  const double seconds = usual(row.seconds, ReduceOp::MAX);
  const double predicted = usual(row.predicted, ReduceOp::MAX);
  const double exposed = usual(row.exposed, ReduceOp::MIN);
  const double predicted_exposed = usual(row.predicted_exposed, ReduceOp::MIN);
  if (group.is_main()) {
    const nlohmann::ordered_json json{{"strategy", name},
                                      {"backend", group.options().backend},
                                      {"ranks", group.world_size()},
                                      {"seconds", seconds},
                                      {"predicted_seconds", predicted},
                                      {"exposed_seconds", exposed},
                                      {"predicted_exposed_seconds", predicted_exposed}};
    std::printf("%s\n", json.dump().c_str());
    std::fflush(stdout);
  }
}

static void measure_strategy(const std::shared_ptr<Communicator>& group, const CostModel& costs,
                             const std::string& name, Numbers flags) {
  const auto recorder = std::make_shared<StepRecorder>(group);
  const bool local = name == "local_sgd";
  Accelerator accelerator(
      {.device = "cpu", .strategy = name == "fsdp" ? Strategy::fsdp : Strategy::ddp}, recorder);
  at::set_num_threads(1);
  torch::manual_seed(1);
  PreTrainedConfig config = AutoConfig::from_shape("bert-mini");
  auto model = AutoModelForSequenceClassification::from_config(config);
  model->train();
  AdamW adamw(model->parameters(), torch::optim::AdamWOptions(1e-4));
  auto [net, optimizer] = accelerator.prepare(model, adamw);
  const int64_t rows = flags["--rows"];
  const auto ids = torch::randint(1, 30'000, {rows, flags["--tokens"]});
  const auto mask = torch::ones_like(ids);
  const auto labels = torch::randint(0, 2, {rows});
  std::unique_ptr<LocalSGD> scope;
  if (local) {
    scope = std::make_unique<LocalSGD>(accelerator, net,
                                       LocalSGDOptions{.local_sgd_steps = kLocalSteps});
  }
  const auto update = [&, &net = net, &optimizer = optimizer] {
    {
      auto window = accelerator.accumulate(net);
      const auto loss =
          torch::nn::functional::cross_entropy(net->forward({ids, mask}).logits, labels);
      accelerator.backward(loss, static_cast<double>(1));
    }
    optimizer.step();
    optimizer.zero_grad();
    if (scope) {
      scope->step();
    }
  };
  print_prediction(
      *group, name,
      measure_prediction(*recorder, costs, flags["--rounds"], local ? kLocalSteps : 1, update));
  if (scope) {
    scope->finish();
  }
  accelerator.end_training();
}

static int run(const std::string& backend, const Numbers& flags) {
  at::set_num_threads(1);
  const auto group = Communicator::create(world_from_environment(), {.backend = backend});
  const auto start = std::chrono::steady_clock::now();
  const CostModel costs = measure_cost_model(*group);
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  if (group->is_main()) {
    nlohmann::ordered_json json{
        {"model_seconds", time.count()}, {"stretch", costs.stretch}, {"stolen", costs.stolen}};
    for (const OperationCost& operation : costs.operations) {
      for (const OperationCost::Point& point : operation.points) {
        json[std::string(Collective{operation.kind}.kind_name())][std::to_string(point.bytes)] =
            point.seconds;
      }
    }
    std::printf("%s\n", json.dump().c_str());
  }
  for (const char* strategy : {"ddp", "fsdp", "local_sgd"}) {
    measure_strategy(group, costs, strategy, flags);
  }
  group->close();
  return 0;
}

} // namespace hasten

int main(int argc, char** argv) {
  std::string backend = "shm";
  hasten::Numbers flags{{"--rows", 8}, {"--tokens", 64}, {"--rounds", 15}};
  for (int i = 1; i < argc; ++i) {
    if (flags.contains(argv[i]) && i + 1 < argc) {
      flags[argv[i]] = std::stoll(argv[i + 1]);
      ++i;
    } else if (std::strcmp(argv[i], "shm") == 0 || std::strcmp(argv[i], "gloo") == 0) {
      backend = argv[i];
    } else {
      std::fprintf(stderr,
                   "usage: step_prediction [shm|gloo] [--rows N] [--tokens N] [--rounds N]\n");
      return 2;
    }
  }
  try {
    return hasten::run(backend, flags);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
