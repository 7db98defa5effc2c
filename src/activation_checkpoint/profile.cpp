// Measures blocks one by one, each in a small graph of its own, during one forward whose blocks
// keep nothing.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <unordered_set>

#include "block_regions.h"
#include "hasten/activation_checkpoint/op_policy.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/core/memory.h"
#include "op_replay.h"
#include "region.h"

namespace hasten {

namespace detail {

at::Device device_of(const torch::nn::Module& model) {
  const auto parameters = model.parameters();
  return parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
}

static int64_t live_now(const at::Device& device) { return memory_stats(device).live_bytes; }

void on_gradient(const std::vector<at::Tensor>& tensors,
                 std::function<void(const at::Tensor&)> hook) {
  const auto derived = std::ranges::find_if(
      tensors, [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); });
  if (derived != tensors.end()) {
    derived->register_hook(std::move(hook));
  }
}

// Bytes and seconds of a device since its construction.
class Probe {
 public:
  explicit Probe(const at::Device& device) : device_(device) {
    synchronize(device_);
    reset_peak_memory(device_);
    before_ = live_now(device_);
    start_ = std::chrono::steady_clock::now();
  }
  /// Waits for the device.
  double seconds() const {
    synchronize(device_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  int64_t extra() const { return live_now(device_) - before_; }
  int64_t peak() const { return memory_stats(device_).peak_bytes - before_; }

 private:
  at::Device device_;
  int64_t before_ = 0;
  std::chrono::steady_clock::time_point start_;
};

Untouched::Untouched(const torch::nn::Module& model, const at::Device& device) : Untouched(device) {
  for (const at::Tensor& buffer : model.buffers()) {
    buffers_.emplace_back(buffer, buffer.detach().clone());
  }
  std::unordered_set<const void*> seen;
  for (const at::Tensor& parameter : model.parameters()) {
    if (parameter.requires_grad() && seen.insert(parameter.unsafeGetTensorImpl()).second) {
      gradients_.emplace_back(parameter, parameter.grad());
      at::Tensor(parameter).mutable_grad() = at::zeros_like(parameter);
    }
  }
}

Untouched::~Untouched() {
  for (auto& [parameter, gradient] : gradients_) {
    parameter.mutable_grad() = gradient;
  }
  const at::NoGradGuard no_grad;
  for (auto& [buffer, value] : buffers_) {
    buffer.copy_(value);
  }
}

static int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const void*> seen;
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage() &&
        seen.insert(tensor.storage().unsafeGetStorageImpl()).second) {
      bytes += static_cast<int64_t>(tensor.nbytes());
    }
  }
  return bytes;
}

static std::string tensors_text(char kind, const std::vector<at::Tensor>& tensors) {
  std::ostringstream text;
  for (const at::Tensor& tensor : tensors) {
    text << " " << kind;
    if (tensor.defined()) {
      text << tensor.sizes() << tensor.dtype().name() << tensor.requires_grad();
    } else {
      text << "-";
    }
  }
  return text.str();
}

// Measurements of one way to run a block, forward and backward.
struct BlockRun {
  double forward_seconds = std::numeric_limits<double>::infinity();
  double backward_seconds = std::numeric_limits<double>::infinity();
  double recompute_seconds = std::numeric_limits<double>::infinity();
  int64_t output_bytes = 0;
  int64_t kept_bytes = 0;
  int64_t forward_peak = 0;
  int64_t backward_peak = 0; // minus what is kept

  void least(const BlockRun& other) {
    forward_seconds = std::min(forward_seconds, other.forward_seconds);
    backward_seconds = std::min(backward_seconds, other.backward_seconds);
    recompute_seconds = std::min(recompute_seconds, other.recompute_seconds);
    kept_bytes = std::max(kept_bytes, other.kept_bytes);
    forward_peak = std::max(forward_peak, other.forward_peak);
    backward_peak = std::max(backward_peak, other.backward_peak);
    output_bytes = other.output_bytes;
  }
};

// Starts a backward with gradients of ones that have no other owner, as between the blocks of a
// step. So they are freed as soon as they are used.
class Seeds : public torch::autograd::Function<Seeds> {
 public:
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  static at::Tensor forward(Context* context, at::TensorList outputs) {
    Tensors shapes;
    for (const at::Tensor& output : outputs) {
      shapes.push_back(at::empty({}, output.options()).expand(output.sizes()));
    }
    context->save_for_backward(shapes);
    return at::zeros({}, outputs[0].options());
  }
  static Tensors backward(Context* context, const Tensors&) {
    Tensors seeds;
    for (const at::Tensor& shape : context->get_saved_variables()) {
      seeds.push_back(at::ones(shape.sizes(), shape.options()));
    }
    return seeds;
  }
};

static BlockRun run_block_once(const RegionForward& run, const std::vector<at::Tensor>& given,
                               const at::Device& device) {
  // Forward does not write to existing tensors: buffers stay. Backward is outside its scope,
  // because there it would copy gradients that are added to.
  OpReplayer observer;
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& tensor : given) {
    at::Tensor input = tensor.defined() ? tensor.detach() : tensor;
    if (input.defined() && tensor.requires_grad()) {
      input.set_requires_grad(true);
    }
    inputs.push_back(std::move(input));
  }
  BlockRun result;
  std::vector<at::Tensor> outputs;
  {
    const OpScope scope(&observer);
    const Probe probe(device);
    outputs = run(inputs);
    result.forward_seconds = probe.seconds();
    result.kept_bytes = probe.extra();
    result.forward_peak = probe.peak();
  }
  result.output_bytes = bytes_of(outputs);
  std::vector<at::Tensor> roots;
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      roots.push_back(output);
    }
  }
  if (roots.empty()) {
    result.backward_seconds = result.recompute_seconds = 0;
    return result;
  }
  const at::Tensor root = Seeds::apply(at::TensorList(roots));
  const double recomputed = recompute_counts().seconds;
  const Probe probe(device);
  root.backward();
  result.backward_seconds = probe.seconds();
  result.recompute_seconds = recompute_counts().seconds - recomputed;
  result.backward_peak = probe.peak();
  return result;
}

// The shortest of the repetitions counts. Fast blocks are repeated more often.
constexpr int kMinRepetitions = 3;
constexpr int kMaxRepetitions = 12;
constexpr double kSeconds = 0.05;

static BlockProfile measure_block(const std::vector<at::Tensor>& inputs,
                                  const RegionForward& forward, const at::Device& device) {
  const auto region = [&](std::shared_ptr<const OpPolicy> policy) {
    ActivationCheckpointOptions options;
    options.policy = std::move(policy);
    return RegionForward([&forward, options](std::vector<at::Tensor> tensors) {
      return run_region(forward, std::move(tensors), options);
    });
  };
  const RegionForward dropping = region(nullptr);
  const RegionForward keeping = region(OpPolicy::keep_expensive());
  BlockRun plain;
  BlockRun dropped;
  BlockRun ops;
  const GeneratorState before(device);
  {
    run_block_once(dropping, inputs, device); // warm-up of memory and caches
    const Probe all(device);
    for (int i = 0; i < kMinRepetitions || (i < kMaxRepetitions && all.seconds() < kSeconds); ++i) {
      plain.least(run_block_once(forward, inputs, device));
      dropped.least(run_block_once(dropping, inputs, device));
      ops.least(run_block_once(keeping, inputs, device));
    }
  }
  const auto beyond = [&](const BlockRun& run) {
    return std::max<int64_t>(0, run.backward_peak - plain.output_bytes);
  };
  BlockProfile profile;
  profile.forward_seconds = plain.forward_seconds;
  profile.backward_seconds = plain.backward_seconds;
  profile.recompute_seconds = dropped.recompute_seconds;
  profile.output_bytes = plain.output_bytes;
  profile.saved_bytes = std::max(plain.kept_bytes, plain.output_bytes);
  profile.forward_extra = plain.forward_peak - plain.kept_bytes;
  profile.dropped_peak = dropped.forward_peak;
  profile.backward_extra = beyond(plain);
  profile.recompute_peak = dropped.backward_peak;
  profile.ops_saved_bytes = std::max(ops.kept_bytes, ops.output_bytes);
  profile.ops_backward_extra = beyond(ops);
  profile.ops_recompute_seconds = ops.recompute_seconds;
  before.restore();
  {
    const at::NoGradGuard no_grad;
    OpReplayer observer;
    const OpScope scope(&observer);
    forward(inputs);
  }
  profile.random = !before.again().same_as(before);
  before.restore();
  return profile;
}

class ProfileHandler final : public StepMeter {
 public:
  std::vector<at::Tensor> call(const std::shared_ptr<torch::nn::Module>& block,
                               const std::string& name, std::vector<at::Tensor> inputs,
                               const Forward& forward) override {
    const RegionForward part = block_part(block, forward);
    const std::string shapes = block->name() + (block->is_training() ? "1" : "0") +
                               tensors_text('p', block->parameters()) + tensors_text('i', inputs);
    hashed_ += name + shapes + "\n";
    if (profile.blocks.empty()) {
      profile.before_bytes = live_now(device) - level;
      // When the input of the chain has its gradient, the backward of all blocks is done.
      on_gradient(inputs, [this](const at::Tensor&) {
        first_derived_ = true;
        reset_peak_memory(device);
      });
    } else {
      profile.other_seconds += other_->seconds();
    }
    std::vector<at::Tensor> outputs = run_region(part, inputs, {});
    // A block with a smaller output is measured separately: BERT's last block computes one token.
    const std::string kind = shapes + " ->" + tensors_text('i', outputs);
    auto known = known_.find(kind);
    if (known == known_.end()) {
      known = known_.emplace(kind, measure_block(inputs, part, device)).first;
    }
    profile.blocks.push_back(known->second);
    profile.blocks.back().name = name;
    inputs.clear();
    watch_last(outputs);
    other_.emplace(device);
    return outputs;
  }

  void end() override {
    if (first_derived_) {
      profile.first_peak_bytes = memory_stats(device).peak_bytes - level;
    }
    profile.shapes_hash = hash_hex(hashed_);
  }

  ChainProfile profile{};

 private:
  // When the output of a block has its gradient, the backward of what follows is done. The last
  // block's output counts.
  void watch_last(const std::vector<at::Tensor>& outputs) {
    const int64_t after = live_now(device);
    const size_t blocks = profile.blocks.size();
    reset_peak_memory(device);
    on_gradient(outputs, [this, after, blocks](const at::Tensor& gradient) {
      if (blocks == profile.blocks.size()) {
        profile.after_bytes = memory_stats(device).peak_bytes - after;
        profile.after_left_bytes = std::max<int64_t>(
            0, live_now(device) - after - static_cast<int64_t>(gradient.nbytes()));
        profile.other_seconds += other_->seconds();
      }
    });
  }

  std::map<std::string, BlockProfile> known_{};
  std::string hashed_{};
  std::optional<Probe> other_{};
  bool first_derived_ = false;
};

void meter_step(const std::shared_ptr<torch::nn::Module>& model,
                const std::shared_ptr<StepMeter>& meter, const std::shared_ptr<BlockHandler>& after,
                const std::function<at::Tensor()>& loss) {
  install_memory_meter();
  meter->device = device_of(*model);
  const Untouched untouched(*model, meter->device);
  attach_handler(model, meter);
  const at::AutoGradMode grad_mode(true);
  const auto put_back = c10::make_scope_exit(
      [&] { after ? attach_handler(model, after) : gradient_checkpointing_disable(model); });
  reset_peak_memory(meter->device);
  meter->level = live_now(meter->device);
  loss().backward();
  meter->end();
}

} // namespace detail

ChainProfile profile_activations(const std::shared_ptr<torch::nn::Module>& model,
                                 const std::function<at::Tensor()>& loss) {
  const auto handler = std::make_shared<detail::ProfileHandler>();
  detail::meter_step(model, handler, nullptr, [&] {
    at::Tensor value = loss();
    if (!value.defined() || value.numel() != 1 || !value.requires_grad()) {
      throw InputError("activation_checkpoint::profile_activations",
                       std::string("loss=") + (!value.defined()     ? "undefined"
                                               : value.numel() != 1 ? "of several elements"
                                                                    : "without a graph"),
                       "a scalar that depends on parameters");
    }
    return value;
  });
  if (handler->profile.blocks.empty()) {
    throw InputError("activation_checkpoint::profile_activations",
                     "blocks=0 in the model's forward",
                     "blocks called through hasten::call_block, or a torch::nn::Sequential",
                     "write hasten::call_block(block, x) for block->forward(x)");
  }
  return handler->profile;
}

PlanCost detail::observe_step(const std::shared_ptr<torch::nn::Module>& model,
                              const std::function<at::Tensor()>& loss) {
  install_memory_meter();
  const at::Device device = device_of(*model);
  const Untouched untouched(*model, device);
  const at::AutoGradMode grad_mode(true);
  const Probe probe(device);
  loss().backward();
  return {probe.peak(), probe.seconds()};
}

int64_t observe_peak(const std::shared_ptr<torch::nn::Module>& model,
                     const std::function<at::Tensor()>& loss) {
  return detail::observe_step(model, loss).peak_bytes;
}

} // namespace hasten
