// Fine-tuning of BERT-base in bf16 on synthetic tokens on one device. Peer: peers/gpu_step.py.
//   gpu_step trainer [flags]   hasten's Trainer
//   gpu_step plain [flags]     a loop of LibTorch's calls alone: autocast, clipping, fused AdamW
//   gpu_step floor [flags]     what the device can do: products, copies, launches
// Flags: --device NAME, --tokens N, --batch N, --steps N, --smoke (bert-tiny, and small tensors).
// Prints one JSON object. Times are seconds; first_step is a Unix time; launches is the number of
// kernels and copies of a step, or, on a device that is not CUDA, of operators.
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>

#include "hasten/core/device.h"
#include "hasten/core/memory.h"
#include "hasten/core/random.h"
#include "hasten/models/auto_model.h"
#include "hasten/trainer/trainer.h"

namespace hasten {

struct GpuFlags {
  std::string mode;
  std::string device = "auto";
  int64_t tokens = 128;
  int64_t batch = 32;
  int64_t steps = 40;
  bool smoke = false;
};

constexpr int64_t kGpuWarmup = 5; // steps before the measured ones
constexpr double kGpuRate = 5e-5;

static double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Counts what the device is given while it lives.
class LaunchCount {
 public:
  explicit LaunchCount(const at::Device& device) : cuda_(device.is_cuda()) {
    using torch::profiler::impl::ActivityType;
    std::set<ActivityType> activities{ActivityType::CPU};
    if (cuda_) {
      activities.insert(ActivityType::CUDA);
    }
    const torch::profiler::impl::ProfilerConfig config(
        torch::profiler::impl::ProfilerState::KINETO);
    torch::autograd::profiler::prepareProfiler(config, activities);
    torch::autograd::profiler::enableProfiler(config, activities);
  }
  int64_t end() {
    const auto result = torch::autograd::profiler::disableProfiler();
    return std::ranges::count_if(result->events(), [&](const auto& event) {
      return cuda_ ? event.deviceType() == at::kCUDA : event.name().starts_with("aten::");
    });
  }

 private:
  bool cuda_;
};

/// Both loops call ended() after each step. The device is waited for after the first step, before
/// the measured ones and after them. One more step is counted.
class GpuMeasure {
 public:
  GpuMeasure(const at::Device& device, int64_t steps) : device_(device), steps_(steps) {}
  int64_t all_steps() const { return kGpuWarmup + steps_ + 1; }

  void ended(int64_t step) {
    if (step == 1) {
      ::hasten::detail::synchronize(device_);
      first_step_ = unix_seconds();
    } else if (step == kGpuWarmup) {
      ::hasten::detail::synchronize(device_);
      start_ = unix_seconds();
    } else if (step == kGpuWarmup + steps_) {
      ::hasten::detail::synchronize(device_);
      seconds_ = (unix_seconds() - start_) / static_cast<double>(steps_);
      peak_ = memory_stats(device_).peak_bytes;
      count_.emplace(device_);
    } else if (step == all_steps()) {
      ::hasten::detail::synchronize(device_);
      launches_ = count_->end();
    }
  }

  void print(const torch::nn::Module& model) const {
    int64_t all = 0, in_products = 0; // rows of an embedding are looked up
    for (const auto& parameter : model.named_parameters()) {
      all += parameter.value().numel();
      in_products +=
          parameter.key().find("embeddings") == std::string::npos ? parameter.value().numel() : 0;
    }
    std::printf(
        "{\"step\": %.9f, \"first_step\": %.6f, \"peak_bytes\": %lld, \"launches\": %lld, "
        "\"parameters\": %lld, \"in_products\": %lld}\n",
        seconds_, first_step_, static_cast<long long>(peak_), static_cast<long long>(launches_),
        static_cast<long long>(all), static_cast<long long>(in_products));
  }

 private:
  at::Device device_;
  int64_t steps_;
  double first_step_ = 0, start_ = 0, seconds_ = 0;
  int64_t peak_ = 0, launches_ = 0;
  std::optional<LaunchCount> count_{};
};

class MeasureCallback final : public TrainerCallback {
 public:
  explicit MeasureCallback(GpuMeasure* measure) : measure_(measure) {}
  void on_step_end(const StepProgress& progress) override { measure_->ended(progress.global_step); }

 private:
  GpuMeasure* measure_;
};

/// Tokens of one length, a new sample for each index.
class SyntheticTokens final : public Dataset {
 public:
  SyntheticTokens(int64_t rows, int64_t tokens)
      : ids_(torch::randint(1, 30'000, {rows, tokens})), labels_(torch::randint(0, 2, {rows})) {}
  int64_t size() const override { return ids_.size(0); }
  Batch collate(const std::vector<int64_t>& indices) const override {
    const at::Tensor rows = torch::tensor(indices);
    Batch batch;
    batch.tensors["input_ids"] = ids_.index_select(0, rows);
    batch.tensors["attention_mask"] = torch::ones_like(batch["input_ids"]);
    batch.tensors["labels"] = labels_.index_select(0, rows);
    batch.indices = indices;
    return batch;
  }

 private:
  at::Tensor ids_, labels_;
};

static PreTrainedModel gpu_model(const GpuFlags& flags) {
  set_seed(1);
  return AutoModelForSequenceClassification::from_config(
      AutoConfig::from_shape(flags.smoke ? "bert-tiny" : "bert-base"));
}

static void run_trainer(const GpuFlags& flags, const at::Device& device) {
  PreTrainedModel model = gpu_model(flags);
  GpuMeasure measure(device, flags.steps);
  TrainingArguments arguments;
  arguments.device = device.str();
  arguments.bf16 = true;
  arguments.optim = OptimizerType::adamw_torch_fused;
  arguments.learning_rate = kGpuRate;
  arguments.max_steps = measure.all_steps();
  arguments.per_device_train_batch_size = flags.batch;
  arguments.logging_steps = 500; // the peer's default
  arguments.train_sampling_strategy = SamplingStrategy::random;
  arguments.save_strategy = SaveStrategy::no;
  arguments.disable_tqdm = true;
  Trainer trainer(
      model.ptr(),
      [&](const Batch& batch) {
        const at::Tensor logits =
            model->forward({batch["input_ids"], batch["attention_mask"]}).logits;
        const auto rows = static_cast<double>(batch.rows());
        return LossOutput{torch::cross_entropy_loss(logits, batch["labels"]) * rows, rows, logits};
      },
      arguments,
      std::make_shared<SyntheticTokens>(flags.batch * measure.all_steps(), flags.tokens));
  trainer.add_callback(std::make_shared<MeasureCallback>(&measure));
  trainer.train();
  measure.print(*model);
}

/// torch.optim.AdamW(fused=True) and clip_grad_norm_ as PyTorch calls the operators.
struct PlainOptimizer {
  explicit PlainOptimizer(std::vector<at::Tensor> all) : parameters(std::move(all)) {
    for (const at::Tensor& parameter : parameters) {
      exp_avgs.push_back(at::zeros_like(parameter));
      exp_avg_sqs.push_back(at::zeros_like(parameter));
      steps.push_back(at::zeros({}, parameter.options().dtype(at::kFloat)));
    }
  }
  void step(double rate) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> grads;
    for (const at::Tensor& parameter : parameters) {
      grads.push_back(parameter.grad());
    }
    const at::Tensor norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(grads, 2)));
    at::_foreach_mul_(grads, at::clamp_max(1.0 / (norm + 1e-6), 1.0));
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(parameters, grads, exp_avgs, exp_avg_sqs, {}, steps, rate, 0.9, 0.999, 0.0,
                      1e-8, false, false);
    for (at::Tensor& parameter : parameters) {
      parameter.mutable_grad().reset();
    }
  }
  std::vector<at::Tensor> parameters, exp_avgs{}, exp_avg_sqs{}, steps{};
};

static void run_plain(const GpuFlags& flags, const at::Device& device) {
  PreTrainedModel model = gpu_model(flags);
  model->to(device);
  model->train();
  GpuMeasure measure(device, flags.steps);
  PlainOptimizer optimizer(model->parameters());
  const SyntheticTokens data(flags.batch * measure.all_steps(), flags.tokens);
  at::Tensor loss_sum = at::zeros({}, at::TensorOptions(device));
  for (int64_t step = 1; step <= measure.all_steps(); ++step) {
    std::vector<int64_t> indices(static_cast<size_t>(flags.batch));
    std::iota(indices.begin(), indices.end(), (step - 1) * flags.batch);
    const Batch batch = data.collate(indices);
    const auto to = [&](const char* name) {
      return device.is_cpu() ? batch[name]
                             : batch[name].pin_memory().to(device, batch[name].scalar_type(), true);
    };
    const at::Tensor labels = to("labels");
    at::autocast::set_autocast_enabled(device.type(), true);
    at::autocast::set_autocast_dtype(device.type(), at::kBFloat16);
    const at::Tensor loss = torch::cross_entropy_loss(
        model->forward({to("input_ids"), to("attention_mask")}).logits, labels);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device.type(), false);
    loss.backward();
    loss_sum.add_(loss.detach());
    optimizer.step(kGpuRate * (1 - double(step - 1) / double(measure.all_steps())));
    measure.ended(step);
  }
  measure.print(*model);
}

/// Seconds of one call of many, the device's waiting included.
static double seconds_of(const at::Device& device, int64_t calls,
                         const std::function<void()>& call) {
  for (int i = 0; i < 3; ++i) {
    call();
  }
  ::hasten::detail::synchronize(device);
  const double start = unix_seconds();
  for (int64_t i = 0; i < calls; ++i) {
    call();
  }
  ::hasten::detail::synchronize(device);
  return (unix_seconds() - start) / static_cast<double>(calls);
}

static void run_floor(const GpuFlags& flags, const at::Device& device) {
  const int64_t side = flags.smoke ? 128 : 8192, copied = int64_t{1} << (flags.smoke ? 16 : 30);
  const auto options = at::TensorOptions(device).dtype(at::kBFloat16);
  const at::Tensor a = torch::randn({side, side}, options), b = torch::randn({side, side}, options);
  at::Tensor product = torch::empty({side, side}, options);
  const double products = seconds_of(device, 20, [&] { at::mm_out(product, a, b); });
  const at::Tensor from = torch::randn({copied / 4}, at::TensorOptions(device));
  const at::Tensor to = torch::empty_like(from);
  const double copies = seconds_of(device, 20, [&] { to.copy_(from); });
  const at::Tensor small = torch::zeros({16}, at::TensorOptions(device));
  const double launch = seconds_of(device, flags.smoke ? 50 : 5000, [&] { small.zero_(); });
  const auto cube =
      static_cast<double>(side) * static_cast<double>(side) * static_cast<double>(side);
  std::printf("{\"flops\": %.6g, \"bytes\": %.6g, \"launch\": %.9f}\n", 2 * cube / products,
              2 * static_cast<double>(copied) / copies, launch);
}

static bool read_gpu_flags(int argc, char** argv, GpuFlags& flags) {
  flags.mode = argc > 1 ? argv[1] : "";
  for (int i = 2; i < argc; ++i) {
    const std::string name = argv[i];
    const bool has_value = i + 1 < argc;
    if (name == "--smoke") {
      flags.smoke = true;
    } else if (name == "--device" && has_value) {
      flags.device = argv[++i];
    } else if (name == "--tokens" && has_value) {
      flags.tokens = std::atoll(argv[++i]);
    } else if (name == "--batch" && has_value) {
      flags.batch = std::atoll(argv[++i]);
    } else if (name == "--steps" && has_value) {
      flags.steps = std::atoll(argv[++i]);
    } else {
      return false;
    }
  }
  return flags.tokens > 0 && flags.batch > 0 && flags.steps > 0;
}

static int run_gpu_step(int argc, char** argv) {
  const std::map<std::string, void (*)(const GpuFlags&, const at::Device&)> modes{
      {"trainer", run_trainer}, {"plain", run_plain}, {"floor", run_floor}};
  GpuFlags flags;
  if (!read_gpu_flags(argc, argv, flags) || !modes.contains(flags.mode)) {
    std::fprintf(stderr,
                 "usage: gpu_step trainer|plain|floor [--device NAME] [--tokens N] [--batch N] "
                 "[--steps N] [--smoke]\n");
    return 2;
  }
  install_memory_meter();
  try {
    modes.at(flags.mode)(flags,
                         ::hasten::detail::choose_device(flags.device, World{}, true).device);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}

} // namespace hasten

int main(int argc, char** argv) { return hasten::run_gpu_step(argc, argv); }
