// A batch of any type, and what loaders do with one. Users call nothing here. Local.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "hasten/loader/batch.h"

namespace hasten::detail {

class SideStream;

// Copies share the batch. A function that changes it is called before it is shared.
class AnyBatch {
 public:
  AnyBatch() = default; // no batch
  template <typename Value>
  static AnyBatch of(Value value) {
    return AnyBatch(std::make_shared<Held<Value>>(std::move(value)));
  }
  explicit operator bool() const { return held_ != nullptr; }
  template <typename Value>
  const Value& as() const {
    return static_cast<const Held<Value>&>(*held_).value;
  }

  // Number of samples; empty if the type does not have it.
  std::optional<int64_t> rows() const { return held_->rows(); }
  // There is a batch, and it has samples or does not know how many.
  bool has_rows() const { return held_ && rows() != 0; }
  // `sum` combined with the tensors: their sizes, and up to about 1,000 elements of each that is on
  // the CPU.
  uint64_t checksum(uint64_t sum) const;
  // Throws InputError if the type has no tensors.
  PackedBatch packed() const;
  // A batch of this type with other samples; what is no tensor stays.
  AnyBatch with(PackedBatch packed) const { return AnyBatch(held_->with(std::move(packed))); }
  // The same without samples. None if the type has no tensors.
  AnyBatch without_rows() const { return AnyBatch(held_->without_rows()); }
  // The same without a Batch's indices.
  AnyBatch without_indices() const { return AnyBatch(held_->without_indices()); }

  void pin();
  // `side`: null, or the stream that copies the tensors; then call receive() before the batch is
  // used. A to_device() of the batch's type does not know the stream.
  void move_to(const at::Device& device, const SideStream* side);
  // The calling thread's stream uses the batch from now on.
  void receive(const SideStream& side);

 private:
  using Change = std::function<at::Tensor(const at::Tensor&)>;
  struct HeldBatch {
    virtual ~HeldBatch() = default;
    virtual std::optional<int64_t> rows() const = 0;
    virtual void change(const Change& change) = 0;
    virtual PackedBatch pack() const = 0;
    virtual std::shared_ptr<HeldBatch> with(PackedBatch packed) const = 0;
    virtual std::shared_ptr<HeldBatch> without_rows() const = 0;
    virtual std::shared_ptr<HeldBatch> without_indices() const = 0;
    // By the type's own to_device(); false: it has none.
    virtual bool moved_itself(const at::Device& device) = 0;
  };
  template <typename Value>
  struct Held final : HeldBatch {
    explicit Held(Value v) : value(std::move(v)) {}
    std::optional<int64_t> rows() const override { return batch_rows(value); }
    void change(const Change& change) override { change_tensors(value, change); }
    PackedBatch pack() const override { return pack_batch(Value(value)); }
    std::shared_ptr<HeldBatch> with(PackedBatch packed) const override {
      return std::make_shared<Held>(unpack_batch(std::move(packed), Value(value)));
    }
    std::shared_ptr<HeldBatch> without_rows() const override {
      auto empty = batch_without_rows(Value(value));
      return empty ? std::make_shared<Held>(std::move(*empty)) : nullptr;
    }
    std::shared_ptr<HeldBatch> without_indices() const override {
      auto copy = std::make_shared<Held>(Value(value));
      if constexpr (std::is_same_v<Value, Batch>) {
        copy->value.indices.clear();
      }
      return copy;
    }
    bool moved_itself(const at::Device& device) override {
      if constexpr (requires { to_device(std::move(value), device); }) {
        value = to_device(std::move(value), device);
        return true;
      }
      return false;
    }
    Value value;
  };

  explicit AnyBatch(std::shared_ptr<HeldBatch> held) : held_(std::move(held)) {}
  std::shared_ptr<HeldBatch> held_;
};

// A batch for one rank.
struct LoaderItem {
  // None: the global batch has none for this rank, and the type allows no batch without samples.
  AnyBatch batch{};
  int64_t repeated = 0; // samples at its end that occurred before in the epoch
  int64_t position = 0; // position in the range after the global batch
  uint64_t checksum = 0; // of everything read up to there; 0: not computed
  // Another rank's, if this rank had no sample in the first global batch.
  AnyBatch peer_batch{};
  bool stand_in = false; // an earlier batch, if this rank has no sample
};

} // namespace hasten::detail
