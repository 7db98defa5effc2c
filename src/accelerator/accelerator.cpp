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

void Accelerator::register_comm_hook(const detail::ModelRef& model,
                                     std::shared_ptr<CommHook> hook) {
  const size_t index = core_->models.index(model.get(), "accelerator::register_comm_hook");
  core_->models[index].parallel->register_comm_hook(std::move(hook));
}

void Accelerator::join_uneven_inputs() { core_->end_of_data(nullptr); }

void Accelerator::sync_buffers() { core_->batch.even_out_buffers(~uint64_t{0}); }

bool Accelerator::sync_gradients() const { return core_->batch.sync_gradients(); }

const WindowReport& Accelerator::last_window() const { return core_->windows.report(); }

const AcceleratorOptions& Accelerator::options() const { return core_->run.options(); }

void Accelerator::set_gradient_accumulation_steps(int64_t steps) {
  core_->windows.set_steps(steps);
}

void Accelerator::end_training() { core_->finish(); }

void Accelerator::init_trackers(const std::string& project_name, const nlohmann::json& config) {
  core_->finish_trackers();
  const AcceleratorOptions& o = options();
  const auto folder = (o.logging_dir.empty() ? o.project_dir : o.logging_dir) / project_name;
  for (const TrackerChoice& choice : o.log_with) {
    const auto* named = std::get_if<std::string>(&choice);
    const std::string name = named != nullptr ? *named : std::get<1>(choice)->name();
    const auto make = [&]() -> std::shared_ptr<GeneralTracker> {
      return named != nullptr ? make_tracker(name, folder) : std::get<1>(choice);
    };
    auto tracker = is_main_process() ? std::make_shared<SafeTracker>(name, make)
                                     : std::make_shared<SafeTracker>(name, nullptr);
    tracker->store_init_configuration(config);
    core_->trackers.push_back(std::move(tracker));
  }
}

void Accelerator::log(const nlohmann::json& values, std::optional<int64_t> step) {
  if (core_->trackers.empty() && !options().log_with.empty() && !core_->run.closed()) {
    throw InputError("accelerator::log", "a call before init_trackers()");
  }
  for (const auto& tracker : core_->trackers) {
    tracker->log(values, step);
  }
}

std::shared_ptr<GeneralTracker> Accelerator::get_tracker(const std::string& name) const {
  for (const auto& tracker : core_->trackers) {
    if (tracker->name() == name) {
      return tracker;
    }
  }
  throw InputError("accelerator::get_tracker", "tracker=" + name,
                   "the name of a tracker in log_with, after init_trackers()");
}

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

NamedTensors Accelerator::get_state_dict(const detail::ModelRef& model) {
  NamedTensors all;
  std::map<const void*, at::Tensor> copies; // by TensorImpl: tied tensors stay one
  run_summon_full_params(
      [&] {
        for (const auto& [name, tensor] : detail::named_model_tensors(*model.get())) {
          at::Tensor& copy = copies[tensor.unsafeGetTensorImpl()];
          copy = copy.defined() ? copy : tensor.detach().clone();
          all.emplace(name, copy);
        }
      },
      {model.get()});
  return all;
}

void Accelerator::save_model(const detail::ModelRef& model,
                             const std::filesystem::path& save_directory) {
  run_summon_full_params(
      [&] {
        FolderCommit commit(save_directory, CommitMode::merge);
        write_safetensors(commit.folder() / detail::model_file_name(0),
                          detail::named_model_tensors(*model.get()));
        commit.commit();
      },
      {model.get()});
}

void Accelerator::save_state(const std::filesystem::path& folder, const SaveStateOptions& options) {
  core_->checkpointer.save(folder, options);
}

LoadedState Accelerator::load_state(const std::filesystem::path& folder,
                                    const LoadStateOptions& options) {
  return core_->checkpointer.load(folder, options);
}

void Accelerator::register_for_checkpointing(std::string name, std::shared_ptr<Stateful> object,
                                             StateScope scope) {
  core_->checkpointer.add(std::move(name), std::move(object), scope);
}

void Accelerator::register_for_checkpointing(std::string name, Stateful& object, StateScope scope) {
  core_->checkpointer.add(std::move(name),
                          std::shared_ptr<Stateful>(std::shared_ptr<void>(), &object), scope);
}

} // namespace hasten
