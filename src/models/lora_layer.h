// The products of layers that an adapter changes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace hasten::detail {

/// A linear layer: torch::nn::Linear, GPT-2's with a weight [in, out], or an exported one of both kinds.
/// An embedding has a weight [in, out], too: its result is a product with rows of 0 and a 1.
struct LinearPlace {
  std::string name{};
  std::shared_ptr<torch::nn::Module> module{};
  at::Tensor weight{};
  at::Tensor bias{}; // undefined: none
  bool fan_in_fan_out = false;
  bool embedding = false;
  int64_t in() const { return weight.size(fan_in_fan_out ? 0 : 1); }
  int64_t out() const { return weight.size(fan_in_fan_out ? 1 : 0); }
};
/// Every linear layer and embedding of the model but those of adapters, once each.
std::vector<LinearPlace> linear_places(const torch::nn::Module& model);

/// Whether a module or parameter `path` is one of the modules, or a part of one.
bool inside_modules(const std::string& path, const std::vector<std::string>& modules);

/// What an adapter adds to a layer.
struct LoraMark {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> identity; // of the weight
  std::weak_ptr<torch::nn::Module> layer{};
  std::weak_ptr<torch::nn::LinearImpl> a{}, b{};
  double scaling = 1;
  double dropout = 0;
  bool fan_in_fan_out = false;
  bool embedding = false;
  std::weak_ptr<torch::nn::Module> magnitude{}; // of DoRA
  bool merged = false; // into the weight
  at::Tensor merged_scale{}; // of DoRA: [out]
};
/// Makes `a`, `b` and DoRA's magnitude children of the layer, whose results they change from now on.
void adapt_layer(const LinearPlace& place, const torch::nn::Linear& a, const torch::nn::Linear& b,
                 double scaling, double dropout, bool use_dora);
/// Removes them.
void release_layer(const LinearPlace& place);
/// Null if no adapter changes the products of this weight, or the rows that are read from it.
std::shared_ptr<LoraMark> lora_mark(const at::Tensor& weight, bool embedding = false);
/// Adds the adapters of adapted layers to their weights, or takes them out again.
void merge_places(const std::vector<LinearPlace>& places, bool merged, const char* where);

using RowsOf = std::function<at::Tensor(const at::Tensor&)>;
/// `product`, which has `bias` or none, with alpha times what the adapter adds. `rows` reads those of an
/// embedding's A^T.
at::Tensor with_adapter(const LoraMark& mark, const at::Tensor& x, const at::Tensor& product,
                        const at::Tensor& bias, const at::Scalar& alpha = 1,
                        const RowsOf& rows = {});

/// While it lives, products of this thread are those of the weights alone.
class BaseProducts {
 public:
  BaseProducts();
  ~BaseProducts();
  BaseProducts(const BaseProducts&) = delete;
  BaseProducts& operator=(const BaseProducts&) = delete;

 private:
  bool before_;
};

} // namespace hasten::detail
