#include "block_regions.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include "hasten/activation_checkpoint/op_policy.h"
#include "hasten/base/error.h"

namespace hasten {

namespace detail {

static thread_local int inside_blocks = 0;

// Marks that this thread is inside a block. Blocks inside it belong to it.
struct InsideBlock {
  InsideBlock() { ++inside_blocks; }
  InsideBlock(const InsideBlock&) = delete;
  InsideBlock& operator=(const InsideBlock&) = delete;
  ~InsideBlock() { --inside_blocks; }
};

RegionForward block_part(const std::shared_ptr<torch::nn::Module>& block, Forward forward) {
  auto ran = std::make_shared<std::atomic<bool>>(false);
  return [block, ran, forward = std::move(forward)](std::vector<at::Tensor> inputs) {
    const InsideBlock inside;
    std::optional<RecomputeNotice> notice;
    if (ran->exchange(true)) {
      notice.emplace(block.get());
    }
    return forward(std::move(inputs));
  };
}

// Handles each block separately: all blocks, one in K, or by operators.
class ModeHandler final : public BlockHandler {
 public:
  explicit ModeHandler(const GradientCheckpointingOptions& options) : options_(options) {
    if (options.mode.mode() == GradientCheckpointing::Mode::ops && !options_.region.policy) {
      options_.region.policy = OpPolicy::keep_expensive();
    }
  }

  std::vector<at::Tensor> call(const std::shared_ptr<torch::nn::Module>& block,
                               const std::string& name, std::vector<at::Tensor> inputs,
                               const Forward& forward) override {
    if (index_of(block.get()) % options_.mode.every() != 0) {
      const InsideBlock inside;
      return forward(std::move(inputs));
    }
    ActivationCheckpointOptions options = options_.region;
    options.name = name;
    return run_region(block_part(block, forward), std::move(inputs), options);
  }

 private:
  // Index in the order of the first calls.
  int64_t index_of(const torch::nn::Module* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return indices_.try_emplace(block, static_cast<int64_t>(indices_.size())).first->second;
  }

  GradientCheckpointingOptions options_;
  std::mutex mutex_;
  std::unordered_map<const torch::nn::Module*, int64_t> indices_{};
};

class HandlerLink final : public BlockInterceptor {
 public:
  HandlerLink(std::shared_ptr<BlockHandler> handler, std::string name)
      : handler_(std::move(handler)), name_(std::move(name)) {}
  std::vector<at::Tensor> intercept(const BlockCall& call, std::vector<at::Tensor> inputs,
                                    Forward forward) override {
    if (inside_blocks > 0 || !at::GradMode::is_enabled()) {
      return forward(std::move(inputs));
    }
    handler_->called = true;
    return handler_->call(call.block, name_, std::move(inputs), forward);
  }

 private:
  std::shared_ptr<BlockHandler> handler_;
  std::string name_;
};

// Entries [first, last) of a Sequential, called as one block. It replaces the first entry. Modules
// that return their input replace the others.
class SequentialPart final : public torch::nn::Module {
 public:
  explicit SequentialPart(std::vector<torch::nn::AnyModule> entries)
      : entries_(std::move(entries)) {}
  at::Tensor forward(at::Tensor x) {
    // The registry finds the block by the identity of the first entry.
    const auto chain = find_block_chain(entries_[0].ptr().get());
    Forward run = [this, alive = shared_from_this()](std::vector<at::Tensor> inputs) {
      at::Tensor y = std::move(inputs[0]);
      for (torch::nn::AnyModule& entry : entries_) {
        y = entry.forward(std::move(y));
      }
      return std::vector<at::Tensor>{std::move(y)};
    };
    return chain ? run_block_chain(chain, {std::move(x)}, std::move(run))[0]
                 : run({std::move(x)})[0];
  }

 private:
  std::vector<torch::nn::AnyModule> entries_;
};

struct HandOnImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
};

// Lengths of a Sequential's parts: a module with children is a part of its own; n consecutive
// others form ceil(sqrt(n)) parts.
static std::vector<size_t> part_lengths(torch::nn::SequentialImpl& container) {
  std::vector<size_t> lengths;
  size_t leaves = 0;
  const auto cut_leaves = [&] {
    const auto parts = static_cast<size_t>(std::ceil(std::sqrt(static_cast<double>(leaves))));
    for (size_t part = 0; part < parts; ++part) {
      lengths.push_back(leaves * (part + 1) / parts - leaves * part / parts);
    }
    leaves = 0;
  };
  for (size_t i = 0; i < container.size(); ++i) {
    if (container.ptr(i)->children().empty()) {
      ++leaves;
    } else {
      cut_leaves();
      lengths.push_back(1);
    }
  }
  cut_leaves();
  return lengths;
}

// Wraps the container's entries. They are restored at the end of the returned object.
static std::shared_ptr<void> wrap_sequential(
    const std::shared_ptr<torch::nn::SequentialImpl>& container) {
  std::vector<torch::nn::AnyModule> before(container->begin(), container->end());
  size_t at = 0;
  for (const size_t length : part_lengths(*container)) {
    const auto first = before.begin() + static_cast<int64_t>(at);
    auto entry = container->begin() + static_cast<int64_t>(at);
    *entry = torch::nn::AnyModule(std::make_shared<SequentialPart>(
        std::vector<torch::nn::AnyModule>(first, first + static_cast<int64_t>(length))));
    for (size_t i = 1; i < length; ++i) {
      *(++entry) = torch::nn::AnyModule(std::make_shared<HandOnImpl>());
    }
    at += length;
  }
  return {nullptr, [weak = std::weak_ptr<torch::nn::SequentialImpl>(container), before](void*) {
            if (const auto alive = weak.lock()) {
              std::copy(before.begin(), before.end(), alive->begin());
            }
          }};
}

// The enabled models. Leaked, because static destructors may still use it.
struct EnabledModels {
  struct Entry {
    std::weak_ptr<torch::nn::Module> model{};
    std::shared_ptr<BlockHandler> handler{};
    std::vector<BlockAttachment> attachments{};
    std::vector<std::shared_ptr<void>> wrapped{}; // Sequentials
  };
  std::mutex mutex;
  std::map<const torch::nn::Module*, Entry> entries{};
};
static EnabledModels& enabled_models() {
  static auto* models = new EnabledModels;
  return *models;
}

void attach_handler(const std::shared_ptr<torch::nn::Module>& model,
                    std::shared_ptr<BlockHandler> handler) {
  gradient_checkpointing_disable(model);
  EnabledModels::Entry enabled{model, handler};
  std::vector<std::shared_ptr<torch::nn::SequentialImpl>> containers;
  std::unordered_set<const torch::nn::Module*> seen; // shared modules occur twice
  for (const auto& entry : model->named_modules()) {
    const auto& module = entry.value();
    if (!seen.insert(module.get()).second) {
      continue;
    }
    enabled.attachments.push_back(attach_block(
        module, BlockStage::checkpoint, std::make_shared<HandlerLink>(handler, entry.key())));
    if (auto container = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(module)) {
      containers.push_back(std::move(container));
    }
  }
  for (const auto& container : containers) {
    enabled.wrapped.push_back(wrap_sequential(container));
  }
  EnabledModels& models = enabled_models();
  const std::lock_guard<std::mutex> lock(models.mutex);
  models.entries[model.get()] = std::move(enabled);
}

std::shared_ptr<BlockHandler> attached_handler(const std::shared_ptr<torch::nn::Module>& model) {
  EnabledModels& models = enabled_models();
  const std::lock_guard<std::mutex> lock(models.mutex);
  const auto it = models.entries.find(model.get());
  return it == models.entries.end() || it->second.model.expired() ? nullptr : it->second.handler;
}

} // namespace detail

void gradient_checkpointing_enable(const std::shared_ptr<torch::nn::Module>& model,
                                   const GradientCheckpointingOptions& options) {
  if (!model) {
    throw InputError("activation_checkpoint::gradient_checkpointing_enable", "model=null",
                     "a model");
  }
  if (options.plan) {
    detail::attach_handler(model, detail::make_plan_handler(options.plan, options.region));
    return;
  }
  if (options.mode.mode() == GradientCheckpointing::Mode::budget) {
    throw InputError("activation_checkpoint::gradient_checkpointing_enable",
                     "mode=" + options.mode.text() + " without a plan",
                     "a plan, which needs measurements",
                     "call hasten::enable_within_budget(model, loss, budget)");
  }
  if (!options.mode) {
    gradient_checkpointing_disable(model);
    return;
  }
  detail::attach_handler(model, std::make_shared<detail::ModeHandler>(options));
}

void gradient_checkpointing_disable(const std::shared_ptr<torch::nn::Module>& model) {
  detail::EnabledModels& models = detail::enabled_models();
  const std::lock_guard<std::mutex> lock(models.mutex);
  std::erase_if(models.entries, [&model](const auto& entry) {
    return entry.first == model.get() || entry.second.model.expired();
  });
}

bool gradient_checkpointing_called(const std::shared_ptr<torch::nn::Module>& model) {
  const auto handler = detail::attached_handler(model);
  return handler && handler->called;
}

bool gradient_checkpointing_enabled(const std::shared_ptr<torch::nn::Module>& model) {
  return detail::attached_handler(model) != nullptr;
}

} // namespace hasten
