#include "hasten/accelerator/accelerator.h"

#include <ATen/core/Tensor.h>

#include <exception>
#include <map>

#include "accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/io/commit.h"
#include "hasten/io/safetensors.h"

namespace hasten {

namespace detail {

StepResult OptimizerHandle::step() { return core_->optimizers.step(*state_); }
void OptimizerHandle::zero_grad() { core_->optimizers.zero_grad(*state_); }
bool SchedulerHandle::step() { return core_->optimizers.scheduler_step(*state_); }

int LoaderLink::rank() const { return core_->run.world().rank; }
int LoaderLink::world_size() const { return core_->run.world().world_size; }
const at::Device& LoaderLink::device() const { return core_->run.device(); }
std::optional<uint64_t> LoaderLink::order_seed() const { return core_->run.order_seed(); }
void LoaderLink::begin(LoaderState& loader) const { core_->uneven.begin_range(loader); }
void LoaderLink::end(LoaderState& loader) const { core_->uneven.end_range(loader); }
void LoaderLink::enter_loop(const std::shared_ptr<LoaderState>& loader) const {
  core_->loaders.enter_loop(loader);
}
void LoaderLink::refuse_no_row(const std::string& range) const {
  const InputError error("accelerator::PreparedLoader",
                         "this rank has no sample to train on: rank=" + std::to_string(rank()) +
                             " of " + range + ", world_size=" + std::to_string(world_size()),
                         "a sample for every rank from the range's shard()",
                         "start fewer ranks, use more data, or set even_batches or "
                         "dispatch_batches");
  core_->run.fail_peers(error.what()); // they wait for this rank
  throw error;
}
void throw_no_empty_batch() {
  throw InputError("accelerator::PreparedLoader",
                   "the batches cannot be split evenly over ranks, and their type has no tensor "
                   "from which to make a batch without samples",
                   "a batch type with tensors, or with flatten(visit, batch)");
}
void throw_cannot_deal(const char* option) {
  throw InputError("accelerator::PreparedLoader",
                   std::string(option) + " for a range with its own shard()",
                   "set_even_batches() and set_split_batches() of the range",
                   "add them to the range, or set dispatch_batches");
}
void check_configuration(const DataLoaderConfiguration& config, int64_t skip) {
  if (config.prefetch < 0 || skip < 0) {
    throw InputError("accelerator::PreparedLoader",
                     config.prefetch < 0 ? "prefetch=" + std::to_string(config.prefetch)
                                         : "batches to skip=" + std::to_string(skip),
                     "0 or more");
  }
}

void PrepareCall::add(const std::shared_ptr<torch::nn::Module>& model) {
  core_->models.prepare(model, core_->precision.precision(),
                        [core = core_.get()](size_t i) { return core->batch.rows_count(i); });
  models_.push_back(model.get());
}
void PrepareCall::add(const std::shared_ptr<torch::optim::Optimizer>& optimizer) {
  optimizers_.push_back(core_->optimizers.prepare(optimizer));
}
void PrepareCall::add_loader() {
  loaders_.push_back(std::make_shared<LoaderState>());
  loaders_.back()->config = core_->run.options().dataloader_config;
}
void PrepareCall::tie() {
  core_->loaders.add(loaders_, core_->models.indices(models_, "accelerator::prepare"),
                     !optimizers_.empty());
}
std::shared_ptr<SchedulerState> PrepareCall::scheduler(std::function<void()> step) {
  return core_->optimizers.prepare_scheduler(std::move(step), optimizers_);
}

} // namespace detail

AccumulateGuard::AccumulateGuard(std::shared_ptr<detail::AcceleratorCore> core,
                                 std::shared_ptr<detail::LoaderState> loader,
                                 std::optional<double> weight,
                                 const std::vector<torch::nn::Module*>& models)
    : core_(std::move(core)), exceptions_at_entry_(std::uncaught_exceptions()) {
  core_->batch.open(std::move(loader), weight, models);
}

AccumulateGuard::~AccumulateGuard() {
  core_->batch.close(std::uncaught_exceptions() > exceptions_at_entry_);
}

SyncGuard::SyncGuard(std::shared_ptr<detail::AcceleratorCore> core,
                     const std::vector<torch::nn::Module*>& models, bool sync)
    : core_(std::move(core)), id_(core_->batch.push_sync(models, sync)) {}

SyncGuard::~SyncGuard() { core_->batch.pop_sync(id_); }

Accelerator::Accelerator(AcceleratorOptions options)
    : Gradients(std::make_shared<detail::AcceleratorCore>(std::move(options), nullptr)) {}

Accelerator::Accelerator(AcceleratorOptions options, std::shared_ptr<Communicator> communicator)
    : Gradients(
          std::make_shared<detail::AcceleratorCore>(std::move(options), std::move(communicator))) {}

Accelerator::~Accelerator() {
  if (core_ && core_->run.owns_group() && !core_->run.alone() && !core_->run.closed() &&
      std::uncaught_exceptions() == 0) {
    log_warning(
        "[accelerator::Accelerator] destroyed without end_training(): peers that "
        "still communicate with this rank will fail");
  }
}

void Accelerator::backward(const at::Tensor& mean_loss, BackwardOptions options) {
  core_->batch.backward(mean_loss, std::nullopt, options);
}

void Accelerator::backward(const at::Tensor& loss_sum, double weight, BackwardOptions options) {
  core_->batch.backward(loss_sum, weight, options);
}

void Accelerator::register_hook(torch::nn::Module& model, std::shared_ptr<CommHook> hook) {
  const size_t index = core_->models.index(&model, "accelerator::register_comm_hook");
  core_->models[index].parallel->register_comm_hook(std::move(hook));
}

void Accelerator::join_uneven_inputs() { core_->uneven.end_ranges(nullptr, true); }

void Accelerator::sync_buffers() { core_->announcer.even_out_buffers(~uint64_t{0}); }

bool Accelerator::sync_gradients() const { return core_->batch.sync_gradients(); }

const WindowReport& Accelerator::last_window() const { return core_->windows.report(); }

const AcceleratorOptions& Accelerator::options() const { return core_->run.options(); }

void Accelerator::set_gradient_accumulation_steps(int64_t steps) {
  core_->windows.set_steps(steps);
}

void Accelerator::end_training() { core_->finish(); }

Precision Accelerator::mixed_precision() const { return core_->precision.precision(); }

void Accelerator::set_mixed_precision(Precision precision) {
  for (size_t i = 0; i < core_->models.size(); ++i) {
    if (core_->batch.is_open() || core_->windows.in_window(i)) {
      throw InputError("accelerator::mixed_precision",
                       "another precision in the middle of a window", "a call between windows");
    }
  }
  core_->precision.choose(precision);
}

Autocast Accelerator::autocast() const {
  if (core_->precision.precision() == Precision::no) {
    return Autocast(AutocastState::now());
  }
  return Autocast(core_->precision.autocast_options());
}

const LossScale& Accelerator::loss_scale() const { return core_->precision.loss_scale(); }

ForwardGuard::ForwardGuard(detail::AcceleratorCore& core,
                           const std::vector<torch::nn::Module*>& models) {
  for (const auto* module : models) {
    if (FullyShard* sharded = core.models.sharded(module); sharded != nullptr) {
      scopes_.emplace_back(new ForwardScope(sharded->forward_scope()));
    }
  }
  if (!scopes_.empty() && core.precision.precision() != Precision::no) {
    cast_ = std::make_unique<Autocast>(core.precision.autocast_options());
  }
}

bool Accelerator::shards_module(const torch::nn::Module& model) const {
  return core_->models.sharded(&model) != nullptr;
}

void Accelerator::run_summon_full_params(const std::function<void()>& use,
                                         const std::vector<torch::nn::Module*>& models) {
  core_->models.summon_full_params(core_->models.indices(models, "accelerator::summon_full_params"),
                                   use);
}

void Accelerator::run_load_full_params(const std::function<void()>& load,
                                       const std::vector<torch::nn::Module*>& models) {
  core_->models.load_full_params(core_->models.indices(models, "accelerator::load_full_params"),
                                 load);
}

NamedTensors Accelerator::state_dict_of(torch::nn::Module& model) {
  NamedTensors all;
  std::map<const void*, at::Tensor> copies; // by TensorImpl: tied tensors stay one
  run_summon_full_params(
      [&] {
        for (const auto& [name, tensor] : detail::named_model_tensors(model)) {
          at::Tensor& copy = copies[tensor.unsafeGetTensorImpl()];
          copy = copy.defined() ? copy : tensor.detach().clone();
          all.emplace(name, copy);
        }
      },
      {&model});
  return all;
}

void Accelerator::write_model(torch::nn::Module& model, const std::filesystem::path& folder) {
  run_summon_full_params(
      [&] {
        FolderCommit commit(folder, CommitMode::merge);
        write_safetensors(commit.folder() / detail::model_file_name(0),
                          detail::named_model_tensors(model));
        commit.commit();
      },
      {&model});
}

void Accelerator::save_state(const std::filesystem::path& folder, const SaveStateOptions& options) {
  core_->state.save(folder, options);
}

LoadedState Accelerator::load_state(const std::filesystem::path& folder,
                                    const LoadStateOptions& options) {
  return core_->state.load(folder, options);
}

void Accelerator::register_for_checkpointing(std::string name, std::shared_ptr<Stateful> object,
                                             StateScope scope) {
  core_->state.add(std::move(name), std::move(object), scope);
}

void Accelerator::register_for_checkpointing(std::string name, Stateful& object, StateScope scope) {
  core_->state.add(std::move(name), std::shared_ptr<Stateful>(std::shared_ptr<void>(), &object),
                   scope);
}

} // namespace hasten
