// What a step of BERT has alive, tensor by tensor: what bert_memory's formulas for
// fp32 and bf16 share.
#pragma once

#include <cstdint>

#include "hasten/models/bert_memory.h"

namespace hasten::detail {

// What is alive, step by step, in numbers of fp32 (4 bytes) and, …16, of 2 bytes.
class MemoryTape {
 public:
  explicit MemoryTape(GradientPlace gradients) : stays_(gradients == GradientPlace::fresh) {}
  void take(int64_t numbers) { take_bytes(4 * numbers); }
  void give(int64_t numbers) { live_ -= 4 * numbers; }
  void take16(int64_t numbers) { take_bytes(2 * numbers); }
  void give16(int64_t numbers) { live_ -= 2 * numbers; }
  /// Alive for a moment.
  void touch16(int64_t numbers) {
    take16(numbers);
    give16(numbers);
  }
  /// A gradient that was taken goes where it goes.
  void settle(int64_t numbers) {
    if (stays_) {
      kept_gradients_ += 4 * numbers;
    } else {
      give(numbers);
    }
  }
  /// A parameter's gradient, made and put where it goes.
  void gradient(int64_t numbers) {
    take(numbers);
    settle(numbers);
  }
  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }
  int64_t activations() const { return activations_; }

 private:
  void take_bytes(int64_t bytes) {
    live_ += bytes;
    if (live_ > peak_) {
      peak_ = live_;
      activations_ = live_ - kept_gradients_;
    }
  }

  bool stays_;
  int64_t live_ = 0;
  int64_t peak_ = 0;
  int64_t kept_gradients_ = 0;
  int64_t activations_ = 0;
};

// Numbers of a layer's tensors. The last layer asks for the first token alone.
struct LayerSizes {
  int64_t hidden; // width
  int64_t wide; // width
  int64_t rows; // rows * tokens: what keys and values are of
  int64_t asking; // rows * tokens that ask
  int64_t scores; // rows * heads * asking tokens * tokens
  int64_t heads_asking; // rows * heads * asking tokens
  // In bf16, by head: filled up (padded_tokens).
  int64_t padded_rows;
  int64_t padded_asking;
  int64_t padded_scores;
  bool dropout, attention_dropout;
  bool one_asks; // of each row's tokens: its heads lie side by side already

  int64_t n() const { return rows * hidden; }
  int64_t a() const { return asking * hidden; }
  int64_t w() const { return asking * wide; }
  int64_t padded_n() const { return padded_rows * hidden; }
  int64_t padded_a() const { return padded_asking * hidden; }
};

void layer_forward_bf16(MemoryTape& tape, const LayerSizes& s);
/// Begins with the gradient of the layer's output alive (asking tokens), ends with
/// that of its input (all tokens), both fp32.
void layer_backward_bf16(MemoryTape& tape, const LayerSizes& s);
/// x [rows, in] in fp32 or 16 bits through a linear layer; without the product.
void linear_forward_bf16(MemoryTape& tape, int64_t rows, int64_t in, int64_t out, bool converts_x);
/// From the product's gradient to x's, which is alive behind it, in fp32 where x is.
void linear_backward_bf16(MemoryTape& tape, int64_t rows, int64_t in, int64_t out, bool x_is_fp32);

} // namespace hasten::detail
