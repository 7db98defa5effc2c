#include "hasten/text/packed_dataset.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include "hasten/base/error.h"

namespace hasten {

PackedDataset::PackedDataset(TokenTable table, int64_t block_size, PackingStrategy strategy,
                             int64_t pad_token_id)
    : table_(std::move(table)), strategy_(strategy), pad_token_id_(pad_token_id) {
  if (block_size < 2) {
    throw InputError("text::PackedDataset", "block_size=" + std::to_string(block_size),
                     "at least 2 tokens");
  }
  if (strategy == PackingStrategy::wrapped) {
    wrap(block_size);
  } else {
    fill_rows(cut_documents(block_size), block_size);
  }
  const bool learns = std::ranges::any_of(
      pieces_, [](const Piece& piece) { return piece.tokens > std::max(piece.unlabelled, 1); });
  if (!learns) {
    throw InputError(
        "text::PackedDataset",
        "documents=" + std::to_string(table_.rows.size()) + " have no token to predict",
        "documents of at least 2 tokens");
  }
}

// Documents one after the other, cut wherever a row is full.
void PackedDataset::wrap(int64_t block_size) {
  int64_t room = block_size;
  for (const TokenRow& row : table_.rows) {
    for (int64_t at = 0; at < row.tokens;) {
      const int64_t tokens = std::min(room, row.tokens - at);
      pieces_.push_back({row.begin + at, static_cast<int32_t>(tokens),
                         static_cast<int32_t>(std::clamp<int64_t>(row.label - at, 0, tokens))});
      at += tokens;
      room -= tokens;
      if (room == 0) {
        row_ends_.push_back(pieces_.size());
        room = block_size;
      }
    }
  }
  if (room < block_size) {
    row_ends_.push_back(pieces_.size());
  }
}

// A piece of one token has no loss.
std::vector<PackedDataset::Piece> PackedDataset::cut_documents(int64_t block_size) const {
  std::vector<Piece> pieces;
  for (const TokenRow& row : table_.rows) {
    for (int64_t at = 0; row.tokens - at > 1; at += block_size) {
      const int64_t tokens = std::min(block_size, row.tokens - at);
      pieces.push_back({row.begin + at, static_cast<int32_t>(tokens),
                        static_cast<int32_t>(std::clamp<int64_t>(row.label - at, 1, tokens))});
    }
  }
  return pieces;
}

// Rows are in the order of their first documents, so that data that is read in order stays so.
void PackedDataset::fill_rows(const std::vector<Piece>& pieces, int64_t block_size) {
  std::vector<size_t> order(pieces.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::vector<std::vector<size_t>> rows;
  if (strategy_ == PackingStrategy::none) {
    for (const size_t piece : order) {
      rows.push_back({piece});
    }
  } else {
    std::ranges::stable_sort(order, std::greater<>(),
                             [&](size_t piece) { return pieces[piece].tokens; });
    std::set<std::pair<int64_t, size_t>> open; // room, row
    for (const size_t piece : order) {
      const int64_t tokens = pieces[piece].tokens;
      const auto best = open.lower_bound({tokens, 0});
      std::pair<int64_t, size_t> row{block_size, rows.size()};
      if (best == open.end()) {
        rows.emplace_back();
      } else {
        row = *best;
        open.erase(best);
      }
      rows[row.second].push_back(piece);
      row.first -= tokens;
      if (row.first > 1) {
        open.insert(row);
      }
    }
    for (auto& row : rows) {
      std::ranges::sort(row);
    }
    std::ranges::sort(rows);
  }
  pieces_.reserve(pieces.size());
  for (const auto& row : rows) {
    for (const size_t piece : row) {
      pieces_.push_back(pieces[piece]);
    }
    row_ends_.push_back(pieces_.size());
  }
}

size_t PackedDataset::row_begin(int64_t index) const {
  if (index < 0 || index >= size()) {
    throw std::out_of_range("row " + std::to_string(index));
  }
  return index == 0 ? 0 : row_ends_[static_cast<size_t>(index - 1)];
}

int64_t PackedDataset::length(int64_t index) const {
  int64_t tokens = 0;
  for (size_t i = row_begin(index); i < row_ends_[static_cast<size_t>(index)]; ++i) {
    tokens += pieces_[i].tokens;
  }
  return tokens;
}

void PackedDataset::write_row(int64_t index, int64_t* ids, int64_t* labels,
                              int64_t* positions) const {
  std::vector<int32_t> read;
  for (size_t i = row_begin(index); i < row_ends_[static_cast<size_t>(index)]; ++i) {
    const Piece& piece = pieces_[i];
    read.resize(static_cast<size_t>(piece.tokens));
    table_.ids->read(piece.begin, read);
    std::ranges::copy(read, ids);
    std::copy(read.begin() + piece.unlabelled, read.end(), labels + piece.unlabelled);
    ids += piece.tokens;
    labels += piece.tokens;
    if (positions != nullptr) {
      std::iota(positions, positions + piece.tokens, int64_t{0});
      positions += piece.tokens;
    }
  }
}

Batch PackedDataset::collate(const std::vector<int64_t>& indices) const {
  Batch batch;
  batch.indices = indices;
  batch.padded = false;
  int64_t longest = 1;
  bool several = false;
  for (const int64_t index : indices) {
    longest = std::max(longest, length(index));
    several = several || row_ends_[static_cast<size_t>(index)] - row_begin(index) > 1;
  }
  several = several && strategy_ != PackingStrategy::wrapped;
  const std::vector<int64_t> shape{std::ssize(indices), longest};
  const at::Tensor ids = at::full(shape, pad_token_id_, at::kLong);
  const at::Tensor labels = at::full(shape, int64_t{kIgnoredLabel}, at::kLong);
  const at::Tensor mask = at::zeros(shape, at::kLong);
  // Padding is a text of its own in which the places go on.
  const at::Tensor positions =
      several ? at::arange(longest, at::kLong).expand(shape).contiguous() : at::Tensor();
  for (int64_t row = 0; row < std::ssize(indices); ++row) {
    const auto at = [&](const at::Tensor& of) {
      return of.mutable_data_ptr<int64_t>() + row * longest;
    };
    std::fill_n(at(mask), length(indices[static_cast<size_t>(row)]), int64_t{1});
    write_row(indices[static_cast<size_t>(row)], at(ids), at(labels),
              several ? at(positions) : nullptr);
  }
  batch.tensors = {{"input_ids", ids}, {"attention_mask", mask}, {"labels", labels}};
  if (several) {
    batch.tensors.emplace("position_ids", positions);
  }
  return batch;
}

} // namespace hasten
