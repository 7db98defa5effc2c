#include "sealed_store.h"

#include <algorithm>

#include "hasten/base/error.h"

namespace hasten::detail {

std::vector<uint8_t> SealedStore::sealed(const std::string& key,
                                         const std::vector<uint8_t>& value) {
  // The key's length comes first, so that no other pair of key and value has the same bytes.
  StoreWriter name;
  name.text(joinKey(key));
  const StoreKey hash = keyed_hash(
      key_, {"v", name.bytes, {reinterpret_cast<const char*>(value.data()), value.size()}});
  std::vector<uint8_t> whole(hash.size() + value.size());
  std::copy(value.begin(), value.end(), std::copy(hash.begin(), hash.end(), whole.begin()));
  return whole;
}

std::vector<uint8_t> SealedStore::opened(const std::string& key,
                                         const std::vector<uint8_t>& value) {
  if (value.size() >= key_.size()) {
    std::vector<uint8_t> inner(value.begin() + static_cast<ptrdiff_t>(key_.size()), value.end());
    if (sealed(key, inner) == value) {
      return inner;
    }
  }
  throw CommunicationError(
      "comm::store", "the value of " + key + " was not written with this run's secret",
      "one HASTEN_SECRET on all ranks", "check HASTEN_SECRET and HASTEN_SECRET_FILE");
}

std::vector<uint8_t> SealedStore::compareSet(const std::string& key,
                                             const std::vector<uint8_t>& expected,
                                             const std::vector<uint8_t>& desired) {
  // If there is no value, an empty one is expected and is returned as it is.
  const std::vector<uint8_t> before = expected.empty() ? expected : sealed(key, expected);
  const std::vector<uint8_t> after = PrefixStore::compareSet(key, before, sealed(key, desired));
  return after == before ? expected : opened(key, after);
}

std::vector<std::vector<uint8_t>> SealedStore::multiGet(const std::vector<std::string>& keys) {
  auto values = PrefixStore::multiGet(keys);
  for (size_t i = 0; i < keys.size(); ++i) {
    values[i] = opened(keys[i], values[i]);
  }
  return values;
}

} // namespace hasten::detail
