// What prepare() makes, and what its handles do.
#include "hasten/accelerator/prepare.h"

#include <ATen/ATen.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include "accelerator_core.h"

namespace hasten::detail {

StepResult OptimizerHandle::step() { return core_->optimizers.step(*state_); }
void OptimizerHandle::zero_grad() { core_->optimizers.zero_grad(*state_); }
bool SchedulerHandle::step() { return core_->optimizers.scheduler_step(*state_); }

namespace {

class CoreRollCall final : public RollCall {
 public:
  CoreRollCall(const OpenBatch& batch, const LoaderState& loader)
      : batch_(batch), loader_(loader) {}

  int64_t largest(int64_t own) override {
    start(true); // finds ranks that are elsewhere
    wait();
    const at::Tensor most = at::tensor({own}, at::kLong);
    peers()->all_reduce(most, ReduceOp::MAX, "batches of the ranks");
    return most.item<int64_t>();
  }
  void start(bool here) override {
    control_.emplace(peers());
    control_->start({.rows = here ? 1.0 : 0.0, .buffers = true, .number = loader_.index});
  }
  bool pending() const override { return control_.has_value(); }
  bool wait() override {
    WindowControl control = *std::exchange(control_, std::nullopt);
    return control.wait().rows > 0;
  }

 private:
  const std::shared_ptr<Communicator>& peers() const {
    return batch_.peers(loader_.training ? ~uint64_t{0} : 0);
  }

  const OpenBatch& batch_;
  const LoaderState& loader_; // its owner has this object
  std::optional<WindowControl> control_;
};

class CoreLoaderLink final : public LoaderLink {
 public:
  explicit CoreLoaderLink(std::shared_ptr<AcceleratorCore> core) : core_(std::move(core)) {}

  Communicator& communicator() const override { return *core_->run.communicator(); }
  const at::Device& device() const override { return core_->run.device(); }
  std::optional<uint64_t> order_seed() const override { return core_->run.order_seed(); }
  void begin(LoaderState& loader) const override { core_->begin_pass(loader); }
  void end(LoaderState& loader) const override { core_->end_pass(loader); }
  std::unique_ptr<RollCall> roll_call(const LoaderState& loader) const override {
    return std::make_unique<CoreRollCall>(core_->batch, loader);
  }
  bool trains_together() const override {
    return !core_->local.is_local() ||
           core_->models.has_replicas(uint64_t{1} << core_->local.scope()->model());
  }
  void enter_loop(const std::shared_ptr<LoaderState>& loader) const override {
    core_->loaders.enter_loop(loader);
  }

 private:
  std::shared_ptr<AcceleratorCore> core_;
};

} // namespace

std::shared_ptr<const LoaderLink> loader_link(std::shared_ptr<AcceleratorCore> core) {
  return std::make_shared<CoreLoaderLink>(std::move(core));
}

void PrepareCall::add(const std::shared_ptr<torch::nn::Module>& model) {
  if (core_->models.prepare(
          model, core_->precision.precision(),
          [core = core_.get()](size_t i) { return core->batch.rows_count(i); },
          [this](size_t i) { core_->windows.leave(i); })) {
    core_->optimizers.models_changed();
  }
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

// Torch's count is a protected member.
class TorchSchedulerState final : public Stateful {
 public:
  explicit TorchSchedulerState(std::shared_ptr<torch::optim::LRScheduler> scheduler)
      : scheduler_(std::move(scheduler)) {}

  void save_state(NamedTensors&, nlohmann::json& values) const override {
    values["step_count"] = ProtectedAccess::count(*scheduler_);
  }
  void load_state(const NamedTensors&, const nlohmann::json& values) override {
    ProtectedAccess::count(*scheduler_) = values.at("step_count").get<unsigned>();
  }

 private:
  struct ProtectedAccess : torch::optim::LRScheduler {
    static unsigned& count(torch::optim::LRScheduler& scheduler) {
      return scheduler.*(&ProtectedAccess::step_count_);
    }
  };
  std::shared_ptr<torch::optim::LRScheduler> scheduler_;
};

std::shared_ptr<Stateful> torch_scheduler_state(
    std::shared_ptr<torch::optim::LRScheduler> scheduler) {
  return std::make_shared<TorchSchedulerState>(std::move(scheduler));
}

} // namespace hasten::detail
