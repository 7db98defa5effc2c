// The words of TrainingArguments::gradient_checkpointing and of
// --gradient-checkpointing:
//
//   none              keep every activation
//   full, true        recompute every block
//   every:K           recompute one block in K: the first, the K+1st, …
//   ops               keep products, attention and convolutions, recompute the rest
//   budget:B          as much as fits: B bytes (2GB, 512MiB, 1000000) or a share of
//                     what keeping everything takes (50%); planned by measurement
//
// Without LibTorch. Threading: immutable.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace hasten {

class GradientCheckpointing {
 public:
  enum class Mode { none, full, every, ops, budget };

  GradientCheckpointing() = default;
  /// true is full, false none.
  GradientCheckpointing(bool full) // NOLINT: meant to convert
      : mode_(full ? Mode::full : Mode::none) {}
  /// Throws InputError naming the text and what may be written.
  GradientCheckpointing(std::string_view text); // NOLINT
  GradientCheckpointing(const char* text) // NOLINT
      : GradientCheckpointing(std::string_view(text)) {}
  GradientCheckpointing(const std::string& text) // NOLINT
      : GradientCheckpointing(std::string_view(text)) {}

  Mode mode() const { return mode_; }
  explicit operator bool() const { return mode_ != Mode::none; }
  /// K of every:K, >= 1.
  int64_t every() const { return every_; }
  /// Of budget: bytes, or 0 where it is a share.
  int64_t budget_bytes() const { return bytes_; }
  /// Of budget: 0 < share <= 1, or 0 where it is bytes.
  double budget_share() const { return share_; }
  /// What it was made from: "every:2".
  std::string text() const;
  bool operator==(const GradientCheckpointing&) const = default;

 private:
  Mode mode_ = Mode::none;
  int64_t every_ = 1;
  int64_t bytes_ = 0;
  double share_ = 0;
  std::string budget_{}; // as it was written
};

/// "2GB", "512MiB", "2G", "1000000": bytes; kB, MB, GB are powers of 1000, KiB, MiB,
/// GiB and K, M, G of 1024. Throws InputError.
int64_t parse_bytes(std::string_view text);

} // namespace hasten
