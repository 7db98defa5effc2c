#include "hasten/accelerator/find_batch_size.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "hasten/accelerator/collect.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/core/memory.h"

namespace hasten {

namespace detail {

constexpr const char* kFindPlace = "accelerator::find_executable_batch_size";

/// The largest size up to `most` that may be tried; 0: none.
int64_t next_batch_size(int64_t most, int64_t effective_batch_size) {
  while (most > 0 && effective_batch_size > 0 && effective_batch_size % most != 0) {
    --most;
  }
  return most;
}

void require_find_options(const FindBatchSizeOptions& options) {
  const auto require = [](const char* name, int64_t value, int64_t least) {
    if (value < least) {
      throw InputError(kFindPlace, std::string(name) + "=" + std::to_string(value),
                       std::to_string(least) + " or more");
    }
  };
  require("starting_batch_size", options.starting_batch_size, 1);
  require("effective_batch_size", options.effective_batch_size, 0);
  require("memory_limit_bytes", options.memory_limit_bytes, 0);
}

/// A description of the shortage, if memory ran out.
std::string run_attempt(const std::function<void(int64_t)>& attempt, int64_t batch_size,
                        const FindBatchSizeOptions& options) {
  std::optional<MemoryLimit> limit;
  if (options.memory_limit_bytes > 0 && options.device.is_cpu()) {
    limit.emplace(options.memory_limit_bytes);
  }
  const bool compares = options.memory_limit_bytes > 0 && !limit;
  try {
    if (compares) {
      reset_peak_memory(options.device);
    }
    attempt(batch_size);
    const int64_t peak = compares ? memory_stats(options.device).peak_bytes : 0;
    if (peak > options.memory_limit_bytes) {
      return "out of memory: a peak of " + format_bytes(peak) + " on " + options.device.str() +
             " exceeds the limit of " + format_bytes(options.memory_limit_bytes);
    }
    return {};
  } catch (const std::exception& error) {
    if (!is_out_of_memory(error)) {
      throw;
    }
    empty_cache(options.device);
    const std::string what = error.what();
    return what.substr(0, what.find('\n')); // no stack trace
  }
}

} // namespace detail

int64_t find_executable_batch_size(const std::function<void(int64_t)>& attempt,
                                   const FindBatchSizeOptions& options, Collect* ranks) {
  detail::require_find_options(options);
  Communicator* communicator =
      ranks == nullptr || ranks->num_processes() == 1 ? nullptr : ranks->communicator().get();
  int64_t size = detail::next_batch_size(options.starting_batch_size, options.effective_batch_size);
  std::string last;
  while (size > 0) {
    std::string shortage;
    try {
      shortage = detail::run_attempt(attempt, size, options);
    } catch (const std::exception& error) {
      if (communicator != nullptr) {
        communicator->abort(error);
      }
      throw;
    }
    std::vector<nlohmann::json> all{shortage};
    if (communicator != nullptr) {
      all = communicator->all_gather_object(shortage, "batch size that fits");
    }
    const auto first = std::ranges::find_if(
        all, [](const nlohmann::json& text) { return !text.get<std::string>().empty(); });
    if (first == all.end()) {
      return size;
    }
    last = (communicator == nullptr ? std::string()
                                    : "rank " + std::to_string(first - all.begin()) + ": ") +
           first->get<std::string>();
    size = detail::next_batch_size(size / 2, options.effective_batch_size);
  }
  throw InputError(
      detail::kFindPlace, "no batch size fits into memory, not even 1 sample: " + last,
      "memory for the model and one sample",
      "use a smaller model or shorter samples, recompute activations, or allow more memory");
}

} // namespace hasten
