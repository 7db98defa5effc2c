#include "sync_batch_norm_marks.h"

#include <ATen/ops/batch_norm_native.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace hasten::detail {

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
// under any autograd key. The first mark of a process registers these two. Calls without a mark
// continue to torch's function.
static void register_batch_norm() {
  static const auto libraries = [] {
    std::vector<torch::Library> made;
    for (const auto key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA}) {
      made.emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
      made.back().impl("batch_norm", TORCH_FN(batch_norm_kernel));
    }
    return made;
  }();
  static_cast<void>(libraries);
}

std::shared_ptr<const BatchNormMark> mark_batch_norm(
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

} // namespace hasten::detail
