// A store that others may be able to access (torchrun's agent's). Values have a keyed hash of key
// and value. Reading a value without it throws CommunicationError. Counters (add) have no hash:
// through them others can make a run fail, but not decide anything.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "hasten/base/store_channel.h"

namespace hasten::detail {

class SealedStore final : public c10d::PrefixStore {
 public:
  using Store::compareSet;
  using Store::set;

  SealedStore(std::string prefix, c10::intrusive_ptr<Store> store, const StoreKey& key)
      : PrefixStore(std::move(prefix), std::move(store)), key_(key) {}

  c10::intrusive_ptr<Store> clone() override {
    return c10::make_intrusive<SealedStore>(prefix_, store_->clone(), key_);
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    PrefixStore::set(key, sealed(key, value));
  }
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override {
    return opened(key, PrefixStore::get(key));
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  /// Without the extended API Gloo neither appends, which a hash cannot follow, nor uses multiSet.
  bool hasExtendedApi() const override { return false; }

 private:
  std::vector<uint8_t> sealed(const std::string& key, const std::vector<uint8_t>& value);
  std::vector<uint8_t> opened(const std::string& key, const std::vector<uint8_t>& value);

  const StoreKey key_;
};

} // namespace hasten::detail
