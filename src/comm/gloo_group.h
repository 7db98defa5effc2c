// A group over c10d's Gloo back end. GroupCore outlives the communicator while operations run.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <unordered_set>
#include <vector>

#include "hasten/comm/communicator.h"
#include "world_link.h"

namespace hasten {

struct Work::State {
  virtual ~State() = default;
  virtual void wait() = 0;
  virtual bool done() const noexcept = 0;
  virtual std::chrono::steady_clock::time_point ended() const noexcept = 0;
};

namespace detail {

/// The fix for ranks that are in different operations.
inline constexpr const char* kSameOperations =
    "run the same operations in the same order, with the same shapes and dtypes, on all ranks";

struct GroupCore {
  /// `members`: the group's ranks in the world.
  GroupCore(std::shared_ptr<WorldLink> world_link, const CommunicatorOptions& group,
            std::vector<int> members);

  // Set at construction.
  const std::shared_ptr<WorldLink> link;
  const CommunicatorOptions options;
  const std::vector<int> members; // [rank] its rank in the world
  const std::string key; // the group's name in the store and in heartbeats
  const int rank;
  const int world_size;
  const std::shared_ptr<GroupProgress> progress;

  // Guarded by mutex.
  std::mutex mutex;
  std::condition_variable idle; // in_flight became 0
  int in_flight = 0;
  CommClock::time_point last_completion = CommClock::now();
  bool closed = false;
  /// The first error, without its "[part::function]".
  std::optional<FailureCause> error;

  // Used by the thread that issues operations.
  std::unordered_set<uint64_t> known; // hashes of the operations that the group has done
  uint64_t compared_at = 0; // sequence number of the last comparison with the peers
  CommClock::time_point compared{}; // time of the last comparison
  uint64_t apart_at = 0; // sequence number at which a peer was last in another operation
  CommClock::time_point together{}; // last time at which it was not

  /// Throws if the group is closed or dead. Otherwise enters the next operation and returns its
  /// sequence number. `tensors` describes the operation's tensors in messages.
  uint64_t enter(const std::string& operation, const std::string& tensors = {});
  void check(const std::string& operation);
  /// For waiting loops, about 20 times a second. Throws once a peer is known to be dead or a
  /// signal has asked the process to stop.
  void poll(const std::string& operation);
  /// Like poll(), but also fails once a peer is known to be in another operation.
  void poll_together(const std::string& operation, uint64_t sequence);
  /// Throws the group's first error. If there is none, makes it from the world's cause.
  [[noreturn]] void raise(const std::string& operation);
  /// Reports `text` to the world as the failure, then throws it.
  [[noreturn]] void fail(const std::string& operation, std::string text, std::string fix);
  /// An operation failed with `text`: finds the rank that caused it and throws.
  [[noreturn]] void diagnose(const std::string& operation, uint64_t sequence,
                             const std::string& text, bool timed_out);
};

class GlooGroup final : public Communicator {
 public:
  /// Collective. Empty `members`: all ranks of the world.
  GlooGroup(std::shared_ptr<WorldLink> link, CommunicatorOptions options,
            std::vector<int> members = {});
  /// Closes without telling the peers.
  ~GlooGroup() override;

  int rank() const override { return core_->rank; }
  int world_size() const override { return core_->world_size; }
  const CommunicatorOptions& options() const override { return core_->options; }
  Work all_reduce_async(at::Tensor tensor, ReduceOp op, std::string_view name) override;
  Work broadcast_async(at::Tensor tensor, int source, std::string_view name) override;
  Work all_gather_async(at::Tensor output, at::Tensor input, std::string_view name) override;
  Work gather_async(at::Tensor output, at::Tensor input, int root, std::string_view name) override;
  Work all_to_all_async(at::Tensor output, at::Tensor input, std::string_view name) override;
  Work reduce_async(at::Tensor tensor, int root, ReduceOp op, std::string_view name) override;
  Work scatter_async(at::Tensor output, at::Tensor input, int root, std::string_view name) override;
  at::Tensor all_gather_rows(const at::Tensor& rows, std::string_view name) override;
  std::vector<nlohmann::json> all_gather_object(const nlohmann::json& value,
                                                std::string_view name) override;
  nlohmann::json broadcast_object(const nlohmann::json& value, std::string_view name) override;
  void barrier(std::string_view name) override;
  void abort(std::string_view reason) noexcept override;
  void close() noexcept override;
  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override;
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                          const CommunicatorOptions& options) override;
  std::optional<Survivors> shrink() override;

  /// Frees everything without communicating, in bounded time. For the end of the process.
  void release() noexcept;

 private:
  using Gloo = c10::intrusive_ptr<c10d::ProcessGroupGloo>;
  using Start = std::function<c10::intrusive_ptr<c10d::Work>(c10d::ProcessGroupGloo&)>;

  void connect();
  /// Leaves the world it was in.
  void replace_world(std::shared_ptr<WorldLink> link);
  /// Starts an operation that was entered as `sequence`. `finish` runs once, in the first wait
  /// that completes it.
  Work submit(std::string operation, uint64_t sequence, const Start& start,
              std::function<void()> finish);
  /// all_gather and all_to_all. They differ only in Gloo's function.
  Work exchange_rows(std::string operation, const at::Tensor& output, const at::Tensor& input,
                     c10::intrusive_ptr<c10d::Work> (*start)(c10d::ProcessGroupGloo&,
                                                             at::Tensor& to, at::Tensor& from));
  /// Returns every rank's value. [rank] The n-th exchange of a rank meets the n-th of all others.
  /// If they belong to different operations, all ranks throw.
  std::vector<nlohmann::json> exchange(const std::string& operation, uint64_t sequence,
                                       const nlohmann::json& value);
  /// Enters an operation on `tensors`. If options.check_shapes requires it, the ranks compare the
  /// operation and its tensors, and all throw if they differ.
  uint64_t enter_equal(const std::string& operation, const std::string& tensors);
  void check_equal(const std::string& operation, uint64_t sequence, const std::string& tensors);
  /// all_reduce and reduce. They differ only in Gloo's function. `keep`: this rank needs the
  /// result.
  Work reduce_with(
      std::string operation, const at::Tensor& tensor, ReduceOp op, std::string tensors, bool keep,
      const std::function<c10::intrusive_ptr<c10d::Work>(
          c10d::ProcessGroupGloo&, std::vector<at::Tensor>& buffer, c10d::ReduceOp op)>& start);
  /// Fails unless the texts of all ranks are equal.
  void require_equal(const std::string& operation, const std::vector<std::string>& texts);
  bool wait_idle(CommClock::time_point until);
  void leave(bool orderly) noexcept;

  std::shared_ptr<GroupCore> core_;
  std::mutex gloo_mutex_;
  Gloo gloo_; // null once closed
};

/// Creates the group of a world of one.
std::shared_ptr<Communicator> make_local_group(const CommunicatorOptions& options);

/// Registers a Gloo group. At exit, before static destructors run, groups that are not closed are
/// released, so that none outlives main.
void register_group(const std::shared_ptr<GlooGroup>& group);

} // namespace detail

} // namespace hasten
