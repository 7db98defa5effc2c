// Models of which each rank holds a part.
#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>

#include "accelerator_core.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/optim/fused_optimizer.h"
#include "hasten/optim/optimizer_state.h"
#include "sharded_model.h"

namespace hasten {

namespace detail {

ShardingStrategy sharding_of(Strategy strategy) {
  return strategy == Strategy::zero1   ? ShardingStrategy::zero1
         : strategy == Strategy::zero2 ? ShardingStrategy::zero2
                                       : ShardingStrategy::fsdp;
}

std::vector<std::shared_ptr<torch::nn::Module>> named_units(const torch::nn::Module& model,
                                                            const std::vector<std::string>& names) {
  const auto modules = model.named_modules();
  std::vector<std::shared_ptr<torch::nn::Module>> units;
  for (const std::string& name : names) {
    const auto* found = modules.find(name);
    if (found == nullptr || name.empty()) {
      throw InputError("accelerator::prepare",
                       "shard_units has \"" + name + "\", which the model has not",
                       "names of its modules, like those of named_modules()");
    }
    units.push_back(*found);
  }
  return units;
}

// Ranks next to each other hold a copy together; those at the same place of theirs hold
// the same rows.
void AcceleratorCore::open_shard_groups() {
  if (options.strategy != Strategy::hsdp || shard_group_) {
    return;
  }
  const int ranks = communicator->world_size();
  const int size = options.shard_size > 0 ? options.shard_size : world.local_world_size;
  if (size < 1 || size > ranks || ranks % size != 0) {
    throw InputError(
        "accelerator::prepare",
        "shard_size=" + std::to_string(size) + " on " + std::to_string(ranks) + " ranks",
        "a divisor of the number of ranks");
  }
  std::vector<int> copy;
  std::vector<int> same_rows;
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank / size == world.rank / size) {
      copy.push_back(rank);
    }
    if (rank % size == world.rank % size) {
      same_rows.push_back(rank);
    }
  }
  static std::atomic<int> made{0}; // names must differ; equal on all ranks
  CommunicatorOptions like = communicator->options();
  const std::string name = like.name + " ";
  const std::string number = " " + std::to_string(++made);
  like.name = name + "copy" + number;
  shard_group_ = communicator->new_group(copy, like);
  if (same_rows.size() > 1) {
    like.name = name + "replicas" + number;
    replicas_ = communicator->new_group(same_rows, like);
  }
}

bool AcceleratorCore::has_replicas(uint64_t mask) const {
  const auto models = models_in(mask);
  return replicas_ != nullptr && std::any_of(models.begin(), models.end(), [this](size_t i) {
           return models_[i].sharded != nullptr;
         });
}

void AcceleratorCore::prepare_sharded(ModelState& state, std::shared_ptr<torch::nn::Module> module,
                                      BufferPolicy buffers) {
  FullyShardOptions how = options.fully_shard;
  how.buffers = buffers;
  if (precision_ != Precision::no && !how.precision.param_dtype) {
    // Autocast's own casts of whole parameters would stay until backward.
    how.unit_precision.try_emplace("", how.precision);
    how.precision.param_dtype = precision_ == Precision::bf16 ? at::kBFloat16 : at::kHalf;
    how.precision.cast_forward_inputs = false;
  }
  how.strategy = sharding_of(options.strategy);
  open_shard_groups();
  how.replicas = replicas_;
  how.everyone = replicas_ ? communicator : nullptr;
  const auto units = options.shard_units.empty() ? repeated_blocks(*module)
                                                 : named_units(*module, options.shard_units);
  if (units.empty() && world.world_size > 1 && world.rank == 0) {
    log_warning(std::string("strategy=") + strategy_name(options.strategy) +
                " finds no block to divide the model by: all parameters are gathered "
                "at once. Call repeated layers of a Sequential or a ModuleList by "
                "hasten::call_block, or name them in shard_units");
  }
  const auto model = std::make_shared<ShardedModel>(shard_group_ ? shard_group_ : communicator,
                                                    std::move(module), units, std::move(how));
  if (options.fully_shard.sync == GradientSync::last && world.rank == 0) {
    log_info("fully_shard.sync=last: gradients are summed once a window, and every rank keeps " +
             format_bytes(model->shards().unsharded_gradient_bytes()) +
             " of whole ones until then");
  }
  state.parallel = model;
  state.sharded = {model, &model->shards()};
}

// Their step needs a norm, or rows and columns, of the whole parameter.
void AcceleratorCore::refuse_optimizer(const torch::optim::Optimizer& optimizer,
                                       const std::vector<SlotList>& lists) const {
  const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer);
  const bool sharded = std::any_of(lists.begin(), lists.end(), [this](const SlotList& list) {
    return models_[list.model].sharded != nullptr;
  });
  if (sharded && fused != nullptr && !fused->by_elements()) {
    throw InputError(
        "accelerator::prepare",
        "optimizer=" + fused->name() + " with strategy=" + strategy_name(options.strategy),
        "an optimizer whose step looks at each number by itself",
        "use AdamW, Adam, SGD or Lion, or strategy=ddp");
  }
}

void AcceleratorCore::cut_optimizer_state(torch::optim::Optimizer& optimizer) {
  for (const ModelState& model : models_) {
    for (size_t i = 0; model.sharded && i < model.sharded->parameters().size(); ++i) {
      const ShardedParameter& shard = model.sharded->parameters()[i];
      const auto state = optimizer.state().find(shard.parameter.unsafeGetTensorImpl());
      if (state == optimizer.state().end()) {
        continue;
      }
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

void AcceleratorCore::refuse_sharded_outside(const std::vector<size_t>& models) const {
  for (const size_t model : models) {
    if (models_[model].sharded) {
      throw InputError("accelerator::backward",
                       std::string("a loss of a model with strategy=") +
                           strategy_name(options.strategy) + " outside accumulate()",
                       "accumulate() around forward and backward: it puts parameters "
                       "together and begins their sums",
                       "auto window = accelerator.accumulate(model) before the forward");
    }
  }
}

HeldRowsByName AcceleratorCore::held_rows() const {
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

NamedTensors AcceleratorCore::shards() const {
  NamedTensors tensors;
  for (size_t i = 0; i < models_.size(); ++i) {
    if (holds_parts(i)) {
      for (const ShardedParameter& shard : models_[i].sharded->parameters()) {
        tensors.emplace("model." + std::to_string(i) + "." + shard.name, shard.parameter.detach());
      }
    }
  }
  return tensors;
}

// zero1 and zero2 keep whole parameters between a window's batches.
void AcceleratorCore::reshard(const char* where) {
  for (const ModelState& model : models_) {
    if (model.sharded && !model.sharded->reshard()) {
      throw InputError(where, "a forward of a sharded model is open: its parameters are whole",
                       "a call outside forward_scope(), and in accumulate() behind the backward",
                       "let what forward_scope() returned end before");
    }
  }
}

// Gives a parameter another tensor's data while it lives.
class DataSwap {
 public:
  DataSwap(at::Tensor parameter, const at::Tensor& data)
      : parameter_(std::move(parameter)), own_(parameter_.detach()), gradient_(parameter_.grad()) {
    parameter_.mutable_grad().reset(); // of another shape
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

void AcceleratorCore::summon_full_params(const std::vector<size_t>& models,
                                         const std::function<void()>& use, int on_rank) {
  const at::NoGradGuard no_grad;
  reshard("accelerator::summon_full_params");
  std::vector<std::pair<at::Tensor, at::Tensor>> whole;
  for (const size_t model : models) {
    FullyShard* shards = models_[model].sharded.get();
    for (size_t i = 0; shards != nullptr && i < shards->parameters().size(); ++i) {
      const at::Tensor& parameter = shards->parameters()[i].parameter;
      const at::Tensor all = shards->gather_like(i, parameter.detach());
      if (world.rank == on_rank) {
        whole.emplace_back(parameter, all);
      }
    }
  }
  on_every_rank(*communicator, "accelerator::summon_full_params", [&] {
    if (world.rank == on_rank) {
      std::vector<std::unique_ptr<DataSwap>> swaps;
      for (const auto& [parameter, all] : whole) {
        swaps.push_back(std::make_unique<DataSwap>(parameter, all));
      }
      use();
    }
    return nlohmann::json();
  });
}

void AcceleratorCore::load_full_params(const std::vector<size_t>& models,
                                       const std::function<void()>& load) {
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
      at::Tensor whole =
          world.rank == 0 ? loaded[next].contiguous() : at::empty(sizes, parameter.options());
      ++next;
      communicator->broadcast(whole, 0, "loaded parameter");
      if (shards != nullptr) {
        shards->load_parameter(shards->parameters()[i].name, whole);
      } else {
        parameter.detach().copy_(whole);
      }
    }
    models_[model].parallel->sync_buffers({.first = 0});
  }
}

static std::vector<size_t> model_indices(const AcceleratorCore& core,
                                         const std::vector<torch::nn::Module*>& models,
                                         const char* where) {
  std::vector<size_t> indices;
  for (const auto* module : models) {
    indices.push_back(core.model_index(module, where));
  }
  return indices;
}

} // namespace detail

ForwardGuard::ForwardGuard(detail::AcceleratorCore& core,
                           const std::vector<torch::nn::Module*>& models) {
  for (const auto* module : models) {
    if (FullyShard* sharded = core.sharded(module); sharded != nullptr) {
      scopes_.emplace_back(new ForwardScope(sharded->forward_scope()));
    }
  }
  if (!scopes_.empty() && core.precision() != Precision::no) {
    cast_ = std::make_unique<Autocast>(core.autocast_options());
  }
}

bool Accelerator::shards_module(const torch::nn::Module& model) const {
  return core_->sharded(&model) != nullptr;
}

void Accelerator::run_summon_full_params(const std::function<void()>& use,
                                         const std::vector<torch::nn::Module*>& models) {
  core_->summon_full_params(
      detail::model_indices(*core_, models, "accelerator::summon_full_params"), use);
}

void Accelerator::run_load_full_params(const std::function<void()>& load,
                                       const std::vector<torch::nn::Module*>& models) {
  core_->load_full_params(detail::model_indices(*core_, models, "accelerator::load_full_params"),
                          load);
}

} // namespace hasten
