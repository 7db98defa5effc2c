// What training reads: a Dataset gives batches of named tensors for row numbers.
// Threading: const member functions may be called from several threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace hasten {

/// Named tensors whose dim 0 is the row, for example
///   input_ids [B, T] int64, attention_mask [B, T] int64, labels [B] int64.
struct Batch {
  std::map<std::string, at::Tensor> tensors{};
  /// Numbers of these rows in their dataset, in order. [row]
  std::vector<int64_t> indices{};

  int64_t rows() const { return static_cast<int64_t>(indices.size()); }
  bool has(const std::string& name) const { return tensors.count(name) > 0; }
  /// Throws InputError that lists the names there are.
  const at::Tensor& operator[](const std::string& name) const;
  /// The same rows on `device`; no copy where they are there already.
  Batch to(const at::Device& device) const;
};

/// Customisation point of prepared loaders: how many rows a batch holds.
inline int64_t rows(const Batch& batch) { return batch.rows(); }

class Dataset {
 public:
  virtual ~Dataset() = default;
  /// Rows altogether.
  virtual int64_t size() const = 0;
  /// Cost of row `index` for grouping by length: its tokens. 1 where all rows
  /// are alike.
  virtual int64_t length(int64_t index) const {
    (void)index;
    return 1;
  }
  /// The rows as one batch, padded to the longest of them.
  virtual Batch collate(const std::vector<int64_t>& indices) const = 0;
};

} // namespace hasten
