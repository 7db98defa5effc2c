// Values of TrainingArguments::gradient_checkpointing and --gradient-checkpointing:
//
//   none, false       keep every activation
//   full, true        recompute every block
//   every:K           recompute one block in K: the first, the K+1st, …
//   ops               keep the results of matrix products, attention and convolutions, recompute
//                     the rest
//   budget:B          keep as much as fits in B bytes (2GB, 512MiB, 1000000), or in a share of
//                     the memory without recomputation (50%); a plan from measurements
//
// Does not use LibTorch. Threading: immutable.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace hasten {

class GradientCheckpointing {
 public:
  enum class Mode { none, full, every, ops, budget };

  GradientCheckpointing() = default;
  /// true means full, false means none.
  GradientCheckpointing(bool full) // NOLINT: meant to convert
      : mode_(full ? Mode::full : Mode::none) {}
  /// Throws InputError with the text and the valid values.
  GradientCheckpointing(std::string_view text); // NOLINT
  GradientCheckpointing(const char* text) // NOLINT
      : GradientCheckpointing(std::string_view(text)) {}
  GradientCheckpointing(const std::string& text) // NOLINT
      : GradientCheckpointing(std::string_view(text)) {}

  Mode mode() const { return mode_; }
  explicit operator bool() const { return mode_ != Mode::none; }
  /// K of every:K, >= 1.
  int64_t every() const { return every_; }
  /// Bytes of budget; 0 if it is a share.
  int64_t budget_bytes() const { return bytes_; }
  /// Share of budget, 0 < share <= 1; 0 if it is in bytes.
  double budget_share() const { return share_; }
  /// The text form, for example "every:2".
  std::string text() const;
  bool operator==(const GradientCheckpointing&) const = default;

 private:
  Mode mode_ = Mode::none;
  int64_t every_ = 1;
  int64_t bytes_ = 0;
  double share_ = 0;
  std::string budget_{}; // as it was written
};

/// Bytes of "2GB", "512MiB", "2G" or "1000000". kB, MB and GB are powers of 1000; KiB, MiB, GiB and
/// K, M, G are powers of 1024. Throws InputError for other texts.
int64_t parse_bytes(std::string_view text);

} // namespace hasten
