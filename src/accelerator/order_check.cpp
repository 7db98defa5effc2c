#include "order_check.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "hasten/base/error.h"
#include "hasten/core/random.h"

namespace hasten::detail {

void OrderCheck::entered(std::string_view operation, std::string_view name,
                         const at::Tensor& tensor) {
  calls_.push_back(c10::str(operation, " \"", name, '"'));
  if (tensor.defined()) { // shape and dtype, too: equal on all ranks
    calls_.back() += c10::str(" of ", tensor.scalar_type(), ' ', tensor.sizes());
  }
}

void OrderCheck::compare(const nlohmann::json& more) {
  // Ranks compare a digest first, and send the calls only if it differs.
  uint64_t digest = 0;
  for (const std::string& call : calls_) {
    digest = mix(digest, std::hash<std::string>{}(call));
  }
  const auto ranks =
      inner_->all_gather_object({{"calls", digest}, {"more", more}}, "comparing the ranks");
  const auto differs = [&ranks](const char* key) {
    return std::ranges::find_if(
        ranks, [&](const auto& rank) { return rank.at(key) != ranks.front().at(key); });
  };
  const auto fail = [&ranks](auto at, const std::string& what, const char* fix) {
    throw CommunicationError("accelerator::debug",
                             "rank " + std::to_string(at - ranks.begin()) + what,
                             "the same on every rank", fix);
  };
  if (const auto at = differs("calls"); at != ranks.end()) {
    const auto calls = inner_->all_gather_object(calls_, "the calls of the ranks");
    const auto other = static_cast<size_t>(at - ranks.begin());
    const size_t both = std::min(calls[0].size(), calls[other].size());
    size_t i = 0;
    while (i < both && calls[0][i] == calls[other][i]) {
      ++i;
    }
    const auto name = [&](size_t rank) {
      return i < calls[rank].size() ? calls[rank][i].get<std::string>()
                                    : std::string("nothing more");
    };
    fail(at,
         "'s collective " + std::to_string(compared_ + i) + " was " + name(other) + ", rank 0's " +
             name(0),
         "find a collective call in a branch that not all ranks take");
  }
  compared_ += calls_.size();
  calls_.clear();
  const auto at = differs("more");
  if (at == ranks.end()) {
    return;
  }
  for (const auto& [key, value] : ranks.front().at("more").items()) {
    if (at->at("more").value(key, nlohmann::json()) != value) {
      fail(at, "'s " + key + " differs from rank 0's",
           "find what changes it on one rank only: a gradient or parameter "
           "set by hand, a step in a branch that not all ranks take");
    }
  }
}

} // namespace hasten::detail
