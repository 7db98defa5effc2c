// Sharded models.

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/optim/fused_optimizer.h"
#include "model_set.h"
#include "run_context.h"

namespace hasten::detail {

// Adapts FullyShard to the interface that a gradient window uses. Every rank has the batches of a
// window, at least stand-ins: a rank without one would miss the messages in forward.
class ShardedModel final : public DataParallel {
 public:
  ShardedModel(std::shared_ptr<Communicator> communicator,
               std::shared_ptr<torch::nn::Module> module,
               const std::vector<std::shared_ptr<torch::nn::Module>>& units,
               FullyShardOptions options)
      : sharded_(std::move(communicator), std::move(module), units, std::move(options)),
        parameters_(shards_of(sharded_)),
        gradients_(FlatLayout(parameters_)) {}

  FullyShard& shards() { return sharded_; }

  void begin(bool /*in_place*/) override { sharded_.begin(); }
  void start_backward(bool reduce, DdpBackward /*backward*/) override {
    before_ = sharded_.report().total;
    sharded_.start_backward(reduce);
  }
  void finish_backward() override { sharded_.finish_backward(); }
  void finish(double factor, const DdpRanks& ranks, bool /*defer*/) override {
    sharded_.finish(factor, ranks);
    const ShardUnitReport after = sharded_.report().total;
    report_.bytes = after.reduced_bytes - before_.reduced_bytes;
    report_.buckets = after.reductions - before_.reductions;
    report_.exposed_seconds = after.exposed_seconds - before_.exposed_seconds;
    report_.communication_seconds = report_.exposed_seconds;
  }
  void wait() override { sharded_.wait(); }
  void cancel() noexcept override { sharded_.cancel(); }
  // The multiplication is never deferred, so the factor is always 1.
  double pending_factor() const override { return 1; }
  void set_pending_factor(double /*factor*/) override {}
  void apply_pending_factor() override {}
  bool has_earlier_gradients() const override { return false; }
  bool has_foreign_gradients() override { return false; } // an error at once
  bool sharded() const override { return true; }
  void reduce_norms(std::vector<double>& norms, double norm_type) const override {
    sharded_.reduce_norms(norms, norm_type);
  }
  at::Tensor reduce_norm(const at::Tensor& norm, double norm_type) const override {
    return sharded_.reduce_norm(norm, norm_type);
  }
  void register_comm_hook(std::shared_ptr<CommHook> hook) override {
    if (hook) {
      throw InputError("parallel::FullyShard", "communication hook=" + hook->description(),
                       "no hook with a sharded model",
                       "set fully_shard.precision.reduce_dtype to reduce in 16 bits");
    }
  }
  const std::shared_ptr<CommHook>& comm_hook() const override { return no_hook_; }
  void sync_buffers(const DdpRanks& ranks) override { sharded_.sync_buffers(ranks); }
  bool evens_out_buffers(bool any_dtype) const override {
    return sharded_.evens_out_buffers(any_dtype);
  }
  void set_local(bool local) override { sharded_.set_local(local); }
  at::Tensor reserve_gradient_place(const at::Tensor& p) override {
    return sharded_.reserve_gradient_place(p);
  }
  FlatGradients& gradients() override { return gradients_; }
  const FlatGradients& gradients() const override { return gradients_; }
  const std::shared_ptr<torch::nn::Module>& module() const override { return sharded_.module(); }
  const FlatLayout::NamedParameters& parameters() const override { return parameters_; }
  const ReductionReport& reduction() const override { return report_; }
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override {
    sharded_.save_state(tensors, values);
  }
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override {
    sharded_.load_state(tensors, values);
  }

 private:
  static FlatLayout::NamedParameters shards_of(const FullyShard& sharded) {
    FlatLayout::NamedParameters named;
    for (const ShardedParameter& entry : sharded.parameters()) {
      named.emplace_back(entry.name, entry.parameter);
    }
    return named;
  }

  FullyShard sharded_;
  FlatLayout::NamedParameters parameters_; // shards
  FlatGradients gradients_; // only inspected; its memory is never used
  std::shared_ptr<CommHook> no_hook_;
  ShardUnitReport before_; // when the last backward began
  ReductionReport report_;
};

std::vector<std::shared_ptr<torch::nn::Module>> named_units(const torch::nn::Module& model,
                                                            const std::vector<std::string>& names) {
  const auto modules = model.named_modules();
  std::vector<std::shared_ptr<torch::nn::Module>> units;
  for (const std::string& name : names) {
    const auto* found = modules.find(name);
    if (found == nullptr || name.empty()) {
      throw InputError("accelerator::prepare",
                       "shard_units has \"" + name + "\", which the model does not have",
                       "names of its modules, like those of named_modules()");
    }
    units.push_back(*found);
  }
  return units;
}

// Consecutive ranks hold a replica together. Ranks at the same place in their replicas hold the
// same shards.
void ModelSet::open_shard_groups() {
  if (run_.options().strategy != Strategy::hsdp || shard_group_) {
    return;
  }
  const int ranks = run_.communicator()->world_size();
  const int size =
      run_.options().shard_size > 0 ? run_.options().shard_size : run_.world().local_world_size;
  if (size < 1 || size > ranks || ranks % size != 0) {
    throw InputError(
        "accelerator::prepare",
        "shard_size=" + std::to_string(size) + " on " + std::to_string(ranks) + " ranks",
        "a divisor of the number of ranks");
  }
  std::vector<int> copy;
  std::vector<int> same_rows;
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank / size == run_.world().rank / size) {
      copy.push_back(rank);
    }
    if (rank % size == run_.world().rank % size) {
      same_rows.push_back(rank);
    }
  }
  CommunicatorOptions like = run_.communicator()->options();
  const std::string name = like.name + " ";
  like.name = name + "copy";
  shard_group_ = run_.communicator()->new_group(copy, like);
  if (same_rows.size() > 1) {
    like.name = name + "replicas";
    replicas_ = run_.communicator()->new_group(same_rows, like);
  }
}

int ModelSet::ranks_per_replica() const {
  return shard_group_ ? shard_group_->world_size() : run_.communicator()->world_size();
}

std::shared_ptr<Communicator> ModelSet::replicas_of(size_t model) const {
  return models_[model].sharded ? replicas_ : run_.communicator();
}

bool ModelSet::holds_parts(size_t model) const {
  return models_[model].sharded != nullptr && ranks_per_replica() > 1;
}

FullyShard* ModelSet::sharded(const torch::nn::Module* module) const {
  const auto known = model_index_.find(module);
  return known == model_index_.end() ? nullptr : models_[known->second].sharded.get();
}

bool ModelSet::has_replicas(uint64_t mask) const {
  const auto models = in(mask);
  return replicas_ != nullptr &&
         std::ranges::any_of(models, [this](size_t i) { return models_[i].sharded != nullptr; });
}

void ModelSet::prepare_sharded(PreparedModel& state, std::shared_ptr<torch::nn::Module> module,
                               BroadcastBuffers broadcast_buffers, Precision precision) {
  FullyShardOptions how = run_.options().fully_shard;
  how.broadcast_buffers = broadcast_buffers;
  if (precision != Precision::no && !how.precision.param_dtype) {
    // Autocast's own casts of unsharded parameters would stay until backward.
    how.unit_precision.try_emplace("", how.precision);
    how.precision.param_dtype = precision == Precision::bf16 ? at::kBFloat16 : at::kHalf;
    how.precision.cast_forward_inputs = false;
  }
  const Strategy strategy = run_.options().strategy;
  how.strategy = strategy == Strategy::zero1   ? ShardingStrategy::zero1
                 : strategy == Strategy::zero2 ? ShardingStrategy::zero2
                                               : ShardingStrategy::fsdp;
  open_shard_groups();
  how.replicas = replicas_;
  how.everyone = replicas_ ? run_.communicator() : nullptr;
  how.device = run_.device();
  const auto units = run_.options().shard_units.empty()
                         ? repeated_blocks(*module)
                         : named_units(*module, run_.options().shard_units);
  if (units.empty() && run_.world().world_size > 1 && run_.world().rank == 0) {
    log_warning(std::string("strategy=") + strategy_name(strategy) +
                " finds no block by which to shard the model: all parameters are gathered "
                "together. Call repeated layers of a Sequential or a ModuleList by "
                "hasten::call_block, or name them in shard_units");
  }
  const auto model = std::make_shared<ShardedModel>(
      shard_group_ ? shard_group_ : run_.communicator(), std::move(module), units, std::move(how));
  if (!run_.options().fully_shard.sync_each_batch.value_or(true) && run_.world().rank == 0) {
    log_info(
        "fully_shard.sync_each_batch=false: gradients are summed once a window, and every rank keeps " +
        format_bytes(model->shards().report().unsharded_gradient_bytes) +
        " of unsharded gradients until then");
  }
  state.parallel = model;
  state.sharded = {model, &model->shards()};
}

// Their step needs a norm, or rows and columns, of the unsharded parameter.
void ModelSet::check_optimizer(const torch::optim::Optimizer& optimizer,
                               const std::vector<SlotList>& lists) const {
  const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer);
  const bool sharded = std::ranges::any_of(
      lists, [this](const SlotList& list) { return models_[list.model].sharded != nullptr; });
  if (sharded && fused != nullptr && !fused->by_elements()) {
    throw InputError(
        "accelerator::prepare",
        "optimizer=" + fused->name() + " with strategy=" + strategy_name(run_.options().strategy),
        "an optimizer with an elementwise step", "use AdamW, Adam, SGD or Lion, or strategy=ddp");
  }
}

void ModelSet::shard_optimizer_state(torch::optim::Optimizer& optimizer) const {
  for (const PreparedModel& model : models_) {
    for (size_t i = 0; model.sharded && i < model.sharded->parameters().size(); ++i) {
      const ShardedParameter& shard = model.sharded->parameters()[i];
      const auto state = optimizer.state().find(shard.parameter.unsafeGetTensorImpl());
      if (state == optimizer.state().end()) {
        continue;
      }
      dequantize_moments(*state->second); // blocks begin at a shard
      const at::IntArrayRef whole(shard.sizes);
      const bool known = visit_state_tensors(*state->second, [&](at::Tensor& tensor) {
        if (tensor.sizes() == whole && shard.parameter.sizes() != whole) {
          tensor = model.sharded->own_slice(i, tensor).clone();
        }
      });
      if (!known) {
        throw InputError(
            "accelerator::prepare", "an optimizer of unknown type has state of whole parameters",
            "one of hasten's, or torch's Adam, AdamW, SGD, RMSprop, Adagrad or one derived from them",
            "prepare it before its first step");
      }
    }
  }
}

HeldRowsByName ModelSet::held_rows() const {
  HeldRowsByName held;
  for (size_t i = 0; i < models_.size(); ++i) {
    if (!holds_parts(i)) {
      continue;
    }
    std::unordered_map<const void*, const ShardedParameter*> shards;
    for (const ShardedParameter& shard : models_[i].sharded->parameters()) {
      shards[shard.parameter.unsafeGetTensorImpl()] = &shard;
    }
    const std::string prefix = "model." + std::to_string(i) + ".";
    for (const auto& item : models_[i].parallel->module()->named_parameters()) {
      const ShardedParameter& shard = *shards.at(item.value().unsafeGetTensorImpl());
      held[prefix + item.key()] = {shard.sizes, shard.first_row, shard.rows};
    }
  }
  return held;
}

NamedTensors ModelSet::shards() const {
  NamedTensors tensors;
  for (size_t i = 0; i < models_.size(); ++i) {
    if (holds_parts(i)) {
      for (const ShardedParameter& shard : models_[i].sharded->parameters()) {
        if (run_.options().save_frozen_weights || shard.parameter.requires_grad()) {
          tensors.emplace("model." + std::to_string(i) + "." + shard.name,
                          shard.parameter.detach());
        }
      }
    }
  }
  return tensors;
}

NamedTensors ModelSet::saved_tensors(size_t model) const {
  const torch::nn::Module& module = *models_[model].parallel->module();
  NamedTensors tensors = named_model_tensors(module);
  for (const auto& item : module.named_parameters()) {
    if (!run_.options().save_frozen_weights && !item.value().requires_grad()) {
      tensors.erase(item.key());
    }
  }
  return tensors;
}

// zero1 and zero2 keep parameters unsharded between a window's batches.
void ModelSet::reshard(const char* where) const {
  for (const PreparedModel& model : models_) {
    if (model.sharded && !model.sharded->reshard()) {
      throw InputError(where, "a forward of a sharded model is open: its parameters are unsharded",
                       "a call outside forward_scope(), and in accumulate() after the backward",
                       "destroy the guard of forward_scope() first");
    }
  }
}

// Gives a parameter another tensor's data while it lives.
class DataSwap {
 public:
  DataSwap(at::Tensor parameter, const at::Tensor& data)
      : parameter_(std::move(parameter)), own_(parameter_.detach()), gradient_(parameter_.grad()) {
    parameter_.mutable_grad().reset(); // it has another shape
    parameter_.set_data(data);
  }
  DataSwap(const DataSwap&) = delete;
  DataSwap& operator=(const DataSwap&) = delete;
  ~DataSwap() {
    parameter_.set_data(own_);
    parameter_.mutable_grad() = gradient_;
  }

 private:
  at::Tensor parameter_;
  at::Tensor own_;
  at::Tensor gradient_;
};

void ModelSet::summon_full_params(const std::vector<size_t>& models,
                                  const std::function<void()>& use, int on_rank) const {
  const at::NoGradGuard no_grad;
  reshard("accelerator::summon_full_params");
  std::vector<std::pair<at::Tensor, at::Tensor>> whole;
  for (const size_t model : models) {
    FullyShard* shards = models_[model].sharded.get();
    for (size_t i = 0; shards != nullptr && i < shards->parameters().size(); ++i) {
      const at::Tensor& parameter = shards->parameters()[i].parameter;
      const at::Tensor all = shards->gather_like(i, parameter.detach());
      if (run_.world().rank == on_rank) {
        whole.emplace_back(parameter, all);
      }
    }
  }
  on_every_rank(*run_.communicator(), "accelerator::summon_full_params", [&] {
    if (run_.world().rank == on_rank) {
      std::vector<std::unique_ptr<DataSwap>> swaps;
      for (const auto& [parameter, all] : whole) {
        swaps.push_back(std::make_unique<DataSwap>(parameter, all));
      }
      use();
    }
    return nlohmann::json();
  });
}

void ModelSet::load_full_params(const std::vector<size_t>& models,
                                const std::function<void()>& load) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> loaded; // rank 0's
  summon_full_params(models, [&] {
    load();
    for (const size_t model : models) {
      for (const auto& entry : models_[model].parallel->parameters()) {
        loaded.push_back(models_[model].sharded ? entry.second.detach().clone()
                                                : entry.second.detach());
      }
    }
  });
  size_t next = 0;
  for (const size_t model : models) {
    FullyShard* shards = models_[model].sharded.get();
    for (size_t i = 0; i < models_[model].parallel->parameters().size(); ++i) {
      const at::Tensor& parameter = models_[model].parallel->parameters()[i].second;
      const auto sizes =
          shards != nullptr ? at::IntArrayRef(shards->parameters()[i].sizes) : parameter.sizes();
      at::Tensor whole = run_.world().rank == 0 ? loaded[next].contiguous()
                                                : at::empty(sizes, parameter.options());
      ++next;
      run_.communicator()->broadcast(whole, 0, "loaded parameter");
      if (shards != nullptr) {
        shards->load_parameter(shards->parameters()[i].name, whole);
      } else {
        parameter.detach().copy_(whole);
      }
    }
    models_[model].parallel->sync_buffers({.first = 0});
  }
}

} // namespace hasten::detail
