// Exported programs train as modules written for hasten do: replicated, sharded, recomputed, deferred.
#include "exported/exported_rig.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/core/deferred_init.h"
#include "hasten/parallel/sync_batch_norm.h"
#include "support/communicator.h"
#include "support/on_device.h"
#include "support/run_device.h"
#include "support/temporary_folder.h"
#include "support/world.h"

namespace hasten::exported_test {

struct Way {
  const char* name;
  Strategy strategy = Strategy::ddp;
  GradientCheckpointing checkpointing = false;
  bool deferred = false;
  Precision precision = Precision::no;
};

static at::ScalarType dtype_of(const Way& way) {
  return way.precision == Precision::no ? at::kDouble : at::kFloat;
}

static NamedTensors rows_of(const NamedTensors& inputs, int64_t begin, int64_t end) {
  NamedTensors rows;
  for (const auto& [name, tensor] : inputs) {
    rows[name] = tensor.slice(0, begin, end).to(testing_support::run_device());
  }
  return rows;
}

/// The mean over samples of one length.
static Tensor mean_loss(const NamedTensors& outputs, const NamedTensors& inputs) {
  return torch::nn::functional::cross_entropy(outputs.at("logits").flatten(0, 1),
                                              inputs.at("input_ids").flatten());
}

/// Parameters after three steps on the rank's samples.
static NamedTensors trained(const Way& way, const std::shared_ptr<Communicator>& communicator,
                            const std::filesystem::path& folder) {
  AcceleratorOptions options;
  options.strategy = way.strategy;
  options.mixed_precision = way.precision;
  options.shard_size = way.strategy == Strategy::hsdp ? 2 : 0;
  options.device = testing_support::run_device().str();
  Accelerator accelerator(options, communicator);
  const int64_t world = accelerator.num_processes();
  const int64_t rank = accelerator.process_index();
  const auto make = [&] {
    ExportedModule made = ExportedModule::load(folder);
    made->to(dtype_of(way));
    return made;
  };
  ExportedModule module = way.deferred ? deferred_init(make) : make();
  if (!way.deferred) {
    module->to(testing_support::run_device());
  }
  if (way.checkpointing) {
    gradient_checkpointing_enable(module, {.mode = way.checkpointing});
  }
  torch::optim::SGD sgd(module->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  auto [model, optimizer] = accelerator.prepare(module, sgd);
  const NamedTensors all = golden_case("encoder/2").in; // four samples
  const NamedTensors own = rows_of(all, rank * 4 / world, (rank + 1) * 4 / world);
  for (int step = 0; step < 3; ++step) {
    auto window = accelerator.accumulate(model);
    const auto samples = static_cast<double>(own.at("input_ids").size(0));
    accelerator.backward(mean_loss(module->forward(own), own) * samples, samples);
    optimizer.step();
    optimizer.zero_grad();
  }
  NamedTensors parameters;
  accelerator.summon_full_params(
      [&] {
        for (const auto& parameter : module->named_parameters()) {
          parameters[parameter.key()] = parameter.value().detach().cpu().clone();
        }
      },
      model);
  accelerator.end_training();
  return parameters;
}

/// A folder with weights of a size with which training converges.
static void write_folder(const std::filesystem::path& folder) {
  ExportedModule module = ExportedModule::load(golden_path("encoder.pt2"));
  const at::NoGradGuard no_grad;
  for (const Tensor& parameter : module->parameters()) {
    parameter.mul_(0.3);
  }
  module->save(folder);
}

TEST(ExportedTraining, EveryStrategyGivesTheParametersOfAPlainLoop) {
  const testing_support::TemporaryFolder folder; // each rank's own
  write_folder(folder.path());
  ExportedModule plain = ExportedModule::load(folder.path());
  plain->to(at::kDouble);
  torch::optim::SGD sgd(plain->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  const NamedTensors all = golden_case("encoder/2").in;
  for (int step = 0; step < 3; ++step) {
    sgd.zero_grad();
    mean_loss(plain->forward(all), all).backward();
    sgd.step();
  }
  for (const Way& way :
       std::vector<Way>{{"ddp"},
                        {"zero1", Strategy::zero1},
                        {"zero2", Strategy::zero2},
                        {"ops", Strategy::ddp, "ops"},
                        {"fsdp", Strategy::fsdp},
                        {"fsdp, recomputed", Strategy::fsdp, true},
                        {"fsdp, deferred", Strategy::fsdp, false, true},
                        {"hsdp", Strategy::hsdp},
                        {"fp16", Strategy::ddp, false, false, Precision::fp16},
                        {"fsdp, recomputed, bf16", Strategy::fsdp, true, false, Precision::bf16}}) {
    SCOPED_TRACE(way.name);
    if (way.strategy == Strategy::hsdp && testing_support::test_world().world_size % 2 != 0) {
      continue;
    }
    const NamedTensors got = trained(way, testing_support::fresh_communicator(), folder.path());
    for (const auto& parameter : plain->named_parameters()) {
      if (testing_support::test_world().is_main()) { // the others have a part
        EXPECT_LE(relative_difference(got.at(parameter.key()), parameter.value().detach()),
                  way.precision == Precision::no ? 1e-12 : 1e-2)
            << parameter.key();
      }
    }
  }
}

TEST(ExportedTraining, SynchronisedBatchNormHasTheStatisticsOfTheJoinedBatch) {
  const NamedTensors all = rows_of(golden_case("conv_net/2").in, 0, 5);
  ExportedModule plain = ExportedModule::load(golden_path("conv_net.pt2"));
  plain->to(testing_support::run_device());
  const Tensor joined = plain->forward(all).at("output");
  loss_of({{"output", joined}}).backward();

  const auto communicator = testing_support::fresh_communicator();
  ExportedModule module = ExportedModule::load(golden_path("conv_net.pt2"));
  module->to(testing_support::run_device());
  const auto synced = convert_sync_batchnorm(module, communicator);
  EXPECT_EQ(synced.layers, (std::vector<std::string>{"blocks.0.norm", "blocks.1.norm"}));
  const int64_t begin = 5 * communicator->rank() / communicator->world_size();
  const int64_t end = 5 * (communicator->rank() + 1) / communicator->world_size();
  const Tensor own = module->forward(rows_of(all, begin, end)).at("output");
  EXPECT_LE(relative_difference(own, joined.slice(0, begin, end)), 1e-5);
  const Tensor weights = at::sin(at::arange(joined.numel(), joined.options())).view_as(joined);
  (own * weights.slice(0, begin, end)).sum().backward();
  auto expected = plain->named_parameters();
  for (auto& parameter : module->named_parameters()) {
    Tensor sum = parameter.value().grad().clone();
    communicator->all_reduce(sum, ReduceOp::SUM, "gradient");
    EXPECT_LE(relative_difference(sum, expected[parameter.key()].grad()), 1e-4) << parameter.key();
  }
  auto buffers = plain->named_buffers();
  for (const auto& buffer : module->named_buffers()) {
    EXPECT_LE(relative_difference(buffer.value(), buffers[buffer.key()]), 1e-5) << buffer.key();
  }
}

} // namespace hasten::exported_test
