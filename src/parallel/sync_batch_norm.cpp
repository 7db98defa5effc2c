#include "hasten/parallel/sync_batch_norm.h"

#include <ATen/ATen.h>
#include <ATen/ops/batch_norm_native.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

#include "hasten/base/error.h"
#include "sync_batch_norm_function.h"
#include "verify.h"

namespace hasten {

namespace detail {

// The settings that must be equal on all ranks.
template <typename Layer>
std::string describe_batch_norm(const Layer& layer) {
  const auto& options = layer.options;
  return c10::str("num_features=", options.num_features(), " eps=", options.eps(),
                  " momentum=", options.momentum() ? c10::str(*options.momentum()) : "none",
                  " affine=", options.affine(),
                  " track_running_stats=", options.track_running_stats(),
                  options.affine() ? " " + describe_tensor(layer.weight, true) : "");
}

// One of torch's layers in a model.
struct FoundBatchNorm {
  std::string name{};
  std::shared_ptr<torch::nn::Module> module{};
  int64_t channels = 0;
  std::string description{};
  at::Tensor identity{};
};

template <typename Layer>
bool find_batch_norm(const std::string& name, const std::shared_ptr<torch::nn::Module>& module,
                     std::vector<FoundBatchNorm>& found) {
  const auto* layer = dynamic_cast<const Layer*>(module.get());
  if (layer == nullptr) {
    return false;
  }
  found.push_back({name, module, layer->options.num_features(), describe_batch_norm(*layer),
                   layer->running_mean.defined() ? layer->running_mean : layer->weight});
  return true;
}

static bool find_exported(const std::string& name, const std::shared_ptr<torch::nn::Module>& module,
                          std::vector<FoundBatchNorm>& found) {
  const auto* layer = dynamic_cast<const CallsBatchNorm*>(module.get());
  const at::Tensor identity = layer == nullptr ? at::Tensor() : layer->batch_norm_identity();
  if (identity.defined()) {
    found.push_back({name, module, identity.size(0),
                     describe_tensor(identity, true) + layer->batch_norm_settings(), identity});
  }
  return identity.defined();
}

// Each once, even if a module is registered under several names.
static std::vector<FoundBatchNorm> find_batch_norms(const torch::nn::Module& model) {
  using namespace torch::nn;
  std::vector<FoundBatchNorm> found;
  std::unordered_set<const Module*> seen;
  for (const auto& item : model.named_modules()) {
    if (seen.insert(item.value().get()).second) {
      find_batch_norm<BatchNorm1dImpl>(item.key(), item.value(), found) ||
          find_batch_norm<BatchNorm2dImpl>(item.key(), item.value(), found) ||
          find_batch_norm<BatchNorm3dImpl>(item.key(), item.value(), found) ||
          find_exported(item.key(), item.value(), found);
    }
  }
  return found;
}

constexpr const char* kConvert = "parallel::convert_sync_batchnorm";

static void compare_layers(Communicator& communicator, const nlohmann::json& mine,
                           const char* where, const std::string& subject) {
  require_equal_lists(communicator, mine, where, subject, "the same layers on every rank",
                      "build the model from the same options everywhere");
}

static std::string quoted_layer(const std::string& name) { return "batch norm \"" + name + "\""; }

// Note [Identity]
// One of torch's layers is identified by one of its tensors. The weak reference prevents the reuse
// of the tensor's address, so a mark never matches another tensor, even after its layer's end.
struct BatchNormMark {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> identity;
  std::weak_ptr<torch::nn::Module> module;
  std::shared_ptr<const SyncLayer> layer;
  bool alive() const { return !identity.expired() && !module.expired(); }
};

struct BatchNormMarks {
  std::shared_mutex mutex;
  std::unordered_map<const void*, std::weak_ptr<const BatchNormMark>> by_tensor;
};

// Never destroyed, because operators may run in static destructors.
static BatchNormMarks& batch_norm_marks() {
  static auto* marks = new BatchNormMarks;
  return *marks;
}

// Null: torch's own function. A layer without running statistics passes training=true in
// evaluation, too, so the module's mode is checked.
static std::shared_ptr<const SyncLayer> synced_layer(
    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& running_mean) {
  const at::Tensor* identity = running_mean && running_mean->defined() ? &*running_mean
                               : weight && weight->defined()           ? &*weight
                                                                       : nullptr;
  if (identity == nullptr) {
    return nullptr;
  }
  BatchNormMarks& marks = batch_norm_marks();
  const std::shared_lock lock(marks.mutex);
  const auto found = marks.by_tensor.find(identity->unsafeGetTensorImpl());
  const auto mark = found == marks.by_tensor.end() ? nullptr : found->second.lock();
  const auto module = mark ? mark->module.lock() : nullptr;
  return module && module->is_training() ? mark->layer : nullptr;
}

static at::Tensor batch_norm_kernel(const at::Tensor& input,
                                    const std::optional<at::Tensor>& weight,
                                    const std::optional<at::Tensor>& bias,
                                    const std::optional<at::Tensor>& running_mean,
                                    const std::optional<at::Tensor>& running_var, bool training,
                                    double momentum, double eps, bool cudnn_enabled) {
  if (training) {
    if (const auto layer = synced_layer(weight, running_mean)) {
      const at::Tensor none;
      return sync_batch_norm(
          input,
          {weight.value_or(none), bias.value_or(none), running_mean.value_or(none),
           running_var.value_or(none), momentum, eps},
          layer);
    }
  }
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum,
                                eps, cudnn_enabled);
}

// Note [One override]
// torch's batch_norm is composed of other operators (at::native::batch_norm) and has no kernel
// under any autograd key. The first mark of a process registers these. Calls without a mark
// continue to torch's function.
static void register_batch_norm() {
  static const auto libraries = [] {
    std::vector<torch::Library> made;
    using Key = c10::DispatchKey;
    for (const auto key : {Key::AutogradCPU, Key::AutogradCUDA, Key::AutogradXPU, Key::AutogradMPS,
                           Key::AutogradPrivateUse1}) {
      made.emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
      made.back().impl("batch_norm", TORCH_FN(batch_norm_kernel));
    }
    return made;
  }();
  static_cast<void>(libraries);
}

// While the mark lives, `layer` computes the training forwards of `module`, which are identified by
// the running mean, or by the weight if there is none (`identity`). Null if there is already a mark.
static std::shared_ptr<const BatchNormMark> mark_batch_norm(
    const at::Tensor& identity, const std::shared_ptr<torch::nn::Module>& module,
    std::shared_ptr<const SyncLayer> layer) {
  register_batch_norm();
  BatchNormMarks& marks = batch_norm_marks();
  const std::unique_lock lock(marks.mutex);
  std::erase_if(marks.by_tensor, [](const auto& entry) {
    const auto mark = entry.second.lock();
    return !mark || !mark->alive();
  });
  auto mark = std::make_shared<const BatchNormMark>(
      BatchNormMark{c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                        identity.getIntrusivePtr()),
                    module, std::move(layer)});
  const bool fresh = marks.by_tensor.try_emplace(identity.unsafeGetTensorImpl(), mark).second;
  return fresh ? mark : nullptr;
}

bool has_sync_batch_norm(const torch::nn::Module& model) {
  if (std::ranges::any_of(model.modules(), [](const auto& module) {
        return dynamic_cast<const SyncBatchNormImpl*>(module.get()) != nullptr;
      })) {
    return true;
  }
  const auto layers = find_batch_norms(model);
  BatchNormMarks& marks = batch_norm_marks();
  const std::shared_lock lock(marks.mutex);
  return std::ranges::any_of(layers, [&](const FoundBatchNorm& layer) {
    return layer.identity.defined() &&
           marks.by_tensor.contains(layer.identity.unsafeGetTensorImpl());
  });
}

} // namespace detail

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,
                                     std::shared_ptr<Communicator> communicator)
    : NormImplBase(options) {
  if (!communicator) {
    throw InputError(detail::kSyncBatchNorm, "communicator=null", "a communicator");
  }
  detail::SyncLayer layer;
  layer.communicator = std::move(communicator);
  layer.name = "sync batch norm";
  layer.channels = options.num_features();
  if (layer.communicator->world_size() > 1) {
    auto described = nlohmann::json::array();
    described.push_back({layer.name, detail::describe_batch_norm(*this)});
    detail::compare_layers(*layer.communicator, described, detail::kSyncBatchNorm, "layer");
  }
  layer_ = std::make_shared<const detail::SyncLayer>(std::move(layer));
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& x) {
  detail::check_sync_input(*layer_, x);
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& x) {
  _check_input_dim(x);
  double momentum = options.momentum().value_or(0);
  if (is_training() && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    if (!options.momentum()) { // the mean of all batches
      momentum = 1.0 / num_batches_tracked.item<double>();
    }
  }
  if (is_training() && layer_->communicator->world_size() > 1) {
    return detail::sync_batch_norm(
        x, {weight, bias, running_mean, running_var, momentum, options.eps()}, layer_);
  }
  return torch::nn::functional::detail::batch_norm(x, running_mean, running_var, weight, bias,
                                                   is_training() || !running_mean.defined(),
                                                   momentum, options.eps());
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "hasten::SyncBatchNorm(" << detail::describe_batch_norm(*this)
         << ", ranks=" << layer_->communicator->world_size() << ")";
}

SyncBatchNormConversion convert_sync_batchnorm(const std::shared_ptr<torch::nn::Module>& model,
                                               std::shared_ptr<Communicator> communicator,
                                               ConvertSyncBatchNormOptions options) {
  if (!model || !communicator) {
    throw InputError(detail::kConvert, model ? "communicator=null" : "model=null",
                     "a model and a communicator");
  }
  const auto found = detail::find_batch_norms(*model);
  SyncBatchNormConversion conversion;
  auto described = nlohmann::json::array();
  for (const detail::FoundBatchNorm& layer : found) {
    conversion.layers.push_back(layer.name);
    described.push_back({detail::quoted_layer(layer.name), layer.description});
  }
  if (communicator->world_size() == 1) {
    return conversion;
  }
  detail::compare_layers(*communicator, described, detail::kConvert, "model");
  for (const detail::FoundBatchNorm& layer : found) {
    if (!layer.identity.defined()) {
      throw InputError(
          detail::kConvert,
          detail::quoted_layer(layer.name) + " has neither running statistics nor a weight",
          "a tensor that identifies it",
          "track_running_stats(true), affine(true), or hasten::SyncBatchNorm in the model");
    }
    auto mark = detail::mark_batch_norm(
        layer.identity, layer.module,
        std::make_shared<const detail::SyncLayer>(detail::SyncLayer{
            communicator, detail::quoted_layer(layer.name), layer.channels, options.rows_count}));
    if (!mark) {
      throw InputError(detail::kConvert, detail::quoted_layer(layer.name) + " is already converted",
                       "one conversion at a time", "keep the first, or remove() it");
    }
    conversion.marks.push_back(std::move(mark));
  }
  return conversion;
}

} // namespace hasten
