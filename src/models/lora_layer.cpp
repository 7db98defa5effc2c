#include "lora_layer.h"

#include <ATen/ATen.h>
#include <ATen/RedispatchFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/matmul_native.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

#include "core/dropout.h"
#include "decoder.h"
#include "encoder.h"
#include "hasten/core/autocast.h"
#include "hasten/core/linear.h"
#include "hasten/exported/exported_module.h"

namespace hasten::detail {

std::vector<LinearPlace> linear_places(const torch::nn::Module& model) {
  std::vector<LinearPlace> places;
  std::unordered_set<const torch::nn::Module*> seen;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const auto& module = item.value();
    if (!seen.insert(module.get()).second || ("." + item.key()).ends_with(".lora_A") ||
        ("." + item.key()).ends_with(".lora_B")) {
      continue;
    }
    if (const auto* linear = dynamic_cast<const torch::nn::LinearImpl*>(module.get())) {
      places.push_back({item.key(), module, linear->weight, linear->bias, false});
    } else if (const auto* conv = dynamic_cast<const Conv1DImpl*>(module.get())) {
      places.push_back({item.key(), module, conv->weight(), conv->bias(), true});
    } else if (const auto* part = dynamic_cast<const ExportedPart*>(module.get())) {
      const bool conv1d = part->layer() == ExportedPart::Layer::conv1d;
      const bool linear = conv1d || part->layer() == ExportedPart::Layer::linear;
      if (linear && part->tensor("weight").defined()) { // else it is tied to another module's
        places.push_back(
            {item.key(), module, part->tensor("weight"), part->tensor("bias"), conv1d});
      }
    }
  }
  return places;
}

// Note [Identity]
// LinearImpl::forward is not virtual, so the products of a foreign module are found at the operators,
// by the weight that they read. The weak reference prevents the reuse of the weight's
// address, so a mark never matches another weight.
struct LoraMarks {
  std::shared_mutex mutex;
  std::unordered_map<const void*, std::shared_ptr<LoraMark>> by_weight;
  std::atomic<bool> any = false;
};

// Never destroyed, because operators may run in static destructors.
static LoraMarks& lora_marks() {
  static auto* marks = new LoraMarks;
  return *marks;
}

static thread_local bool base_products = false;

BaseProducts::BaseProducts() : before_(base_products) { base_products = true; }
BaseProducts::~BaseProducts() { base_products = before_; }

std::shared_ptr<LoraMark> lora_mark(const at::Tensor& weight) {
  LoraMarks& marks = lora_marks();
  if (!marks.any.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  const std::shared_lock lock(marks.mutex);
  const auto found = marks.by_weight.find(weight.unsafeGetTensorImpl());
  return found == marks.by_weight.end() ? nullptr : found->second;
}

at::Tensor lora_update(const LoraMark& mark, const at::Tensor& x) {
  const auto layer = mark.layer.lock();
  const auto a = mark.a.lock();
  const auto b = mark.b.lock();
  if (!layer || !a || !b || mark.merged) {
    return {};
  }
  const bool narrow = autocast_dtype(x.device().type()).has_value();
  const at::Tensor in = narrow ? x : x.to(a->weight.scalar_type());
  const at::Tensor read = dropout_add(in, {}, layer->is_training() ? mark.dropout : 0.0);
  return fast_linear(fast_linear(read, a->weight) * mark.scaling, b->weight);
}

// Calls `base` for the layer's own product, and adds the adapter's, times alpha.
template <typename Base>
at::Tensor product_with_adapter(const at::Tensor& x, const at::Tensor& weight, const Base& base,
                                const at::Scalar& alpha = 1) {
  const auto mark = base_products || !weight.defined() ? nullptr : lora_mark(weight);
  if (!mark) {
    return base();
  }
  at::Tensor product;
  {
    const BaseProducts alone;
    product = base();
  }
  const at::Tensor update = lora_update(*mark, x);
  return update.defined() ? at::add(product, update.to(product.scalar_type()), alpha) : product;
}

// What a product reads, if it is the transpose of a whole parameter, or an adapted weight [in, out].
static at::Tensor transposed_parameter(const at::Tensor& matrix) {
  if (matrix.dim() != 2 || !matrix.is_view()) {
    const auto mark = lora_mark(matrix);
    return mark && mark->fan_in_fan_out ? matrix : at::Tensor();
  }
  const at::Tensor base(matrix._base());
  const bool whole = base.dim() == 2 && base.size(0) == matrix.size(1) &&
                     base.size(1) == matrix.size(0) && base.stride(0) == matrix.stride(1) &&
                     base.stride(1) == matrix.stride(0);
  return whole ? base : at::Tensor();
}

static at::Tensor linear_kernel(const at::Tensor& x, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias) {
  return product_with_adapter(x, weight, [&] { return at::native::linear(x, weight, bias); });
}

static at::Tensor matmul_kernel(const at::Tensor& x, const at::Tensor& other) {
  return product_with_adapter(x, transposed_parameter(other),
                              [&] { return at::native::matmul(x, other); });
}

// torch's kernel is that of the next key: below autograd, or below inference mode's.
template <bool kAutograd>
at::Tensor addmm_kernel(c10::DispatchKeySet keys, const at::Tensor& bias, const at::Tensor& x,
                        const at::Tensor& other, const at::Scalar& beta, const at::Scalar& alpha) {
  const auto torchs = kAutograd ? (keys & c10::after_autograd_keyset) |
                                      c10::DispatchKeySet(c10::DispatchKey::AutogradOther)
                                : keys & c10::after_ADInplaceOrView_keyset;
  return product_with_adapter(
      x, transposed_parameter(other),
      [&] { return at::redispatch::addmm(torchs, bias, x, other, beta, alpha); }, alpha);
}

template <bool kAutograd>
void implement_products(torch::Library& library) {
  library.impl("linear", TORCH_FN(linear_kernel))
      .impl("matmul", TORCH_FN(matmul_kernel))
      .impl("addmm", TORCH_FN(addmm_kernel<kAutograd>));
}

/// The layer's own product is called with autocast's casts, as torch's own kernels under autocast do.
template <c10::DeviceType device, typename Product>
at::Tensor product_with_casts(const at::Tensor& x, const at::Tensor& weight, const Product& product,
                              const at::Scalar& alpha = 1) {
  const auto base = [&] {
    const c10::impl::ExcludeDispatchKeyGuard below(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return product([](const auto& tensor) {
      return at::autocast::cached_cast(
          at::autocast::get_lower_precision_fp_from_device_type(device), tensor, device);
    });
  };
  return product_with_adapter(x, weight, base, alpha);
}

template <c10::DeviceType device>
at::Tensor linear_under_autocast(const at::Tensor& x, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias) {
  return product_with_casts<device>(
      x, weight, [&](const auto& cast) { return at::linear(cast(x), cast(weight), cast(bias)); });
}

template <c10::DeviceType device>
at::Tensor matmul_under_autocast(const at::Tensor& x, const at::Tensor& other) {
  return product_with_casts<device>(x, transposed_parameter(other), [&](const auto& cast) {
    return at::matmul(cast(x), cast(other));
  });
}

template <c10::DeviceType device>
at::Tensor addmm_under_autocast(const at::Tensor& bias, const at::Tensor& x,
                                const at::Tensor& other, const at::Scalar& beta,
                                const at::Scalar& alpha) {
  return product_with_casts<device>(
      x, transposed_parameter(other),
      [&](const auto& cast) { return at::addmm(cast(bias), cast(x), cast(other), beta, alpha); },
      alpha);
}

template <c10::DeviceType device>
void implement_under_autocast(torch::Library& library) {
  library.impl("linear", TORCH_FN(linear_under_autocast<device>))
      .impl("matmul", TORCH_FN(matmul_under_autocast<device>))
      .impl("addmm", TORCH_FN(addmm_under_autocast<device>));
}

class NoWarnings final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Note [Kernels of products]
// LinearImpl::forward calls addmm, or matmul, with weight.t(); other modules call linear. The kernels
// are under the keys of autograd and of autocast, which converts the weight into another tensor.
// torch composes linear and matmul of other operators. Its kernel of addmm is registered for all
// autograd keys at once, so AutogradOther still has it. Inference mode leaves the autograd keys out;
// parameters that were made outside it still have the next key. Registered once; torch warns that its
// kernels under autocast are replaced.
static void register_products() {
  static const auto libraries = [] {
    NoWarnings quiet;
    const c10::WarningUtils::WarningHandlerGuard silence(&quiet);
    std::vector<torch::Library> made;
    using Key = c10::DispatchKey;
    const auto under = [&](Key key) -> torch::Library& {
      return made.emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    };
    for (const Key key : {Key::AutogradCPU, Key::AutogradCUDA, Key::AutogradXPU, Key::AutogradMPS,
                          Key::AutogradPrivateUse1}) {
      implement_products<true>(under(key));
    }
    implement_under_autocast<c10::DeviceType::CPU>(under(Key::AutocastCPU));
    implement_under_autocast<c10::DeviceType::CUDA>(under(Key::AutocastCUDA));
    implement_under_autocast<c10::DeviceType::XPU>(under(Key::AutocastXPU));
    implement_under_autocast<c10::DeviceType::MPS>(under(Key::AutocastMPS));
    implement_under_autocast<c10::DeviceType::PrivateUse1>(under(Key::AutocastPrivateUse1));
    implement_products<false>(under(Key::ADInplaceOrView));
    return made;
  }();
  static_cast<void>(libraries);
}

void adapt_layer(const LinearPlace& place, const torch::nn::Linear& a, const torch::nn::Linear& b,
                 double scaling, double dropout) {
  register_products();
  place.module->register_module("lora_A", a);
  place.module->register_module("lora_B", b);
  auto mark = std::make_shared<LoraMark>(
      LoraMark{c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                   place.weight.getIntrusivePtr()),
               place.module, a.ptr(), b.ptr(), scaling, dropout, place.fan_in_fan_out});
  if (auto* part = dynamic_cast<ExportedPart*>(place.module.get())) {
    part->set_product(
        [](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
           const at::Tensor& parameter) { return product_of({}, x, weight, bias, &parameter); });
  }
  LoraMarks& marks = lora_marks();
  const std::unique_lock lock(marks.mutex);
  std::erase_if(marks.by_weight,
                [](const auto& entry) { return entry.second->identity.expired(); });
  marks.by_weight[place.weight.unsafeGetTensorImpl()] = std::move(mark);
  marks.any = true;
}

void release_layer(const LinearPlace& place) {
  place.module->unregister_module("lora_A");
  place.module->unregister_module("lora_B");
  if (auto* part = dynamic_cast<ExportedPart*>(place.module.get())) {
    part->set_product(nullptr);
  }
  LoraMarks& marks = lora_marks();
  const std::unique_lock lock(marks.mutex);
  marks.by_weight.erase(place.weight.unsafeGetTensorImpl());
}

} // namespace hasten::detail
