#include "shard_unit.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "hasten/core/memory.h"
#include "hasten/core/recompute.h"
#include "verify.h"

namespace hasten::detail {

void put_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    const std::lock_guard<std::mutex> lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

ShardUnit::ShardUnit(std::string name, MixedPrecisionPolicy precision,
                     std::shared_ptr<ShardBuffers> buffers, int rank, int ranks)
    : name_(std::move(name)),
      precision_(precision),
      buffers_(std::move(buffers)),
      rank_(rank),
      ranks_(ranks) {
  report_.name = name_;
}

void ShardUnit::add(ShardedParameter& entry, const at::Device& device) {
  const at::Tensor& parameter = entry.parameter;
  const at::ScalarType dtype = parameter.scalar_type();
  auto flat = std::ranges::find_if(
      flats_, [&](const auto& f) { return f.dtype == dtype && f.device == device; });
  if (flat == flats_.end()) {
    flat = flats_.emplace(flats_.end());
    const bool floating = at::isFloatingType(dtype);
    flat->dtype = dtype;
    flat->device = device;
    flat->compute = floating ? precision_.param_dtype.value_or(dtype) : dtype;
    flat->summed = flat_gradient_dtype(dtype);
    flat->wire = precision_.reduce_dtype.value_or(flat->summed);
    flat->in_place = ranks_ == 1 && flat->compute == dtype;
  }
  ShardTensor& tensor = flat->tensors.emplace_back();
  tensor.entry = &entry;
  tensor.trainable = parameter.requires_grad();
  tensor.dim0 = entry.sizes.empty() ? 1 : entry.sizes[0];
  for (size_t dim = 1; dim < entry.sizes.size(); ++dim) {
    tensor.inner *= entry.sizes[dim];
  }
  tensor.rows = (tensor.dim0 + ranks_ - 1) / ranks_;
  entry.first_row = std::min(tensor.dim0, rank_ * tensor.rows);
  entry.rows = std::min(tensor.dim0, (rank_ + 1) * tensor.rows) - entry.first_row;
  tensor.shard_sizes = entry.sizes;
  if (ranks_ > 1 && entry.sizes.empty()) {
    tensor.shard_sizes = {entry.rows};
  } else if (!entry.sizes.empty()) {
    tensor.shard_sizes[0] = entry.rows;
  }
}

// Adds the next tensor of the flat shard, which ends at `end`.
static void add_piece(std::vector<ShardPiece>& pieces, const ShardTensor& tensor, size_t index,
                      int64_t end, bool direct) {
  if (direct || pieces.empty() || pieces.back().direct) {
    pieces.push_back({tensor.offset, 0, direct});
  }
  ShardPiece& piece = pieces.back();
  piece.tensors.push_back(index);
  piece.numel = direct ? tensor.chunk() : end - piece.begin;
  piece.widths.push_back(tensor.chunk());
  piece.widths.push_back(piece.begin + piece.numel - tensor.offset - tensor.chunk());
}

// Orders trainable parameters before frozen ones, and puts those next to each other that share a
// message.
void ShardUnit::lay_out(ShardFlat& flat) const {
  const auto size = static_cast<int64_t>(c10::elementSize(flat.dtype));
  const auto large = [&](const ShardTensor& tensor) {
    return tensor.chunk() >= kTravelsAlone / size;
  };
  const auto large_gradient = [&](const ShardTensor& tensor) {
    const bool fits = tensor.dim0 % ranks_ == 0 && flat.compute == flat.wire;
    return large(tensor) && (fits || flat.device.is_cpu());
  };
  const auto place = [&](const ShardTensor& tensor) {
    return tensor.trainable ? 2 - large(tensor) - large_gradient(tensor) : 3 + large(tensor);
  };
  std::ranges::stable_sort(flat.tensors, {}, place);
  for (size_t i = 0; i < flat.tensors.size(); ++i) {
    ShardTensor& tensor = flat.tensors[i];
    tensor.flat = &flat;
    tensor.offset = flat.numel;
    flat.numel += flat_padded(tensor.chunk(), flat.dtype);
    add_piece(flat.gathered, tensor, i, flat.numel, large(tensor));
    if (tensor.trainable) {
      flat.trainable = flat.numel;
      tensor.sent_alone = large_gradient(tensor);
      add_piece(flat.reduced, tensor, i, flat.numel, tensor.sent_alone);
    }
  }
}

void ShardUnit::shard() {
  const at::NoGradGuard no_grad;
  for (ShardFlat& flat : flats_) {
    lay_out(flat);
    make_shards(flat);
  }
  state_ = State::unsharded;
  reshard();
}

// A tensor without memory; the first gather provides it.
static at::Tensor without_memory(int64_t numel, const at::TensorOptions& options) {
  at::Tensor made = at::empty({0}, options);
  made.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  made.storage().unsafeGetStorageImpl()->set_nbytes(static_cast<size_t>(numel) * made.itemsize());
  return made;
}

void ShardUnit::make_shards(ShardFlat& flat) {
  const at::TensorOptions options =
      flat.tensors.front().entry->parameter.options().requires_grad(false);
  if (!flat.in_place) {
    flat.shard = buffers_->zeros(flat.numel, options);
    flat.zeros = at::zeros({ranks_ * 256}, options.dtype(at::kByte)); // less than 32 elements each
    flat.whole = without_memory(ranks_ * flat.numel, options.dtype(flat.compute));
  }
  for (ShardTensor& tensor : flat.tensors) {
    const at::Tensor data = tensor.entry->parameter.detach();
    if (tensor.trainable && tensor.entry->parameter.grad_dtype() != flat.summed) {
      tensor.entry->parameter.mutable_grad().reset();
      tensor.entry->parameter.set_grad_dtype(flat.summed);
    }
    if (flat.in_place) {
      tensor.shard = tensor.whole = data;
      continue;
    }
    const auto numel = static_cast<int64_t>(c10::multiply_integers(tensor.entry->sizes));
    tensor.whole = flat.whole.narrow(0, ranks_ * tensor.offset, numel).view(tensor.entry->sizes);
    tensor.shard = flat.shard.narrow(0, tensor.offset, tensor.own_numel()).view(tensor.shard_sizes);
    tensor.shard.view({-1}).copy_(data.reshape({tensor.dim0, tensor.inner})
                                      .narrow(0, tensor.entry->first_row, tensor.entry->rows)
                                      .reshape({-1}));
    put_data(tensor.entry->parameter, tensor.shard);
  }
  if (flat.in_place) {
    return;
  }
  for (ShardPiece& piece : flat.gathered) {
    int64_t begin = ranks_ * piece.begin;
    for (const int64_t width : piece.widths) {
      piece.places.push_back(flat.whole.narrow(0, begin, ranks_ * width).view({ranks_, width}));
      begin += ranks_ * width;
    }
  }
}

std::string ShardUnit::changed_parameter() const {
  for (const ShardFlat& flat : flats_) {
    for (const ShardTensor& tensor : flat.tensors) {
      const at::Tensor& now = tensor.entry->parameter;
      if (now.sizes() != tensor.shard.sizes() || now.scalar_type() != flat.dtype ||
          now.device() != tensor.shard.device() ||
          now.const_data_ptr() != tensor.shard.const_data_ptr()) {
        return tensor.entry->name;
      }
    }
  }
  return {};
}

void ShardUnit::wait(Work& handle) {
  const auto from = Clock::now();
  handle.wait();
  handle = {};
  report_.exposed_seconds += std::chrono::duration<double>(Clock::now() - from).count();
}

void ShardUnit::unshard(Communicator& communicator) {
  if (state_ != State::sharded) {
    return;
  }
  const at::NoGradGuard no_grad;
  const UnseenOps unseen;
  state_ = State::unsharding;
  report_.gathers += ranks_ > 1 && !flats_.empty();
  const std::string what = "parameters of " + name_;
  std::vector<Collective> operations;
  for (ShardFlat& flat : flats_) {
    if (!flat.in_place) {
      allocate_whole(flat, communicator);
      all_gather(flat, what, operations);
    }
  }
  gathering_ = communicator.start_together(operations);
}

void ShardUnit::allocate_whole(ShardFlat& flat, Communicator& communicator) {
  const auto bytes = static_cast<size_t>(flat.whole.numel()) * c10::elementSize(flat.compute);
  c10::StorageImpl* storage = flat.whole.storage().unsafeGetStorageImpl();
  try {
    storage->set_data_ptr_noswap(buffers_->take_memory(bytes, flat.shard.device()));
  } catch (const std::exception& shortage) {
    try {
      name_shortage(shortage, "parallel::FullyShard",
                    "a collective, the gather of unit \"" + name_ + "\"", flat.shard.device());
    } catch (const Error& error) {
      communicator.abort(error); // the peers have started it
      throw;
    }
    throw;
  }
  storage->set_nbytes(bytes);
}

void ShardUnit::all_gather(ShardFlat& flat, std::string_view what,
                           std::vector<Collective>& operations) {
  if (ranks_ == 1) {
    flat.whole.copy_(flat.shard);
    return;
  }
  const bool host = flat.device.is_cpu();
  const at::Tensor shard = host ? flat.shard : flat.shard.to(flat.compute); // one launch
  for (const ShardPiece& piece : flat.gathered) {
    const at::Tensor own = shard.narrow(0, piece.begin, piece.numel);
    if (piece.direct && host) { // Gloo's broadcast works in place; its all-gather copies everything
      piece.places[0][rank_].copy_(own);
      for (int rank = 0; rank < ranks_; ++rank) {
        operations.push_back(
            {Collective::Kind::broadcast, what, piece.places[0][rank], {}, ReduceOp::SUM, rank});
      }
      continue;
    }
    at::Tensor rows = piece.direct ? piece.places[0]
                                   : buffers_->take({ranks_, piece.numel}, flat.whole.options());
    operations.push_back({Collective::Kind::all_gather, what, rows, own.to(flat.compute)});
    if (!piece.direct) {
      gathers_.emplace_back(&piece, std::move(rows));
    }
  }
  report_.gathered_bytes += static_cast<int64_t>(flat.whole.nbytes());
}

void ShardUnit::wait_for_unshard() {
  if (state_ != State::unsharding) {
    return;
  }
  const at::NoGradGuard no_grad;
  const UnseenOps unseen;
  wait(gathering_);
  for (const auto& [piece, rows] : gathers_) {
    if (rows.numel() > 0) { // one launch of a GPU
      at::split_with_sizes_copy_out(piece->places, rows, piece->widths, 1);
    }
  }
  gathers_.clear();
  for (const ShardTensor& tensor : tensors()) {
    if (!tensor.flat->in_place) {
      put_data(tensor.entry->parameter, tensor.whole);
    }
  }
  state_ = State::unsharded;
}

void ShardUnit::reshard() {
  if (state_ != State::unsharded) {
    return;
  }
  for (ShardFlat& flat : flats_) {
    if (flat.in_place) {
      continue;
    }
    for (const ShardTensor& tensor : flat.tensors) {
      put_data(tensor.entry->parameter, tensor.shard);
    }
    c10::StorageImpl* storage = flat.whole.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, flat.shard.device()));
    storage->set_nbytes(size_t{0});
  }
  state_ = State::sharded;
}

int64_t ShardUnit::whole_bytes() const {
  int64_t bytes = 0;
  for (const ShardFlat& flat : flats_) {
    bytes += flat.in_place ? 0 : static_cast<int64_t>(flat.whole.storage().nbytes());
  }
  return bytes;
}

} // namespace hasten::detail
