#include "lora_layer.h"

#include <ATen/ATen.h>
#include <ATen/RedispatchFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/matmul_native.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <regex>
#include <shared_mutex>
#include <unordered_set>

#include "core/dropout.h"
#include "decoder.h"
#include "encoder.h"
#include "hasten/base/error.h"
#include "hasten/core/autocast.h"
#include "hasten/core/deferred_init.h"
#include "hasten/core/linear.h"
#include "hasten/exported/exported_module.h"

namespace hasten::detail {

std::vector<LinearPlace> linear_places(const torch::nn::Module& model) {
  static const std::regex part(R"((.*\.)?lora_(embedding_)?[AB])");
  std::vector<LinearPlace> places;
  std::unordered_set<const torch::nn::Module*> seen;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const auto& module = item.value();
    if (!seen.insert(module.get()).second || std::regex_match(item.key(), part)) {
      continue;
    }
    if (const auto* linear = dynamic_cast<const torch::nn::LinearImpl*>(module.get())) {
      places.push_back({item.key(), module, linear->weight, linear->bias, false});
    } else if (const auto* rows = dynamic_cast<const torch::nn::EmbeddingImpl*>(module.get())) {
      places.push_back({item.key(), module, rows->weight, {}, true, true});
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
  std::map<std::pair<const void*, bool>, std::shared_ptr<LoraMark>>
      by_weight; // and whether embedding
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

std::shared_ptr<LoraMark> lora_mark(const at::Tensor& weight, bool embedding) {
  LoraMarks& marks = lora_marks();
  if (!marks.any.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  const std::shared_lock lock(marks.mutex);
  const auto found = marks.by_weight.find({weight.unsafeGetTensorImpl(), embedding});
  return found == marks.by_weight.end() ? nullptr : found->second;
}

/// B A, scaled.
static at::Tensor weight_update(const LoraMark& mark) {
  return at::mm(mark.b.lock()->weight, mark.a.lock()->weight) * mark.scaling;
}

/// The norms of the adapted weight, one for each output: [out]. Constants of backward (Liu et al. 2024,
/// "DoRA: Weight-Decomposed Low-Rank Adaptation", 4.3).
static at::Tensor weight_norm(const LoraMark& mark) {
  const at::NoGradGuard no_grad;
  const Autocast wide({.enabled = false});
  const at::Tensor weight(mark.identity.lock());
  return at::linalg_vector_norm((mark.fan_in_fan_out ? weight.t() : weight) + weight_update(mark),
                                2, {{1}});
}

/// What DoRA multiplies the results of W + scaling * B A with.
static at::Tensor dora_scale(const LoraMark& mark, const torch::nn::Module& magnitude) {
  return magnitude.named_parameters(/*recurse=*/false)["weight"] / weight_norm(mark);
}

at::Tensor with_adapter(const LoraMark& mark, const at::Tensor& x, const at::Tensor& product,
                        const at::Tensor& bias, const at::Scalar& alpha, const RowsOf& rows) {
  const auto layer = mark.layer.lock();
  const auto a = mark.a.lock();
  const auto b = mark.b.lock();
  if (!layer || !a || !b || mark.merged) {
    return product;
  }
  const BaseProducts alone;
  const double dropout = layer->is_training() && !mark.embedding ? mark.dropout : 0.0;
  const bool wide = !mark.embedding && !autocast_dtype(x.device().type());
  const at::Tensor in = wide ? x.to(a->weight.scalar_type()) : x;
  const at::Tensor read = dropout > 0 ? dropout_add(in, {}, dropout) : in;
  const at::Tensor low = rows ? rows(a->weight.t()) : fast_linear(read, a->weight);
  at::Tensor update = fast_linear(low * mark.scaling, b->weight);
  if (const auto magnitude = mark.magnitude.lock()) {
    const at::Tensor scale = dora_scale(mark, *magnitude), weight(mark.identity.lock());
    const at::Tensor base = dropout > 0 || !alpha.equal(1) // PEFT's: of what A reads
                                ? fast_linear(read, mark.fan_in_fan_out ? weight.t() : weight)
                                : bias.defined() ? product - bias : product;
    update = (scale - 1) * base + scale * update;
  }
  return at::add(product, update.to(product.scalar_type()), alpha);
}

// Calls `base` for the layer's own product, and adds the adapter's, times alpha.
template <typename Base>
at::Tensor product_with_adapter(const at::Tensor& x, const at::Tensor& weight,
                                const at::Tensor& bias, const Base& base,
                                const at::Scalar& alpha = 1, const RowsOf& rows = {}) {
  const auto mark = base_products || !weight.defined()
                        ? nullptr
                        : lora_mark(weight, /*embedding=*/rows != nullptr);
  if (!mark) {
    return base();
  }
  at::Tensor product;
  {
    const BaseProducts alone;
    product = base();
  }
  return with_adapter(*mark, x, product, bias, alpha, rows);
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
  return product_with_adapter(x, weight, bias.value_or(at::Tensor()),
                              [&] { return at::native::linear(x, weight, bias); });
}

static at::Tensor matmul_kernel(const at::Tensor& x, const at::Tensor& other) {
  return product_with_adapter(x, transposed_parameter(other), at::Tensor(),
                              [&] { return at::native::matmul(x, other); });
}

// torch's kernel is that of the next key: below autograd, or below inference mode's.
template <bool kAutograd>
c10::DispatchKeySet torchs_keys(c10::DispatchKeySet keys) {
  return kAutograd ? (keys & c10::after_autograd_keyset) |
                         c10::DispatchKeySet(c10::DispatchKey::AutogradOther)
                   : keys & c10::after_ADInplaceOrView_keyset;
}

template <bool kAutograd>
at::Tensor addmm_kernel(c10::DispatchKeySet keys, const at::Tensor& bias, const at::Tensor& x,
                        const at::Tensor& other, const at::Scalar& beta, const at::Scalar& alpha) {
  return product_with_adapter(
      x, transposed_parameter(other), beta.equal(1) ? bias : bias * beta,
      [&] {
        return at::redispatch::addmm(torchs_keys<kAutograd>(keys), bias, x, other, beta, alpha);
      },
      alpha);
}

template <bool kAutograd>
at::Tensor embedding_kernel(c10::DispatchKeySet keys, const at::Tensor& weight,
                            const at::Tensor& indices, int64_t padding, bool by_frequency,
                            bool sparse) {
  return product_with_adapter(
      indices, weight, at::Tensor(),
      [&] {
        return at::redispatch::embedding(torchs_keys<kAutograd>(keys), weight, indices, padding,
                                         by_frequency, sparse);
      },
      1,
      [&](const at::Tensor& of) {
        return at::embedding(of, indices, padding, by_frequency, sparse);
      });
}

template <bool kAutograd>
void implement_products(torch::Library& library) {
  library.impl("linear", TORCH_FN(linear_kernel))
      .impl("matmul", TORCH_FN(matmul_kernel))
      .impl("addmm", TORCH_FN(addmm_kernel<kAutograd>))
      .impl("embedding", TORCH_FN(embedding_kernel<kAutograd>));
}

/// The layer's own product is called with autocast's casts, as torch's own kernels under autocast do.
template <c10::DeviceType device, typename Product>
at::Tensor product_with_casts(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                              const Product& product, const at::Scalar& alpha = 1) {
  const auto base = [&] {
    const c10::impl::ExcludeDispatchKeyGuard below(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    return product([](const auto& tensor) {
      return at::autocast::cached_cast(
          at::autocast::get_lower_precision_fp_from_device_type(device), tensor, device);
    });
  };
  return product_with_adapter(x, weight, bias, base, alpha);
}

template <c10::DeviceType device>
at::Tensor linear_under_autocast(const at::Tensor& x, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias) {
  return product_with_casts<device>(x, weight, bias.value_or(at::Tensor()), [&](const auto& cast) {
    return at::linear(cast(x), cast(weight), cast(bias));
  });
}

template <c10::DeviceType device>
at::Tensor matmul_under_autocast(const at::Tensor& x, const at::Tensor& other) {
  return product_with_casts<device>(
      x, transposed_parameter(other), at::Tensor(),
      [&](const auto& cast) { return at::matmul(cast(x), cast(other)); });
}

template <c10::DeviceType device>
at::Tensor addmm_under_autocast(const at::Tensor& bias, const at::Tensor& x,
                                const at::Tensor& other, const at::Scalar& beta,
                                const at::Scalar& alpha) {
  return product_with_casts<device>(
      x, transposed_parameter(other), beta.equal(1) ? bias : bias * beta,
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
                 double scaling, double dropout, bool use_dora) {
  register_products();
  place.module->register_module(place.embedding ? "lora_embedding_A" : "lora_A", a);
  place.module->register_module(place.embedding ? "lora_embedding_B" : "lora_B", b);
  auto mark = std::make_shared<LoraMark>(LoraMark{
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
          place.weight.getIntrusivePtr()),
      place.module, a.ptr(), b.ptr(), scaling, dropout, place.fan_in_fan_out, place.embedding});
  if (use_dora) {
    materialize({place.weight}); // if it is deferred, because the first magnitude is its norm
    const auto magnitude = place.module->register_module("lora_magnitude_vector",
                                                         std::make_shared<torch::nn::Module>());
    magnitude->register_parameter("weight", weight_norm(*mark));
    mark->magnitude = magnitude;
  }
  if (auto* part = dynamic_cast<ExportedPart*>(place.module.get())) {
    part->set_product(
        [](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
           const at::Tensor& parameter) { return product_of({}, x, weight, bias, &parameter); });
  }
  LoraMarks& marks = lora_marks();
  const std::unique_lock lock(marks.mutex);
  std::erase_if(marks.by_weight,
                [](const auto& entry) { return entry.second->identity.expired(); });
  marks.by_weight[{place.weight.unsafeGetTensorImpl(), place.embedding}] = std::move(mark);
  marks.any = true;
}

void release_layer(const LinearPlace& place) {
  for (const std::string& name : place.module->named_children().keys()) {
    if (name.starts_with("lora_")) {
      place.module->unregister_module(name);
    }
  }
  if (auto* part = dynamic_cast<ExportedPart*>(place.module.get())) {
    part->set_product(nullptr);
  }
  LoraMarks& marks = lora_marks();
  const std::unique_lock lock(marks.mutex);
  marks.by_weight.erase({place.weight.unsafeGetTensorImpl(), place.embedding});
}

void merge_places(const std::vector<LinearPlace>& places, bool merged, const char* where) {
  const at::NoGradGuard no_grad;
  for (const LinearPlace& place : places) {
    if (place.weight.dim() != 2 ||
        lora_mark(place.weight, place.embedding)->b.lock()->weight.size(0) != place.out()) {
      throw InputError(where, "the weight of " + place.name + " is a shard", "whole parameters",
                       "call it in Accelerator::summon_full_params");
    }
  }
  for (const LinearPlace& place : places) {
    const auto mark = lora_mark(place.weight, place.embedding);
    if (mark->merged == merged) {
      continue;
    }
    at::Tensor weight = place.fan_in_fan_out ? place.weight.t() : place.weight;
    const at::Tensor update = weight_update(*mark);
    at::Tensor value = weight.to(update.scalar_type());
    if (const auto magnitude = mark->magnitude.lock(); !magnitude) {
      value = merged ? value + update : value - update;
    } else if (merged) {
      mark->merged_scale = dora_scale(*mark, *magnitude).unsqueeze(1);
      value = (value + update) * mark->merged_scale;
    } else {
      value = value / mark->merged_scale - update;
    }
    weight.copy_(value);
    mark->merged = merged;
  }
}

} // namespace hasten::detail
