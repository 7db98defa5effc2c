#include "hasten/accelerator/accelerator.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <exception>

#include "accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/store_channel.h"

namespace hasten {

namespace detail {

const AcceleratorOptions& checked_options(const AcceleratorOptions& options) {
  const auto refuse = [](const std::string& what, const char* expected) {
    throw InputError("accelerator::Accelerator", what, expected);
  };
  if (options.gradient_accumulation_steps < 1) {
    refuse("gradient_accumulation_steps=" + std::to_string(options.gradient_accumulation_steps),
           "1 or more");
  }
  if (!(options.bucket_cap_mb > 0)) {
    refuse("bucket_cap_mb=" + std::to_string(options.bucket_cap_mb), "above 0");
  }
  return options;
}

/// Ranks of another launcher say whose they are; hasten launch has warned already.
void announce_world(const World& world) {
  const bool launched_by_us = !launcher_socket(world).empty();
  if (world.local_rank == 0 && !launched_by_us && world.source != "alone") {
    log_info(describe(world)); // rank 0 alone
    const std::string warning = oversubscription(world.local_world_size, threads_per_rank(world));
    if (!warning.empty()) {
      log_warning(warning);
    }
  }
}

std::shared_ptr<AcceleratorCore> make_accelerator_core(const AcceleratorOptions& options,
                                                       std::shared_ptr<Communicator> communicator) {
  World world = world_from_environment();
  if (communicator) {
    world.rank = communicator->rank();
    world.world_size = communicator->world_size();
  }
  set_error_rank(world.rank, world.world_size);
  set_log_rank(world.rank, world.world_size);
  at::set_num_threads(threads_per_rank(world));
  const bool owns = !communicator;
  if (owns) {
    announce_world(world);
    CommunicatorOptions comm;
    comm.timeout = options.timeout;
    comm.heartbeat_timeout = options.heartbeat_timeout;
    comm.check_shapes = debugs(options) ? ShapeCheck::always : ShapeCheck::first;
    comm.device_kind = accelerator_device(options, world.local_rank).is_cpu() ? "cpu" : "cuda";
    communicator = Communicator::create(world, comm);
  }
  return std::make_shared<AcceleratorCore>(options, world, std::move(communicator), owns);
}

// The doors of prepare.h and prepared.h.

StepResult core_optimizer_step(AcceleratorCore& core, OptimizerState& optimizer) {
  return core.optimizer_step(optimizer);
}
void core_zero_grad(AcceleratorCore& core, OptimizerState& optimizer) { core.zero_grad(optimizer); }
bool core_scheduler_step(AcceleratorCore& core, SchedulerState& scheduler) {
  return core.scheduler_step(scheduler);
}
std::optional<uint64_t> core_order_seed(const AcceleratorCore& core) {
  return !core.options.seed && core.world.world_size > 1 ? 0 : core.options.seed;
}
void core_begin_range(AcceleratorCore& core, LoaderState& loader) { core.begin_range(loader); }
void core_end_range(AcceleratorCore& core, LoaderState& loader) { core.end_range(loader); }
void core_enter_loop(AcceleratorCore& core, const std::shared_ptr<LoaderState>& loader) {
  core.enter_loop(loader);
}
at::Device core_device(const AcceleratorCore& core) { return core.device; }
int core_rank(const AcceleratorCore& core) { return core.world.rank; }
int core_world_size(const AcceleratorCore& core) { return core.world.world_size; }
void throw_no_empty_batch() {
  throw InputError("accelerator::PreparedLoader",
                   "the batches do not divide evenly over ranks, and no tensor is found in "
                   "their type to make one without rows from",
                   "a batch type with tensors, or with flatten(visit, batch)");
}
void core_refuse_no_row(AcceleratorCore& core, const std::string& range) {
  const InputError error(
      "accelerator::PreparedLoader",
      "this rank has no row to train on: rank=" + std::to_string(core.world.rank) + " of " + range +
          ", world_size=" + std::to_string(core.world.world_size),
      "a row of the first batch on every rank, from the range's shard()",
      "start fewer ranks, give more data, or set even_batches or dispatch_batches");
  core.communicator->abort(error.what()); // peers wait for this rank
  throw error;
}
void throw_cannot_deal(const char* option) {
  throw InputError("accelerator::PreparedLoader",
                   std::string(option) + " for a range that deals itself",
                   "set_even_batches and set_split_batches beside its shard()",
                   "let the range do it, or set dispatch_batches");
}
void check_configuration(const DataLoaderConfiguration& config, int64_t skip) {
  if (config.prefetch < 0 || skip < 0) {
    throw InputError("accelerator::PreparedLoader",
                     config.prefetch < 0 ? "prefetch=" + std::to_string(config.prefetch)
                                         : "batches to skip=" + std::to_string(skip),
                     "0 or more");
  }
}
const DataLoaderConfiguration& core_loader_configuration(const AcceleratorCore& core) {
  return core.options.dataloader_config;
}
void core_prepare_model(AcceleratorCore& core, std::shared_ptr<torch::nn::Module> model) {
  core.prepare_model(std::move(model));
}
std::shared_ptr<OptimizerState> core_prepare_optimizer(
    AcceleratorCore& core, const std::shared_ptr<torch::optim::Optimizer>& optimizer) {
  return core.prepare_optimizer(optimizer);
}
std::shared_ptr<SchedulerState> core_prepare_scheduler(
    AcceleratorCore& core, std::function<void()> step,
    std::vector<std::shared_ptr<OptimizerState>> optimizers) {
  return core.prepare_scheduler(std::move(step), std::move(optimizers));
}
void core_tie_loaders(AcceleratorCore& core,
                      const std::vector<std::shared_ptr<LoaderState>>& loaders,
                      const std::vector<torch::nn::Module*>& models, bool with_optimizer) {
  core.tie_loaders(loaders, models, with_optimizer);
}
void core_open(AcceleratorCore& core, std::shared_ptr<LoaderState> loader,
               std::optional<double> weight, const std::vector<torch::nn::Module*>& models) {
  core.open(std::move(loader), weight, models);
}

} // namespace detail

AccumulateGuard::AccumulateGuard(std::shared_ptr<detail::AcceleratorCore> core)
    : core_(std::move(core)), exceptions_at_entry_(std::uncaught_exceptions()) {}

AccumulateGuard::~AccumulateGuard() {
  core_->close(std::uncaught_exceptions() > exceptions_at_entry_);
}

SyncGuard::SyncGuard(std::shared_ptr<detail::AcceleratorCore> core,
                     const std::vector<torch::nn::Module*>& models, bool sync)
    : core_(std::move(core)), id_(core_->push_sync(models, sync)) {}

SyncGuard::~SyncGuard() { core_->pop_sync(id_); }

Accelerator::Accelerator(AcceleratorOptions options)
    : Gradients(detail::make_accelerator_core(detail::checked_options(options), nullptr)) {}

Accelerator::Accelerator(AcceleratorOptions options, std::shared_ptr<Communicator> communicator)
    : Gradients(detail::make_accelerator_core(detail::checked_options(options),
                                              std::move(communicator))) {}

Accelerator::~Accelerator() {
  if (core_ && core_->owns_communicator && core_->world.world_size > 1 && !core_->finished &&
      std::uncaught_exceptions() == 0) {
    log_warning(
        "[accelerator::Accelerator] destroyed without finish(): peers that "
        "still communicate with this rank will fail");
  }
}

void Accelerator::backward(const at::Tensor& mean_loss, BackwardOptions options) {
  core_->backward(mean_loss, std::nullopt, options);
}

void Accelerator::backward(const at::Tensor& loss_sum, double weight, BackwardOptions options) {
  core_->backward(loss_sum, weight, options);
}

void Accelerator::register_hook(torch::nn::Module& model, std::shared_ptr<CommHook> hook) {
  core_->register_comm_hook(&model, std::move(hook));
}

void Accelerator::join_uneven_inputs() { core_->end_ranges(nullptr, true); }

void Accelerator::sync_buffers() { core_->sync_buffers(); }

bool Accelerator::sync_gradients() const { return core_->sync_gradients(); }

const WindowReport& Accelerator::last_window() const { return core_->report; }

const AcceleratorOptions& Accelerator::options() const { return core_->options; }

void Accelerator::set_gradient_accumulation_steps(int64_t steps) { core_->set_accumulation(steps); }

void Accelerator::end_training() { core_->finish(); }

} // namespace hasten
