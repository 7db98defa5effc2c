// A Dataset makes batches of named tensors from sample indices.
// Threading: const member functions may be called from several threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace hasten {

/// Named tensors. Dimension 0 is the sample, for example
///   input_ids [B, T] int64, attention_mask [B, T] int64, labels [B] int64.
struct Batch {
  std::map<std::string, at::Tensor> tensors{};
  /// Indices of these samples in their dataset, in order.
  std::vector<int64_t> indices{};
  /// False: no sample is padded, so a model needs no attention_mask. Without a mask, GPUs can use
  /// flash attention, and the host knows it without a wait.
  bool padded = true;

  int64_t rows() const { return static_cast<int64_t>(indices.size()); }
  bool has(const std::string& name) const { return tensors.count(name) > 0; }
  /// Throws InputError if no tensor has this name. The message lists the names.
  const at::Tensor& operator[](const std::string& name) const;
  /// Returns the same batch on `device`. Tensors that are on `device` already are not copied.
  Batch to(const at::Device& device) const;
};

/// Customisation point of prepared loaders: the number of samples in a batch.
inline int64_t rows(const Batch& batch) { return batch.rows(); }

class Dataset {
 public:
  virtual ~Dataset() = default;
  /// Number of samples.
  virtual int64_t size() const = 0;
  /// Length of sample `index` for group_by_length, for example its number of tokens. The default of
  /// 1 means that all samples are alike.
  virtual int64_t length(int64_t index) const {
    (void)index;
    return 1;
  }
  /// Makes one batch of the samples `indices`, padded to the longest of them.
  virtual Batch collate(const std::vector<int64_t>& indices) const = 0;
  /// The same in an epoch of a training loader, for a dataset that draws anew in each. DataLoader
  /// calls it; in an evaluation the epoch is 0.
  virtual Batch collate_in_epoch(const std::vector<int64_t>& indices, uint64_t epoch) const {
    (void)epoch;
    return collate(indices);
  }
};

} // namespace hasten
