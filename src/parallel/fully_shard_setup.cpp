// Construction of a FullyShard: divides the parameters into units and shards them.
#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/parallel/fully_shard.h"
#include "module_buffers.h"
#include "shard_schedule.h"
#include "verify.h"

namespace hasten {

namespace detail {

// Intercepts the calls of a block.
class ShardLink final : public BlockInterceptor {
 public:
  ShardLink(std::shared_ptr<ShardSchedule> schedule, size_t unit)
      : schedule_(std::move(schedule)), unit_(unit) {}
  std::vector<at::Tensor> intercept(const BlockCall&, std::vector<at::Tensor> inputs,
                                    Forward forward) override {
    return schedule_->call(unit_, std::move(inputs), forward);
  }
  void before_recompute(const BlockCall&) override { schedule_->enter_recompute(unit_); }
  void after_recompute(const BlockCall&) noexcept override { schedule_->exit_recompute(unit_); }

 private:
  std::shared_ptr<ShardSchedule> schedule_;
  size_t unit_;
};

// An entry of a Sequential, called as a block.
class SequentialEntry final : public torch::nn::Module {
 public:
  explicit SequentialEntry(torch::nn::AnyModule entry) : entry_(std::move(entry)) {}
  at::Tensor forward(at::Tensor x) {
    Forward run = [entry = entry_](std::vector<at::Tensor> inputs) mutable {
      return std::vector<at::Tensor>{entry.forward(std::move(inputs[0]))};
    };
    const auto chain = find_block_chain(entry_.ptr().get());
    return chain ? run_block_chain(chain, {std::move(x)}, run)[0] : run({std::move(x)})[0];
  }

 private:
  torch::nn::AnyModule entry_;
};

using BlockNumbers = std::unordered_map<const torch::nn::Module*, size_t>;

// The blocks, each once, and the number of each, which is that of its unit.
struct ShardBlocks {
  std::vector<std::shared_ptr<torch::nn::Module>> modules{};
  BlockNumbers numbers{};
};

static ShardBlocks number_blocks(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                                 const torch::nn::Module& model) {
  ShardBlocks blocks;
  for (const auto& block : modules) {
    if (!block || block.get() == &model) {
      throw InputError("parallel::FullyShard",
                       block ? "a block is the model itself" : "a block is null",
                       "blocks inside the model",
                       "leave it out; parameters outside all blocks are in the root unit");
    }
    if (blocks.numbers.emplace(block.get(), blocks.modules.size()).second) {
      blocks.modules.push_back(block);
    }
  }
  return blocks;
}

// Every Sequential in the module, itself included.
static std::vector<std::shared_ptr<torch::nn::SequentialImpl>> sequentials_in(
    const torch::nn::Module& module) {
  std::vector<std::shared_ptr<torch::nn::SequentialImpl>> found;
  std::unordered_set<const torch::nn::Module*> seen;
  for (const auto& visited : module.modules()) {
    auto container = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(visited);
    if (container && seen.insert(container.get()).second) {
      found.push_back(std::move(container));
    }
  }
  return found;
}

// Throws if an entry that is a block has already been wrapped by another object.
static void check_entries(torch::nn::SequentialImpl& container, const BlockNumbers& blocks) {
  for (const auto& child : container.named_children()) {
    const bool called = std::ranges::any_of(
        container, [&](torch::nn::AnyModule& entry) { return entry.ptr() == child.value(); });
    if (blocks.count(child.value().get()) > 0 && !called) {
      throw InputError("parallel::FullyShard",
                       "entry \"" + child.key() + "\" of a Sequential is already wrapped",
                       "the model's own entries",
                       "call gradient_checkpointing_enable after the model is sharded");
    }
  }
}

// Wraps the entries that are blocks; returns a function that restores them.
static std::function<void()> wrap_entries(
    const std::shared_ptr<torch::nn::SequentialImpl>& container, const BlockNumbers& blocks) {
  std::vector<torch::nn::AnyModule> before(container->begin(), container->end());
  for (torch::nn::AnyModule& entry : *container) {
    if (blocks.count(entry.ptr().get()) > 0) {
      entry = torch::nn::AnyModule(std::make_shared<SequentialEntry>(entry));
    }
  }
  return [weak = std::weak_ptr<torch::nn::SequentialImpl>(container), before] {
    if (const auto alive = weak.lock()) {
      std::copy(before.begin(), before.end(), alive->begin());
    }
  };
}

// Visits every module with its name and its unit; `unit` is that of the modules around it.
template <typename Visit>
void visit_modules(torch::nn::Module& module, const std::string& prefix, size_t unit,
                   const BlockNumbers& blocks, const Visit& visit) {
  if (const auto own = blocks.find(&module); own != blocks.end()) {
    unit = own->second;
  }
  visit(module, prefix, unit);
  for (const auto& child : module.named_children()) {
    visit_modules(*child.value(), prefix + child.key() + ".", unit, blocks, visit);
  }
}

static bool has_parameters(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  return std::ranges::any_of(parameters,
                             [](const at::Tensor& parameter) { return parameter.defined(); });
}

static std::shared_ptr<Communicator> own_group(Communicator& communicator) {
  CommunicatorOptions options = communicator.options();
  options.name += " shards";
  return communicator.duplicate(options);
}

} // namespace detail

std::vector<std::shared_ptr<torch::nn::Module>> repeated_blocks(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<torch::nn::Module>> blocks;
  const bool repeats = dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr ||
                       dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr;
  for (const auto& child : module.children()) {
    if (!repeats) {
      const auto inside = repeated_blocks(*child);
      blocks.insert(blocks.end(), inside.begin(), inside.end());
    } else if (detail::has_parameters(*child)) {
      blocks.push_back(child);
    }
  }
  return blocks;
}

static void check_shard_options(const FullyShardOptions& options) {
  if (options.prefetch < 0 || options.prefetch > 1) {
    throw InputError("parallel::FullyShard", "prefetch=" + std::to_string(options.prefetch),
                     "0 or 1");
  }
  const auto check = [](const MixedPrecisionPolicy& precision) {
    for (const auto& [what, dtype] : {std::pair("param_dtype", precision.param_dtype),
                                      std::pair("reduce_dtype", precision.reduce_dtype),
                                      std::pair("output_dtype", precision.output_dtype)}) {
      if (dtype && !at::isFloatingType(*dtype)) {
        throw InputError("parallel::FullyShard", std::string(what) + "=" + c10::toString(*dtype),
                         "a floating-point type");
      }
    }
  };
  check(options.precision);
  for (const auto& [name, precision] : options.unit_precision) {
    check(precision);
  }
}

// Gloo ends the process where sizes differ.
static void verify_shards(Communicator& communicator, Communicator* replicas,
                          const std::vector<ShardedParameter>& parameters,
                          const FlatLayout::NamedParameters& buffers,
                          const std::vector<std::unique_ptr<detail::ShardUnit>>& units) {
  auto mine = nlohmann::json::array();
  for (const ShardedParameter& entry : parameters) {
    mine.push_back(
        {"parameter \"" + entry.name + "\"", detail::describe_tensor(entry.parameter, true) +
                                                 " in unit \"" + units[entry.unit]->name() + "\""});
  }
  for (const auto& [name, buffer] : buffers) {
    mine.push_back({"buffer \"" + name + "\"", detail::describe_tensor(buffer, false)});
  }
  for (Communicator* group : {&communicator, replicas}) {
    if (group != nullptr && group->world_size() > 1) {
      detail::require_equal_lists(*group, mine, "parallel::FullyShard", "model",
                                  "the same model and blocks on every rank",
                                  "build it from the same options everywhere");
    }
  }
  int64_t rows = 0;
  for (const ShardedParameter& entry : parameters) {
    rows = std::max(rows, entry.sizes.empty() ? int64_t{1} : entry.sizes[0]);
  }
  if (rows < communicator.world_size() && !parameters.empty()) {
    log_warning("the largest dimension 0 of a parameter is smaller than the number of ranks (" +
                std::to_string(rows) + " < " + std::to_string(communicator.world_size()) +
                "); the last ranks hold nothing");
  }
}

// Rank 0's values everywhere. Deferred ones are made there alone.
static void broadcast_start(Communicator* communicator, const FullyShardOptions& options,
                            const FlatLayout::NamedParameters& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<Communicator*> groups;
  bool first = true;
  for (Communicator* group : {options.replicas.get(), communicator}) {
    if (group != nullptr && group->world_size() > 1) {
      groups.push_back(group);
      first = first && group->rank() == 0;
    }
  }
  detail::materialize_start(tensors, first, options.device);
  for (Communicator* group : groups) {
    detail::broadcast_tensors(*group, tensors, "initial values");
  }
}

FullyShard::FullyShard(std::shared_ptr<Communicator> communicator,
                       std::shared_ptr<torch::nn::Module> module,
                       const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                       FullyShardOptions options)
    : communicator_(std::move(communicator)),
      module_(std::move(module)),
      options_(std::move(options)),
      buffers_(std::make_shared<detail::ShardBuffers>(
          std::bind_front(&Communicator::allocate_tensor, communicator_))),
      module_buffers_(detail::unique_tensors(module_->named_buffers())) {
  check_shard_options(options_);
  const detail::ShardBlocks blocks = detail::number_blocks(modules, *module_);
  Units units = make_units(blocks);
  verify_shards(*communicator_, options_.replicas.get(), parameters_, module_buffers_, units);
  reductions_ = detail::own_group(*communicator_);
  shard_units(std::move(units));
  attach(blocks);
}

std::shared_ptr<FullyShard> fully_shard(const std::shared_ptr<torch::nn::Module>& module,
                                        std::shared_ptr<Communicator> communicator,
                                        FullyShardOptions options) {
  return std::make_shared<FullyShard>(std::move(communicator), module, repeated_blocks(*module),
                                      std::move(options));
}

// Assigns each tensor to the innermost block that contains it.
FullyShard::Units FullyShard::make_units(const detail::ShardBlocks& blocks) {
  std::vector<std::optional<std::string>> names(blocks.modules.size() + 1);
  names.back() = ""; // the root
  std::unordered_map<const void*, size_t> seen; // TensorImpl -> parameter
  const auto visit = [&](torch::nn::Module& visited, const std::string& prefix, size_t unit) {
    if (blocks.numbers.contains(&visited) && !names[unit]) {
      names[unit] = prefix.substr(0, prefix.size() - 1);
    }
    for (const auto& item : visited.named_parameters(false)) {
      if (!item.value().defined()) {
        continue;
      }
      const auto [tied, fresh] =
          seen.emplace(item.value().unsafeGetTensorImpl(), parameters_.size());
      const std::string name = prefix + item.key();
      if (item.value().is_complex() && communicator_->world_size() > 1) {
        throw InputError("parallel::FullyShard", "parameter \"" + name + "\" is complex",
                         "real parameters", "use strategy=ddp");
      }
      if (fresh) {
        parameters_.push_back({name, item.value(), item.value().sizes().vec(), 0, 0, unit});
      } else if (const auto& first = parameters_[tied->second]; first.unit != unit) {
        throw InputError("parallel::FullyShard",
                         "parameters \"" + first.name + "\" of unit \"" + *names[first.unit] +
                             "\" and \"" + name + "\" of unit \"" + *names[unit] +
                             "\" are one tensor",
                         "tied parameters in one unit",
                         "leave one of the blocks out, or pass a block that has both");
      }
    }
  };
  detail::visit_modules(*module_, "", blocks.modules.size(), blocks.numbers, visit);
  for (size_t i = 0; i < blocks.modules.size(); ++i) {
    if (!names[i]) {
      throw InputError("parallel::FullyShard",
                       "block " + blocks.modules[i]->name() + " is not in the model",
                       "modules that are registered in the model");
    }
  }
  for (const auto& container : detail::sequentials_in(*module_)) {
    detail::check_entries(*container, blocks.numbers);
  }
  for (const auto& [name, precision] : options_.unit_precision) {
    if (std::ranges::find(names, name) == names.end()) {
      throw InputError("parallel::FullyShard", "unit_precision names \"" + name + "\"",
                       "a block's name, or \"\" for the root");
    }
  }
  Units units;
  for (const auto& name : names) {
    const auto own = options_.unit_precision.find(*name);
    units.push_back(std::make_unique<detail::ShardUnit>(
        *name, own == options_.unit_precision.end() ? options_.precision : own->second, buffers_,
        communicator_->rank(), communicator_->world_size()));
  }
  return units;
}

void FullyShard::shard_units(Units units) {
  std::vector<FlatLayout::NamedParameters> parameters(units.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    ShardedParameter& entry = parameters_[i];
    index_[entry.parameter.unsafeGetTensorImpl()] = i;
    parameters[entry.unit].emplace_back(entry.name, entry.parameter);
    units[entry.unit]->add(entry, options_.device.value_or(entry.parameter.device()));
  }
  places_.resize(parameters_.size());
  broadcast_start(communicator_.get(), options_, module_buffers_);
  buffer_versions_ = detail::versions_of(module_buffers_);
  for (size_t u = 0; u < units.size(); ++u) {
    broadcast_start(communicator_.get(), options_, parameters[u]); // unsharded until then
    units[u]->shard();
    for (detail::ShardTensor& tensor : units[u]->tensors()) {
      places_[static_cast<size_t>(tensor.entry - parameters_.data())] = &tensor;
    }
  }
  const bool whole = options_.strategy != ShardingStrategy::fsdp;
  const bool late = options_.strategy == ShardingStrategy::zero1;
  detail::ShardSettings settings;
  settings.gathers = detail::own_group(*communicator_);
  settings.reductions = reductions_;
  settings.replicas = options_.replicas;
  settings.reshard_after_forward = options_.reshard_after_forward.value_or(!whole);
  settings.sync_each_batch = options_.sync_each_batch.value_or(!late);
  settings.prefetch = options_.prefetch;
  schedule_ = std::make_shared<detail::ShardSchedule>(std::move(units), std::move(settings));
}

void FullyShard::attach(const detail::ShardBlocks& blocks) {
  for (size_t unit = 0; unit < blocks.modules.size(); ++unit) {
    attachments_.push_back(attach_block(blocks.modules[unit], BlockStage::shard,
                                        std::make_shared<detail::ShardLink>(schedule_, unit)));
  }
  for (const auto& container : detail::sequentials_in(*module_)) {
    unwrap_.push_back(detail::wrap_entries(container, blocks.numbers));
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].parameter.requires_grad()) {
      hooks_.emplace_back(parameters_[i].parameter,
                          [this, i](const at::Tensor&) { gradient_ready(i); });
    }
  }
}

} // namespace hasten
