// The operations of a group that go through the store: small values, and the
// agreement on shapes.
#include <ATen/ATen.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "gloo_group.h"
#include "hasten/base/error.h"
#include "hasten/comm/few_sizes.h"
#include "tensor_checks.h"

namespace hasten::detail {

using StoreBytes = std::vector<uint8_t>;

/// Writes this rank's value, waits for all values, reads them, and deletes them if this rank is the
/// last to read. Runs in the store's thread.
class ByteExchange {
 public:
  ByteExchange(std::string prefix, int rank, int world_size, StoreBytes value)
      : prefix_(std::move(prefix)), rank_(static_cast<size_t>(rank)), value_(std::move(value)) {
    for (int i = 0; i < world_size; ++i) {
      keys_.push_back(prefix_ + "/" + std::to_string(i));
    }
  }

  /// nullopt while a value is missing; an empty list if cancelled.
  std::optional<std::vector<StoreBytes>> attempt(c10d::Store& store,
                                                 const std::atomic<bool>& cancelled) {
    if (!written_) {
      store.set(keys_[rank_], value_);
      written_ = true;
    }
    if (!store.check(keys_)) {
      return cancelled ? std::optional(std::vector<StoreBytes>()) : std::nullopt;
    }
    std::vector<StoreBytes> values = store.multiGet(keys_);
    if (store.add(prefix_, 1) == std::ssize(keys_) && !cancelled) {
      keys_.push_back(prefix_);
      for (const std::string& key : keys_) {
        store.deleteKey(key);
      }
    }
    return values;
  }

 private:
  const std::string prefix_;
  const size_t rank_;
  const StoreBytes value_;
  std::vector<std::string> keys_; // [rank]
  bool written_ = false;
};

std::vector<nlohmann::json> GlooGroup::exchange(const std::string& operation, uint64_t sequence,
                                                const nlohmann::json& value) {
  uint64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(core_->progress->mutex);
    number = ++core_->progress->exchanges;
  }
  // CBOR, since JSON text has no NaN and no infinity.
  const auto bytes = std::make_shared<ByteExchange>(
      "values/" + core_->key + "/" + std::to_string(number), rank(), world_size(),
      nlohmann::json::to_cbor({operation, sequence, value}));
  std::future<std::vector<StoreBytes>> future =
      core_->link->store().post_until<std::vector<StoreBytes>>(
          [bytes](c10d::Store& store, const std::atomic<bool>& cancelled) {
            return bytes->attempt(store, cancelled);
          });
  bool arrived = false;
  try {
    arrived = await_future(future, CommClock::now() + core_->options.timeout,
                           [&] { core_->poll_together(operation, sequence); });
  } catch (...) { // a failure or Ctrl-C: no rank will read the value
    core_->link->store().cancel();
    throw;
  }
  if (!arrived) {
    core_->link->store().cancel();
    core_->diagnose(operation, sequence, "", true);
  }
  std::vector<StoreBytes> all;
  try {
    all = future.get();
  } catch (const std::exception& error) {
    core_->diagnose(operation, sequence, error.what(), false);
  }
  if (all.empty()) { // cancelled: the world failed while this call waited
    core_->diagnose(operation, sequence, "cancelled", false);
  }
  std::vector<nlohmann::json> values;
  std::vector<std::string> operations;
  std::vector<std::string> numbered; // several operations may have one name
  for (const StoreBytes& bytes : all) {
    nlohmann::json sent = nlohmann::json::from_cbor(bytes);
    operations.push_back(sent[0]);
    numbered.push_back(operations.back() + " as its operation " + sent[1].dump());
    values.push_back(std::move(sent[2]));
  }
  require_equal(operation, operations);
  require_equal(operation, numbered);
  return values;
}

void GlooGroup::require_equal(const std::string& operation, const std::vector<std::string>& texts) {
  const auto other = std::find_if(texts.begin(), texts.end(),
                                  [&](const std::string& text) { return text != texts[0]; });
  if (other != texts.end()) {
    core_->fail(operation,
                "rank " +
                    std::to_string(core_->link->launch_rank(
                        core_->members[static_cast<size_t>(other - texts.begin())])) +
                    " has " + *other + ", rank " +
                    std::to_string(core_->link->launch_rank(core_->members[0])) + " has " +
                    texts[0],
                kSameOperations);
  }
}

void GlooGroup::check_equal(const std::string& operation, uint64_t sequence,
                            const std::string& tensors) {
  std::vector<std::string> texts;
  for (nlohmann::json& value : exchange(operation, sequence, tensors)) {
    texts.push_back(value);
  }
  require_equal(operation, texts);
}

std::vector<nlohmann::json> GlooGroup::all_gather_object(const nlohmann::json& value,
                                                         std::string_view name) {
  const std::string operation = operation_label("all_gather_object", name);
  return exchange(operation, core_->enter(operation), value);
}

nlohmann::json GlooGroup::broadcast_object(const nlohmann::json& value, std::string_view name) {
  const std::string operation = operation_label("broadcast_object", name);
  return exchange(operation, core_->enter(operation), rank() == 0 ? value : nlohmann::json())[0];
}

at::Tensor GlooGroup::all_gather_rows(const at::Tensor& rows, std::string_view name) {
  check_rows(rows);
  // The number of rows and a hash of their form in one small tensor, without the store.
  const std::string row_text = "rows of " + rows_text(rows);
  const auto form = static_cast<int64_t>(std::hash<std::string>{}(row_text));
  const at::Tensor own = at::tensor({rows.size(0), form}, at::kLong);
  const at::Tensor all = at::empty({world_size(), 2}, at::kLong);
  all_gather_async(all, own, std::string(name) + ", rows").wait();
  if (!all.select(1, 1).eq(form).all().item<bool>()) {
    const std::string operation = operation_label("all_gather_rows", name);
    check_equal(operation, core_->enter(operation), row_text);
  }
  const at::Tensor counts = all.select(1, 0); // [rank]
  const int64_t longest = few_sizes(counts.max().item<int64_t>());
  at::Tensor padded = rows.detach();
  if (rows.size(0) < longest) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes[0] = longest;
    padded = at::zeros(sizes, rows.options());
    padded.narrow(0, 0, rows.size(0)).copy_(rows.detach());
  }
  std::vector<int64_t> sizes = padded.sizes().vec();
  sizes.insert(sizes.begin(), world_size());
  const at::Tensor gathered = at::empty(sizes, padded.options());
  all_gather_async(gathered, padded, name).wait();
  std::vector<at::Tensor> parts;
  for (int i = 0; i < world_size(); ++i) {
    parts.push_back(gathered[i].narrow(0, 0, counts[i].item<int64_t>()));
  }
  return at::cat(parts);
}

} // namespace hasten::detail
