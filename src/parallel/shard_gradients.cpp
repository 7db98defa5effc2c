// Gradients of a unit: reduces the unsharded gradients of autograd into shards.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "hasten/core/recompute.h"
#include "shard_unit.h"

namespace hasten::detail {

at::Tensor ShardUnit::reserve_gradient_place(const ShardTensor& tensor) {
  const ShardFlat& flat = *tensor.flat;
  const bool sent = tensor.sent_alone && tensor.dim0 % ranks_ == 0 && flat.compute == flat.summed &&
                    flat.compute == flat.wire;
  if (!sent || ranks_ == 1 || !flat.device.is_cpu() || state_ != State::unsharded ||
      tensor.taken.defined() || tensor.sum.defined()) {
    return {};
  }
  return buffers_->take(tensor.entry->sizes, flat.whole.options());
}

void ShardUnit::take(ShardTensor& tensor) {
  const at::NoGradGuard no_grad;
  at::Tensor& grad = tensor.entry->parameter.mutable_grad();
  tensor.taken = tensor.taken.defined() ? tensor.taken + grad : grad;
  grad.reset();
  tensor.used = true;
}

void ShardUnit::keep_taken() {
  const at::NoGradGuard no_grad;
  for (ShardTensor& tensor : tensors()) {
    if (!tensor.taken.defined()) {
      continue;
    }
    if (tensor.sum.defined()) {
      tensor.sum.add_(tensor.taken);
    } else {
      tensor.sum = (tensor.taken.is_sparse() ? tensor.taken.to_dense() : tensor.taken)
                       .to(tensor.flat->summed);
    }
    tensor.taken.reset();
  }
}

// Copies unsharded gradients into `rows` [ranks, piece]: one launch of a GPU. Fills with zeros after a
// gradient's last row, and everywhere if there is no gradient.
static at::Tensor chunk_cat(at::Tensor rows, const ShardFlat& flat, const ShardPiece& piece,
                            const std::vector<at::Tensor>& gradients) {
  const int64_t ranks = rows.size(0);
  const bool plain = std::ranges::all_of(gradients, [&](const at::Tensor& gradient) {
    return !gradient.defined() || gradient.scalar_type() == flat.compute;
  });
  const at::ScalarType dtype = plain ? flat.compute : flat.summed;
  const auto options = flat.shard.options().dtype(dtype);
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const ShardTensor& of = flat.tensors[piece.tensors[i]];
    if (of.chunk() > 0) {
      parts.push_back(gradients[i].defined()
                          ? gradients[i].to(options).reshape({of.dim0, of.inner}).contiguous()
                          : at::zeros({of.dim0, of.inner}, options));
    }
    if (const int64_t padding = piece.widths[2 * i + 1]; padding > 0) {
      parts.push_back(flat.zeros.view(dtype).narrow(0, 0, ranks * padding).view({ranks, padding}));
    }
  }
  return parts.empty() ? rows : at::_chunk_cat_out(rows, parts, 0, ranks);
}

// [ranks, piece] in the dtype of the message. It is the gradient itself if that has this form.
at::Tensor ShardUnit::rows_to_send(ShardFlat& flat, const ShardPiece& piece) {
  std::vector<at::Tensor> gradients;
  for (const size_t i : piece.tensors) {
    ShardTensor& tensor = flat.tensors[i];
    at::Tensor gradient = std::move(tensor.taken);
    if (tensor.sum.defined()) {
      gradient = gradient.defined() ? tensor.sum.add_(gradient) : tensor.sum;
    } else if (gradient.defined() && gradient.is_sparse()) {
      gradient = gradient.to_dense();
    }
    tensor.taken.reset();
    tensor.sum.reset();
    gradients.push_back(std::move(gradient));
  }
  if (piece.direct && gradients[0].defined() && gradients[0].is_contiguous() &&
      gradients[0].scalar_type() == flat.wire && gradients[0].numel() == ranks_ * piece.numel) {
    return gradients[0].view({ranks_, piece.numel});
  }
  at::Tensor rows = buffers_->take({ranks_, piece.numel}, flat.shard.options().dtype(flat.wire));
  return chunk_cat(std::move(rows), flat, piece, gradients);
}

void ShardUnit::start_reduction(Communicator& communicator) {
  const at::NoGradGuard no_grad;
  const std::string what = "gradients of " + name_;
  std::vector<Collective> operations;
  for (ShardFlat& flat : flats_) {
    if (flat.trainable > 0 && !flat.gradient.defined()) {
      flat.gradient = at::zeros({flat.trainable}, flat.shard.options().dtype(flat.summed));
    }
    for (const ShardPiece& piece : flat.reduced) {
      const at::Tensor rows = rows_to_send(flat, piece);
      at::Tensor to = flat.gradient.narrow(0, piece.begin, piece.numel);
      if (summed_) {
        additions_.first.push_back(to);
        to = additions_.second.emplace_back(buffers_->take({piece.numel}, flat.gradient.options()));
      }
      // The back ends of other devices know whether they need it.
      const at::Tensor scratch = rows.is_cpu() && uses_scratch(communicator.options())
                                     ? buffers_->take(rows.sizes(), rows.options())
                                     : at::Tensor();
      operations.push_back(
          {Collective::Kind::reduce_scatter, what, to, rows, ReduceOp::SUM, 0, scratch});
      report_.reduced_bytes += static_cast<int64_t>(rows.nbytes());
    }
  }
  if (!operations.empty()) {
    reducing_ = communicator.start_together(operations);
    ++report_.reductions;
  }
}

void ShardUnit::finish_reduction() {
  if (!reducing_) {
    return;
  }
  const at::NoGradGuard no_grad;
  wait(reducing_);
  if (summed_) {
    at::_foreach_add_(additions_.first, additions_.second);
    additions_ = {};
  }
  summed_ = true;
}

std::vector<Work> ShardUnit::sum_over(Communicator& replicas) {
  const at::NoGradGuard no_grad;
  std::vector<Work> handles;
  const auto sum = [&](const at::Tensor& gradient) {
    handles.push_back(
        replicas.all_reduce_async(gradient, ReduceOp::SUM, "replicas' gradients of " + name_));
  };
  for (ShardFlat& flat : flats_) {
    if (ranks_ > 1) {
      if (flat.gradient.defined()) {
        sum(flat.gradient);
      }
      continue;
    }
    for (ShardTensor& tensor : flat.tensors) {
      if (tensor.trainable) {
        tensor.sum = tensor.sum.defined() ? tensor.sum.contiguous()
                                          : at::zeros(tensor.entry->sizes,
                                                      tensor.shard.options().dtype(flat.summed));
        sum(tensor.sum);
      }
    }
  }
  return handles;
}

at::Tensor ShardUnit::gradient_of(const ShardTensor& tensor) const {
  if (ranks_ == 1) {
    return tensor.sum;
  }
  if (!summed_ || !tensor.trainable) {
    return {};
  }
  return tensor.flat->gradient.narrow(0, tensor.offset, tensor.own_numel())
      .view(tensor.shard_sizes);
}

void ShardUnit::scale_gradients(double factor) {
  if (factor == 1) {
    return;
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (ShardFlat& flat : flats_) {
    if (summed_ && flat.gradient.defined()) {
      gradients.push_back(flat.gradient);
    }
    for (ShardTensor& tensor : flat.tensors) {
      if (ranks_ == 1 && tensor.sum.defined()) {
        gradients.push_back(tensor.sum);
      }
    }
  }
  if (!gradients.empty()) {
    at::_foreach_mul_(gradients, factor);
  }
}

void ShardUnit::restart_sum() {
  for (ShardTensor& tensor : tensors()) {
    tensor.taken.reset();
    tensor.sum.reset();
    tensor.used = false;
  }
  summed_ = false;
}

void ShardUnit::restore_sum() {
  for (ShardFlat& flat : flats_) {
    if (ranks_ > 1 && flat.trainable > 0) {
      flat.gradient = at::zeros({flat.trainable}, flat.shard.options().dtype(flat.summed));
    }
  }
  summed_ = ranks_ > 1;
}

} // namespace hasten::detail
