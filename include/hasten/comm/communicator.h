// The one way ranks talk: a process group over c10d with named operations,
// timeouts and errors that say which rank and which operation.
// Threading: one thread per communicator issues operations; waiting on a handle
// may happen elsewhere. Lifetime: close() before static destructors run; no
// destructor communicates. After any failure every group of the world is dead:
// each later call throws the first error again, unless the ranks that are left
// shrink() their world. While a call waits, SIGINT and
// SIGTERM end it with Interrupted (see base/process.h), within 0.1 s.
// What a timeout names: each rank's last entered operation travels with its sign of
// life, four times a second. A rank that died or froze is named within the heartbeat
// limit, not the timeout: by its silence on other hosts, by /proc on its own.
// "Collective" = every rank of the group calls it, in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/base/timeouts.h"
#include "hasten/base/world.h"

namespace hasten {

enum class ReduceOp { SUM, AVG, MAX, MIN, PRODUCT };

/// When ranks compare an operation's kind, name, shapes and dtype over their group
/// before they begin it, so that a mismatch is an error that names two ranks, where
/// Gloo would end the process.
enum class ShapeCheck {
  never,
  /// Where the operation, so named and so shaped, is new to the group: an exchange by
  /// the store, once for each. Mismatches that are left over: operations that were all done
  /// before and come in another order on one rank.
  first,
  /// An exchange by the store for every operation.
  always
};

struct CommunicatorOptions {
  /// Longest a rank waits for peers that are alive but late. Milliseconds.
  std::chrono::milliseconds timeout = default_ddp_timeout();
  /// Longest until a rank is named that died, cannot be reached, or that a signal has
  /// stopped, whatever the timeout. In worlds of more than 1,000 ranks at least 5 ms
  /// a rank. Milliseconds.
  std::chrono::milliseconds heartbeat_timeout = default_heartbeat_timeout();
  /// Name of the group, in messages and in the store's keys; the same on all
  /// ranks, and unique among the groups of a world.
  std::string name = "world";
  /// Address that Gloo listens on, or an interface's name. Empty: loopback when every
  /// rank is on this host; else the interface that GLOO_SOCKET_IFNAME names, else the
  /// one whose route reaches the store, on the store's host the one that others reach.
  std::string interface_address{};
  /// What every rank computes on, "cpu" or "cuda"; the handshake compares it.
  std::string device_kind = "cpu";
  /// A rank that compares waits for the others, so what is new comes in one order
  /// where one thread uses several groups that compare. HASTEN_COMM_CHECK=1 in the
  /// environment makes it always; 0 makes `first` never.
  ShapeCheck check_shapes = ShapeCheck::first;
};

/// A collective under way. Copyable; waiting twice is allowed.
class Work {
 public:
  Work() = default;
  /// Blocks until the operation has ended; its tensors hold the result then.
  /// Throws CommunicationError naming operation and rank.
  void wait();
  /// True where wait() would not block. Never throws.
  bool done() const;
  /// When the operation's data was there, whoever waited for it; the epoch
  /// while it is under way. Never throws.
  std::chrono::steady_clock::time_point ended() const;
  explicit operator bool() const { return state_ != nullptr; }

  struct State;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<State> state_;
};

/// Who is left of a world; see Communicator::shrink.
struct Survivors {
  /// [new rank] its rank before. Ascending, fewer than before.
  std::vector<int> ranks{};
  /// Why the others are gone: "rank 2 died (process 77 ended)". Ranks as they
  /// were when the world began.
  std::string cause{};
};

class Communicator {
 public:
  /// Meets the peers of `world`: store, Gloo group, liveness, and a handshake
  /// that verifies world size, hasten and torch version and device kind.
  /// Collective, blocks up to options.timeout. A world of one opens no socket.
  static std::shared_ptr<Communicator> create(const World& world,
                                              const CommunicatorOptions& options = {});

  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual const CommunicatorOptions& options() const = 0;
  bool is_main() const { return rank() == 0; }

  /// Reduces `tensor` in place; it holds the result once wait() has returned.
  /// Contiguous, any shape, on the CPU; float, double, half, bfloat16, and for
  /// all but mean int64, int32, int8, uint8. Every rank gets the same bits.
  /// sum and product go in an order that depends on the world size. mean is that
  /// sum divided once by the world size. half and bfloat16 are summed, multiplied
  /// and divided in an fp32 copy (memory: 2 x the tensor while under way) and
  /// rounded once.
  /// `name` is what an error calls it: "ddp bucket 3". Shapes must be equal on
  /// all ranks (see check_shapes).
  virtual Work all_reduce_async(at::Tensor tensor, ReduceOp op, std::string_view name) = 0;
  void all_reduce(at::Tensor tensor, ReduceOp op, std::string_view name) {
    all_reduce_async(std::move(tensor), op, name).wait();
  }

  /// The same, with the result on rank `root` alone: elsewhere `tensor` keeps its
  /// values and may change once this has returned. Half the volume of an all_reduce.
  /// Memory: a copy of the tensor on the other ranks while under way.
  virtual Work reduce_async(at::Tensor tensor, int root, ReduceOp op, std::string_view name) = 0;

  /// Copies rank `source`'s `tensor` into every rank's, in place. Any dtype.
  virtual Work broadcast_async(at::Tensor tensor, int source, std::string_view name) = 0;
  void broadcast(at::Tensor tensor, int source, std::string_view name) {
    broadcast_async(std::move(tensor), source, name).wait();
  }

  /// `output` is [world_size, …input's shape], contiguous; row r is rank r's
  /// input. Shapes and dtypes are equal on all ranks.
  virtual Work all_gather_async(at::Tensor output, at::Tensor input, std::string_view name) = 0;

  /// The same on rank `root` alone; elsewhere `output` is not looked at, and may
  /// be undefined.
  virtual Work gather_async(at::Tensor output, at::Tensor input, int root,
                            std::string_view name) = 0;

  /// Row r of rank `root`'s `input` [world_size, …output's shape], contiguous, into
  /// rank r's `output`. Elsewhere `input` is not looked at, and may be undefined.
  virtual Work scatter_async(at::Tensor output, at::Tensor input, int root,
                             std::string_view name) = 0;

  /// Row r of `input` goes to rank r; row r of `output` comes from rank r. Both
  /// [world_size, …] and contiguous, of one shape and dtype on all ranks.
  virtual Work all_to_all_async(at::Tensor output, at::Tensor input, std::string_view name) = 0;

  /// Sums row r of every rank's `input` [world_size, …] into rank r's `output` [any
  /// shape of a row's elements], in rank order, in output's dtype: a floating one,
  /// so 16-bit rows are summed in fp32 where output is. All contiguous. `scratch`
  /// takes what comes from the others, a tensor like `input`; made where it is
  /// undefined. Neither may change until wait() has returned, which does the sum.
  /// Half the volume of an all_reduce.
  Work reduce_scatter_async(at::Tensor output, at::Tensor input, std::string_view name,
                            at::Tensor scratch = {});

  /// Tensors of one dtype and trailing shape, dim 0 may differ by rank (0
  /// included): concatenated over ranks in rank order, on every rank.
  /// Blocking; shapes are agreed first and a mismatch is an error on all.
  /// Memory: world_size times the longest rank's rows, twice.
  virtual at::Tensor all_gather_rows(const at::Tensor& rows, std::string_view name) = 0;

  /// Small values from every rank, on every rank, in rank order. For shapes,
  /// counts and messages, not for data. Blocking, through the store.
  virtual std::vector<nlohmann::json> all_gather_object(const nlohmann::json& value,
                                                        std::string_view name) = 0;

  /// Rank 0's value on every rank. Blocking, through the store.
  virtual nlohmann::json broadcast_object(const nlohmann::json& value, std::string_view name) = 0;

  /// Blocks until every rank has entered.
  virtual void barrier(std::string_view name) = 0;

  /// Tells the peers that this rank fails and why ("rank r failed: reason"),
  /// through the store, and marks every group of the world dead. A peer that
  /// waits or calls later throws CommunicationError with that text within a
  /// quarter of a second. Blocks half a second at most; rank 0, whose store
  /// goes with it, until its peers have read it, a second more at most.
  /// Never throws. For exceptions on their way out.
  virtual void abort(std::string_view reason) noexcept = 0;

  /// Lets go of the group once its operations under way have ended. The last
  /// group of a world leaves it: ranks meet first, so that no peer loses data
  /// or its store. Rank 0 blocks until every living rank has come, up to the
  /// timeout; others up to the heartbeat limit. After a failure or Ctrl-C it
  /// closes at once (rank 0: within a second). Calling it twice does nothing.
  /// A destructor without close() communicates nothing: peers that still wait
  /// learn of this rank by its end. Groups left open are let go before static
  /// destructors run.
  virtual void close() noexcept = 0;

  /// A further group of the same ranks, with its own name, timeout and order
  /// of operations. Collective.
  virtual std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) = 0;

  /// A group of some ranks of this one, ascending, this one among them: rank i of
  /// it is ranks[i] here. Errors name ranks of the world. Groups of other ranks
  /// may have the same name. Collective over `ranks`: those of the list call it,
  /// with the same list. Throws InputError for a list that is not ascending, out
  /// of range or without this rank.
  virtual std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                                  const CommunicatorOptions& options) = 0;

  /// After a failure: goes on with the ranks that are left. They meet on the
  /// store and agree on who they are; then this group is theirs alone: ranks are
  /// those of before without gaps, connections new, operations of before, and
  /// the world's other groups, stay dead. One rank may be left. Errors go on
  /// naming ranks as they were when the world began.
  /// Lost are ranks whose processes have ended or show no sign of life for the
  /// heartbeat limit, that failed (abandon) or left, and, after the timeout, those
  /// that have not come here. One of these that comes later gets an error.
  /// Nothing, on every rank, where no rank is lost: nothing has failed, or ranks
  /// disagree, or a late one has come; the group is then as it was.
  /// Collective over those that are left, blocking: until all of them have come,
  /// at most the timeout. A further loss meanwhile is dealt with too.
  /// Throws CommunicationError where rank 0 is lost, since it serves the store
  /// (unless the launcher does: hasten launch, torchrun), and on a rank that was left
  /// behind; InputError for a group of some of the world's ranks.
  virtual std::optional<Survivors> shrink();

 protected:
  Communicator() = default;
};

} // namespace hasten
