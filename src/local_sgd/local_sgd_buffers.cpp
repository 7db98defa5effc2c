#include "local_sgd_buffers.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <map>
#include <unordered_set>

namespace hasten::detail {

AveragedBuffers::AveragedBuffers(std::shared_ptr<Communicator> communicator,
                                 const torch::nn::Module& module)
    : communicator_(std::move(communicator)) {
  constexpr std::string_view kMean = "running_mean";
  constexpr std::string_view kVariance = "running_var";
  std::unordered_set<const void*> seen;
  std::map<std::string, size_t> means; // by the name before "running_mean"
  Averager::NamedTensorList staged;
  const auto stem = [](const std::string& name, std::string_view end) {
    return name.substr(0, name.size() - end.size());
  };
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& buffer = item.value();
    if (!buffer.defined() || buffer.numel() == 0 ||
        !seen.insert(buffer.unsafeGetTensorImpl()).second) {
      continue;
    }
    if (!buffer.is_floating_point()) {
      others_.push_back(buffer);
      continue;
    }
    if (item.key().ends_with(kMean)) {
      means[stem(item.key(), kMean)] = floats_.size();
    }
    floats_.push_back(
        {buffer, {}, at::zeros(buffer.sizes(), at::TensorOptions().dtype(at::kDouble)), {}});
    staged.emplace_back(item.key(), floats_.back().staged);
    if (item.key().ends_with(kVariance)) {
      const auto mean = means.find(stem(item.key(), kVariance));
      if (mean != means.end() && floats_[mean->second].buffer.sizes() == buffer.sizes()) {
        floats_.back().mean_of = floats_[mean->second].buffer;
        floats_.back().staged_mean = floats_[mean->second].staged;
      }
    }
  }
  if (!floats_.empty()) {
    averager_ =
        std::make_unique<Averager>(communicator_, staged, AveragerOptions{.measure_spread = false});
  }
}

int64_t AveragedBuffers::nbytes() const {
  int64_t bytes = averager_ ? averager_->nbytes() : 0;
  for (const at::Tensor& other : others_) {
    bytes += static_cast<int64_t>(other.nbytes());
  }
  return bytes;
}

void AveragedBuffers::reduce(double weight) {
  at::NoGradGuard no_grad;
  for (Pooled& pooled : floats_) {
    pooled.staged.copy_(pooled.buffer);
    if (pooled.mean_of.defined()) {
      pooled.staged.add_(pooled.mean_of.cpu().to(at::kDouble).square());
    }
  }
  if (averager_) {
    averager_->average(weight);
  }
  if (others_.empty()) {
    return;
  }
  std::vector<at::Tensor> bytes;
  for (const at::Tensor& other : others_) {
    const at::Tensor own = other.cpu().contiguous();
    bytes.push_back(own.as_strided({own.numel()}, {1}).view(at::kByte));
  }
  packed_ = at::cat(bytes);
  communicator_->broadcast(packed_, 0, "integer buffers");
}

void AveragedBuffers::apply() {
  at::NoGradGuard no_grad;
  for (Pooled& pooled : floats_) {
    if (pooled.mean_of.defined()) {
      pooled.staged.sub_(pooled.staged_mean.square()).clamp_min_(0);
    }
    pooled.buffer.copy_(pooled.staged);
  }
  int64_t offset = 0;
  for (at::Tensor& other : others_) {
    const auto size = static_cast<int64_t>(other.nbytes());
    other.copy_(
        packed_.narrow(0, offset, size).clone().view(other.scalar_type()).view(other.sizes()));
    offset += size;
  }
}

} // namespace hasten::detail
