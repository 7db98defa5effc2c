// A group over c10d's Gloo back end. GroupCore is what outlives the
// communicator while handles are under way.
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

/// What to do where ranks are in different operations.
inline constexpr const char* kSameOperations =
    "let all ranks do the same operations on tensors of one shape and dtype, in one order";

struct GroupCore {
  /// `members`: ranks of the world.
  GroupCore(std::shared_ptr<WorldLink> world_link, const CommunicatorOptions& group,
            std::vector<int> members);

  // Set at construction.
  const std::shared_ptr<WorldLink> link;
  const CommunicatorOptions options;
  const std::vector<int> members; // [rank] their ranks in the world
  const std::string key; // the group's name in the store and in beats
  const int rank;
  const int world_size;
  const std::shared_ptr<GroupProgress> progress;

  // Under mutex.
  std::mutex mutex;
  std::condition_variable idle; // in_flight became 0
  int in_flight = 0;
  CommClock::time_point last_completion = CommClock::now();
  bool closed = false;
  /// The first error, without its "[part::function]".
  std::optional<FailureCause> error;

  // Of the thread that issues operations.
  std::unordered_set<uint64_t> known; // hashes of what the group has done before
  uint64_t compared_at = 0; // the operation whose peers were last looked at
  CommClock::time_point compared{}; // and when
  uint64_t apart_at = 0; // the operation in which a peer was last seen elsewhere
  CommClock::time_point together{}; // when it was not yet

  /// Throws where the group is closed or dead, else enters the next operation
  /// and returns its number. `tensors`: what it is about, for messages.
  uint64_t enter(const std::string& operation, const std::string& tensors = {});
  void check(const std::string& operation);
  /// For waiting loops, about 20 times a second: throws once a peer is known
  /// to be dead or the user wants to stop.
  void poll(const std::string& operation);
  /// The same where peers must be in the same operation: fails once one is known to
  /// be in another.
  void poll_together(const std::string& operation, uint64_t sequence);
  /// Throws the first error of the group; where there is none, makes it from
  /// the world's cause.
  [[noreturn]] void raise(const std::string& operation);
  /// Reports `text` to the world as the failure, then raises it.
  [[noreturn]] void fail(const std::string& operation, std::string text, std::string fix);
  /// An operation broke with `text`: finds out who is to blame and raises.
  [[noreturn]] void diagnose(const std::string& operation, uint64_t sequence,
                             const std::string& text, bool timed_out);
};

class GlooGroup final : public Communicator {
 public:
  /// Collective. Empty `members`: all ranks of the world.
  GlooGroup(std::shared_ptr<WorldLink> link, CommunicatorOptions options,
            std::vector<int> members = {});
  /// Lets go without a word to the peers.
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

  /// Lets go of everything without communicating; bounded. For the end of the
  /// process.
  void release() noexcept;

 private:
  using Gloo = c10::intrusive_ptr<c10d::ProcessGroupGloo>;
  using Start = std::function<c10::intrusive_ptr<c10d::Work>(c10d::ProcessGroupGloo&)>;

  void connect();
  /// Leaves the world it was in.
  void replace_world(std::shared_ptr<WorldLink> link);
  /// Starts an operation entered as `sequence`; `finish` runs once, in the
  /// first wait that sees it through.
  Work submit(std::string operation, uint64_t sequence, const Start& start,
              std::function<void()> finish);
  /// all_gather and all_to_all, which differ in Gloo's call.
  Work exchange_rows(std::string operation, const at::Tensor& output, const at::Tensor& input,
                     c10::intrusive_ptr<c10d::Work> (*start)(c10d::ProcessGroupGloo&,
                                                             at::Tensor& to, at::Tensor& from));
  /// Every rank's value, [rank]. A rank's n-th exchange meets the n-th of all others;
  /// where these are not one operation, it throws on all.
  std::vector<nlohmann::json> exchange(const std::string& operation, uint64_t sequence,
                                       const nlohmann::json& value);
  /// Enters an operation that is about `tensors`. Where options.check_shapes says so,
  /// throws on all ranks where a rank's operation or tensors are others.
  uint64_t enter_equal(const std::string& operation, const std::string& tensors);
  void check_equal(const std::string& operation, uint64_t sequence, const std::string& tensors);
  /// all_reduce and reduce, which differ in Gloo's call. `keep`: the result is
  /// wanted here.
  Work reduce_with(
      std::string operation, const at::Tensor& tensor, ReduceOp op, std::string tensors, bool keep,
      const std::function<c10::intrusive_ptr<c10d::Work>(
          c10d::ProcessGroupGloo&, std::vector<at::Tensor>& buffer, c10d::ReduceOp op)>& start);
  /// Fails unless all ranks' texts are equal.
  void require_equal(const std::string& operation, const std::vector<std::string>& texts);
  bool wait_idle(CommClock::time_point until);
  void leave(bool orderly) noexcept;

  std::shared_ptr<GroupCore> core_;
  std::mutex gloo_mutex_;
  Gloo gloo_; // null once closed
};

/// Makes the world's first group, or the group of a world of one.
std::shared_ptr<Communicator> make_local_group(const CommunicatorOptions& options);

/// Every Gloo group is known here until it is closed, so that none outlives
/// main: what is left is released before static destructors run.
void register_group(const std::shared_ptr<GlooGroup>& group);

} // namespace detail

} // namespace hasten
