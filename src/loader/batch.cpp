#include "hasten/loader/any_batch.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "hasten/base/error.h"
#include "hasten/core/device.h"
#include "hasten/core/random.h"
#include "hasten/core/side_stream.h"

namespace hasten::detail {

static uint64_t tensor_checksum(uint64_t sum, const at::Tensor& tensor) {
  const auto add = [&sum](uint64_t value) {
    sum = mix(sum ^ value, 0);
    sum ^= sum >> 32;
  };
  if (tensor.layout() != at::kStrided) {
    return sum;
  }
  for (const int64_t size : tensor.sizes()) {
    add(static_cast<uint64_t>(size));
  }
  if (!tensor.is_cpu()) {
    return sum;
  }
  const at::Tensor own = tensor.contiguous();
  const auto* bytes = static_cast<const char*>(own.const_data_ptr());
  const auto each = own.element_size();
  const int64_t step = own.numel() / 1024 | 1; // odd: otherwise it might read only one column
  for (int64_t i = 0; i < own.numel(); i += step) {
    uint64_t bits = 0;
    std::memcpy(&bits, bytes + i * each, std::min<size_t>(each, sizeof bits));
    add(bits);
  }
  return sum;
}

uint64_t AnyBatch::checksum(uint64_t sum) const {
  for (const at::Tensor& tensor : held_->pack().tensors) {
    if (tensor.defined()) {
      sum = tensor_checksum(sum, tensor);
    }
  }
  return sum;
}

PackedBatch AnyBatch::packed() const {
  PackedBatch packed = held_->pack();
  if (packed.tensors.empty() && !(packed.lists_rows && packed.rows == 0)) {
    throw_no_tensor_inside();
  }
  return packed;
}

void AnyBatch::pin() {
  if (held_) {
    held_->change(pinned);
  }
}

void AnyBatch::move_to(const at::Device& device, const SideStream* side) {
  if (!held_->moved_itself(device)) {
    held_->change([&](const at::Tensor& tensor) {
      return side == nullptr ? tensor_to_device(tensor, device) : side->upload(tensor);
    });
  }
}

void AnyBatch::receive(const SideStream& side) {
  side.join();
  const c10::Stream stream = current_stream(side.stream().device());
  held_->change([&stream](const at::Tensor& tensor) {
    if (!tensor.is_cpu()) {
      tensor.record_stream(stream);
    }
    return tensor;
  });
}

[[noreturn]] void throw_not_rows(const PackedBatch& batch, size_t index,
                                 const std::string& expected) {
  const std::string name =
      index < batch.names.size() ? " \"" + batch.names[index] + "\"" : std::string();
  throw InputError(
      "accelerator::PreparedLoader",
      c10::str("tensor ", index, name, " has sizes ", batch.tensors[index].sizes(),
               " in a batch of ", batch.rows, " rows"),
      expected,
      "make all batches alike, or set split_batches, even_batches and dispatch_batches to false");
}

PackedBatch packed_rows(const PackedBatch& batch, int64_t begin, int64_t count) {
  PackedBatch part;
  part.lists_rows = batch.lists_rows;
  part.rows = count;
  part.names = batch.names;
  if (!batch.indices.empty()) {
    part.indices.assign(batch.indices.begin() + begin, batch.indices.begin() + begin + count);
  }
  if (batch.lists_rows) {
    const int64_t each = batch.rows > 0 ? std::ssize(batch.tensors) / batch.rows : 0;
    part.tensors.assign(batch.tensors.begin() + begin * each,
                        batch.tensors.begin() + (begin + count) * each);
    return part;
  }
  for (size_t i = 0; i < batch.tensors.size(); ++i) {
    const at::Tensor& tensor = batch.tensors[i];
    if (!tensor.defined() || tensor.dim() == 0) {
      part.tensors.push_back(tensor);
      continue;
    }
    if (tensor.size(0) != batch.rows) {
      throw_not_rows(batch, i, "samples along dimension 0 of every tensor");
    }
    part.tensors.push_back(tensor.narrow(0, begin, count));
  }
  return part;
}

PackedBatch packed_concat(const std::vector<PackedBatch>& batches) {
  PackedBatch joined = batches.front();
  for (size_t b = 1; b < batches.size(); ++b) {
    joined.rows += batches[b].rows;
    joined.indices.insert(joined.indices.end(), batches[b].indices.begin(),
                          batches[b].indices.end());
    if (joined.lists_rows) {
      joined.tensors.insert(joined.tensors.end(), batches[b].tensors.begin(),
                            batches[b].tensors.end());
    } else if (batches[b].names != joined.names ||
               batches[b].tensors.size() != joined.tensors.size()) {
      throw InputError("accelerator::PreparedLoader",
                       "batches have other tensors than the first one",
                       "the same tensors in every batch");
    }
  }
  for (size_t i = 0; !joined.lists_rows && i < joined.tensors.size(); ++i) {
    const at::Tensor& first = batches.front().tensors[i];
    if (!first.defined() || first.dim() == 0) {
      continue;
    }
    std::vector<at::Tensor> parts;
    for (const PackedBatch& batch : batches) {
      const at::Tensor& tensor = batch.tensors[i];
      if (!tensor.defined() || tensor.dim() != first.dim() ||
          tensor.sizes().slice(1) != first.sizes().slice(1)) {
        const std::string others = c10::str(first.sizes().slice(1)).substr(1); // "3, 4]"
        throw_not_rows(batch, i,
                       "sizes [rows" + std::string(first.dim() > 1 ? ", " : "") + others +
                           ", as in the batch it is joined with");
      }
      parts.push_back(tensor);
    }
    joined.tensors[i] = at::cat(parts);
  }
  return joined;
}

PackedBatch packed_filled(PackedBatch batch, const std::vector<PackedBatch>& first, int64_t rows) {
  const int64_t missing = rows - batch.rows;
  if (missing <= 0) {
    return batch;
  }
  std::vector<PackedBatch> parts{std::move(batch)};
  for (int64_t filled = 0; filled < missing;) {
    const int64_t before = filled;
    for (const PackedBatch& source : first) {
      const int64_t count = std::min(source.rows, missing - filled);
      if (count > 0) {
        parts.push_back(packed_rows(source, 0, count));
        filled += count;
      }
    }
    if (filled == before) {
      break; // the first global batch has no samples
    }
  }
  return packed_concat(parts);
}

int64_t even_rows(const std::vector<PackedBatch>& first, bool split, int64_t world_size,
                  bool only) {
  const int64_t rows = first.front().rows;
  if (!split) {
    return rows * world_size;
  }
  if (only) {
    return (rows + world_size - 1) / world_size * world_size;
  }
  if (rows % world_size != 0) {
    throw InputError("accelerator::PreparedLoader",
                     "batches of " + std::to_string(rows) + " samples on " +
                         std::to_string(world_size) + " ranks",
                     "with split_batches and even_batches: a multiple of the number of ranks",
                     "change the batch size, or set even_batches=false");
  }
  return rows;
}

} // namespace hasten::detail
