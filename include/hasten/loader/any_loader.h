// What a prepared loader does, for ranges of any type: it distributes the range over ranks, agrees
// with them on the number of batches, reads ahead and copies to the device. Users call nothing here.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "hasten/core/side_stream.h"
#include "hasten/core/stateful.h"
#include "hasten/loader/any_batch.h"
#include "hasten/loader/loader_state.h"

namespace hasten::detail {

class AnyRange;
class LoaderPass;
struct PassOptions;

class AnyLoader final : public Stateful {
 public:
  AnyLoader(std::shared_ptr<const LoaderLink> link, std::unique_ptr<AnyRange> range,
            std::shared_ptr<LoaderState> state);
  ~AnyLoader() override;

  void begin();
  void advance();
  // None at the end.
  const AnyBatch& current() const { return current_; }
  void skip_first_batches(int64_t batches);
  void set_epoch(uint64_t epoch);
  const LoaderPosition& position() const { return position_; }
  const std::shared_ptr<LoaderState>& state() const { return state_; }

  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  // Every rank calls it, so no rank waits for this one at the end of a pass.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  void distribute();
  void shard();
  PassOptions pass_options() const;
  void start_pass();
  void find_stand_in(int64_t left_out);
  bool read_first();
  void keep(const AnyBatch& batch);
  void drop();
  bool dispatches() const;
  bool asks_ranks() const;
  bool agree_on_next();
  void look_ahead();
  LoaderItem fetch();
  void make_stand_in(LoaderItem& item) const;

  const std::shared_ptr<const LoaderLink> link_;
  const std::unique_ptr<AnyRange> range_;
  const std::shared_ptr<LoaderState> state_;
  LoaderPosition position_{};
  int64_t skip_ = 0; // batches of this rank
  bool began_ = false; // a pass, on all ranks
  int distributed_over_ = 1; // ranks
  bool split_ = false; // each batch over the ranks; LoaderState has `even`
  std::optional<SideStream> side_{}; // copies batches to the device
  AnyBatch current_{};
  AnyBatch before_{}; // an earlier batch with samples

  // The pass.
  std::unique_ptr<LoaderPass> pass_;
  std::deque<LoaderItem> ahead_; // without a batch: this rank has none, another may
  bool exists_ = false; // some rank has the first of them
  bool ended_ = false; // this rank has no more
  int64_t left_ = 0; // batches of every rank, if known
  bool calls_roll_ = false; // see Note [Roll call]
  std::unique_ptr<RollCall> roll_call_;
};

} // namespace hasten::detail
