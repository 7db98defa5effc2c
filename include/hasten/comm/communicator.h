// Communication between ranks: a c10d process group whose operations have names and timeouts, and
// whose errors name the rank and the operation.
// Threading: one thread per communicator issues operations. Any thread may wait on a handle.
// Tensors: until wait() returns, an operation's tensors are its own. Do not write what it reads, and
// do not use what it writes, unless a function says otherwise.
// Lifetime: call close() before static destructors run. No destructor communicates.
// After a failure every group of the world is dead: each later call throws the first error again,
// unless the remaining ranks shrink() the world. While a call waits, SIGINT and SIGTERM end it
// with Interrupted (see base/process.h) within 0.1 s.
// Heartbeats name the operation that each rank entered last (four times a second), so a timeout
// error can say what the late rank is doing. A rank that died or froze is reported within the
// heartbeat limit, not the timeout: from missing heartbeats on other hosts, from /proc on its own.
// Nobody waits for an operation on a device, so a thread watches it. After a failure or the timeout
// it ends what runs there, so that a host which waits for the device comes free.
// "Collective" means that every rank of the group calls it, in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <exception>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/timeouts.h"
#include "hasten/base/world.h"

namespace hasten {

enum class ReduceOp { SUM, AVG, MAX, MIN, PRODUCT };

/// When the ranks of a group compare kind, name, shapes and dtype of an operation before they
/// begin it. A mismatch is then an error that names two ranks. Without the check Gloo would end
/// the process. "shm" compares every operation, at no cost that can be measured, and does not read
/// this. "shm+gloo" does so inside each host, and between hosts what this says.
enum class ShapeCheck {
  never,
  /// The first time that an operation with this name and shape occurs in the group. Costs one
  /// exchange through the store. Does not find ranks that repeat earlier operations in another
  /// order.
  first,
  /// For every operation, with one exchange through the store each.
  always
};

struct CommunicatorOptions {
  /// Maximum wait for peers that are alive but late. Milliseconds.
  std::chrono::milliseconds timeout = default_ddp_timeout();
  /// Maximum time until the error names a rank that died, cannot be reached or was stopped by a
  /// signal, whatever the timeout. At least 5 ms per rank in worlds of more than 1,000 ranks.
  /// Milliseconds.
  std::chrono::milliseconds heartbeat_timeout = default_heartbeat_timeout();
  /// Name of the group in messages and in keys of the store. The same on all ranks. Groups that have
  /// the same name and ranks must be made in the same order on all of these ranks.
  std::string name = "world";
  /// Address, or name of the interface, at which Gloo listens. Empty: loopback if every rank is
  /// on this host; else the interface that GLOO_SOCKET_IFNAME names; else the interface of the
  /// route to the store (on the store's host: the one that other hosts reach).
  std::string interface_address{};
  /// Where this rank computes. The handshake compares the types of the ranks' devices. Without an
  /// index: the current device of that type.
  at::Device device = at::kCPU;
  /// A rank that compares shapes waits for the others. So if one thread uses several groups that
  /// compare, new operations must come in the same order on all ranks. With `always`, groups of the
  /// same ranks also compare the order of all their operations on a device, which must be one: two
  /// back ends of a GPU can wait for each other. HASTEN_COMM_CHECK=1 in the environment sets
  /// always; 0 turns `first` into never.
  ShapeCheck check_shapes = ShapeCheck::first;
  /// What moves tensors: a name of backend_names() (hasten/comm/backend.h), the same on all ranks.
  /// "shm" and "gloo" move host memory. They copy tensors of other devices there when an operation
  /// starts, which waits for the device, and back in wait(). "shm" needs all ranks of the group on
  /// one host: they read each other's data in memory that they share, 1 MiB for each rank and
  /// group. "gloo" sends it over TCP. "nccl" and other back ends of a device move the memory of
  /// `device`, and use shm or gloo for the rest: tensors of the CPU, values, barriers.
  /// "auto" is the back end of the device's type. Without one it is "shm" if the ranks are on one
  /// host; "shm+gloo" if they are on several, with the same number of ranks on each and more than
  /// one: tensors move through shared memory inside a host, and each rank sends a slice of them to
  /// other hosts over Gloo, which is hierarchical; else "gloo". If hosts of several ranks have
  /// different numbers of them, or ranks of a host cannot share memory, it is "gloo", too, and one
  /// line of the log says why. "shm+gloo" cannot be named here.
  /// HASTEN_COMM_BACKEND=gloo or =shm in the environment of all ranks chooses between these two. The
  /// ranks compare what they have chosen when they meet, and check_shapes, sum_in_fp32 and name.
  /// A world of one rank moves nothing. duplicate() and new_group() do not read it: their groups
  /// choose as the group did from which they are made. options().backend of a group of several
  /// ranks is the choice.
  std::string backend = "auto";
  /// Back ends of a device add half and bfloat16 in that dtype and round each partial sum. true:
  /// all_reduce and reduce add an fp32 copy, as gloo always does. Costs memory of 2 x the tensor
  /// until the operation ends, twice the bytes between ranks, and two passes over the tensor.
  bool sum_in_fp32 = false;
};

/// Whether a group with these options() uses Collective::scratch for tensors of the CPU. Local.
bool uses_scratch(const CommunicatorOptions& options);

/// An operation on tensors, as back ends get it from the functions of Communicator.
struct Collective {
  enum class Kind {
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    gather,
    scatter,
    all_to_all,
    reduce_scatter
  };

  Kind kind = Kind::all_reduce;
  std::string_view name{};
  /// The tensor of all_reduce, reduce and broadcast, which work in place.
  at::Tensor output{};
  at::Tensor input{};
  /// Of all_reduce and reduce.
  ReduceOp op = ReduceOp::SUM;
  /// Of reduce, gather and scatter; for broadcast the source.
  int root = 0;
  /// For reduce_scatter: like `input`, or undefined.
  at::Tensor scratch{};

  /// "all_reduce".
  std::string_view kind_name() const;
  /// The tensor whose shape and dtype are equal on all ranks.
  const at::Tensor& shared() const;
};

/// A collective that has started. Copyable. wait() may be called several times.
class Work {
 public:
  Work() = default;
  /// Blocks until the operation has ended. Its tensors then have the result. A back end that moves
  /// a device's memory itself (not gloo) does not block: the calling thread's current stream waits
  /// instead, and its later work finds the result. Free or write the tensors only after wait(), from
  /// that stream; or, if the last handle goes without wait(), from the stream of the start, then.
  /// Throws CommunicationError that names the operation and the rank.
  void wait();
  /// True if wait() would not block. Never throws.
  bool done() const;
  /// The time at which the operation's result was complete, however late wait() was called; the
  /// clock's epoch before that. On a device with a back end: the time at which somebody, the thread
  /// that watches it or a caller of done() or this function, first saw it. Never throws.
  std::chrono::steady_clock::time_point ended() const;
  explicit operator bool() const { return state_ != nullptr; }

  struct State;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<State> state_;
};

/// Seconds that this thread has waited in collectives so far: in Work::wait() and in the blocking
/// ones. Waits in a recomputation of activation checkpointing are part of
/// recompute_counts().seconds instead.
double seconds_waited();

/// Bytes that this process has sent to other ranks: over the TCP connections that are open now, as
/// the kernel counts them, and through memory that ranks share.
int64_t bytes_sent();

/// The ranks that are left of a world; see Communicator::shrink.
struct Survivors {
  /// [new rank] Its rank before. Ascending; fewer than before.
  std::vector<int> ranks{};
  /// Why the others were lost: "rank 2 died (process 77 ended)". Uses the rank numbers from when
  /// the world began.
  std::string cause{};
};

class Communicator;

namespace detail {

/// The group's ranks on this rank's host, ascending, with this one. A container counts as a host.
/// Local.
std::vector<int> ranks_of_host(const Communicator& group);

} // namespace detail

class Communicator {
 public:
  /// Joins `world`: connects to the store, starts the heartbeats, compares world size, hasten and
  /// torch version, device kind and back end of the ranks, and creates the back end's group.
  /// Collective. Blocks up to options.timeout. In a world of one it opens no socket.
  /// Throws InputError for an unknown back end and if the ranks differ.
  static std::shared_ptr<Communicator> create(const World& world,
                                              const CommunicatorOptions& options = {});

  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual const CommunicatorOptions& options() const = 0;
  bool is_main() const { return rank() == 0; }

  /// Reduces `tensor` in-place. It has the result after wait().
  /// The tensor is contiguous, of any shape, and float, double, half, bfloat16, or for
  /// all but AVG also int64, int32, int8 or uint8. Every rank gets the same bits. The order of SUM
  /// and PRODUCT depends on the world size. AVG is the SUM, divided once by the world size. half
  /// and bfloat16 are summed, multiplied and divided in fp32 and rounded once (with gloo in a copy:
  /// 2 x the tensor until the operation ends); on a device with a back end only if
  /// options.sum_in_fp32 says so. With shm the order is that of the ranks. With shm+gloo it depends on
  /// their hosts, too: the ranks of each host are summed first.
  /// `name` is for errors: "ddp bucket 3". Shapes must be equal on all ranks (see check_shapes).
  Work all_reduce_async(at::Tensor tensor, ReduceOp op, std::string_view name) {
    return start({Collective::Kind::all_reduce, name, std::move(tensor), {}, op});
  }
  void all_reduce(at::Tensor tensor, ReduceOp op, std::string_view name) {
    all_reduce_async(std::move(tensor), op, name).wait();
  }

  /// Like all_reduce_async, but only rank `root` gets the result. On other ranks `tensor` keeps
  /// its values and may be changed after the return, by a device's current stream. Half the traffic of an all_reduce.
  /// Memory: a copy of the tensor on the other ranks until the operation ends.
  Work reduce_async(at::Tensor tensor, int root, ReduceOp op, std::string_view name) {
    return start({Collective::Kind::reduce, name, std::move(tensor), {}, op, root});
  }

  /// Copies `tensor` of rank `source` to every rank's `tensor`, in-place. Any dtype.
  Work broadcast_async(at::Tensor tensor, int source, std::string_view name) {
    return start({Collective::Kind::broadcast, name, std::move(tensor), {}, {}, source});
  }
  void broadcast(at::Tensor tensor, int source, std::string_view name) {
    broadcast_async(std::move(tensor), source, name).wait();
  }

  /// `output` is [world_size, …shape of input], contiguous. output[r] is rank r's input. Shapes
  /// and dtypes are equal on all ranks.
  Work all_gather_async(at::Tensor output, at::Tensor input, std::string_view name) {
    return start({Collective::Kind::all_gather, name, std::move(output), std::move(input)});
  }

  /// The same, but only on rank `root`. On other ranks `output` is not used and may be undefined.
  Work gather_async(at::Tensor output, at::Tensor input, int root, std::string_view name) {
    return start({Collective::Kind::gather, name, std::move(output), std::move(input), {}, root});
  }

  /// Copies input[r] of rank `root` to rank r's `output`. `input` is [world_size, …shape of
  /// output], contiguous. On other ranks `input` is not used and may be undefined.
  Work scatter_async(at::Tensor output, at::Tensor input, int root, std::string_view name) {
    return start({Collective::Kind::scatter, name, std::move(output), std::move(input), {}, root});
  }

  /// Sends input[r] to rank r and receives output[r] from rank r. Both are [world_size, …] and
  /// contiguous, with the same shape and dtype on all ranks.
  Work all_to_all_async(at::Tensor output, at::Tensor input, std::string_view name) {
    return start({Collective::Kind::all_to_all, name, std::move(output), std::move(input)});
  }

  /// Sums input[r] of all ranks into rank r's `output`: with shm and gloo, and where the dtypes differ,
  /// in rank order; with shm+gloo in fp32 or double, first inside each host; with NCCL in an order that
  /// depends on the world. `input` is [world_size, …].
  /// `output` has as many elements as input[r], in any shape. The sum is computed in output's
  /// dtype, which is floating-point: use fp32 to sum 16-bit inputs in fp32. All are contiguous.
  /// `scratch` receives the other ranks' data. It is a tensor like `input`, and is allocated if
  /// undefined. `input` and `scratch` must not change until wait() returns; wait() computes the
  /// sum. Half the traffic of an all_reduce.
  Work reduce_scatter_async(at::Tensor output, at::Tensor input, std::string_view name,
                            at::Tensor scratch = {}) {
    return start({Collective::Kind::reduce_scatter, name, std::move(output), std::move(input),
                  ReduceOp::SUM, 0, std::move(scratch)});
  }

  /// Zeros, [numel], for tensors that are communicated often: gradients, snapshots. With shm and shm+gloo each
  /// lies in separate memory (a file descriptor each), which other ranks can read and not write, if
  /// it has 256 KiB or more and this host has the memory. all_reduce, all_gather and reduce_scatter
  /// of such a tensor, or of a part of it, read its data there, if all ranks' tensors are such
  /// ones; other data is copied. See c10d::Backend::allocateTensor. Local.
  virtual at::Tensor allocate_tensor(int64_t numel, const at::TensorOptions& options);

  /// Starts an operation: what the functions above call, and what a back end implements.
  virtual Work start(const Collective& what) = 0;

  /// Starts operations in this order. If all are on its device, a back end may send them as one,
  /// which costs a GPU one launch, and compare them as one. The handle waits for all.
  virtual Work start_together(const std::vector<Collective>& what);

  /// Concatenates the ranks' tensors in rank order, on every rank. They have the same dtype and
  /// the same shape but for dimension 0, which may be 0. Blocking. The ranks compare shapes
  /// first, and a mismatch is an error on all.
  /// Memory: twice world_size times the longest rank's tensor.
  virtual at::Tensor all_gather_rows(const at::Tensor& rows, std::string_view name) = 0;

  /// Gathers small values of all ranks, in rank order, on every rank. For shapes, counts and
  /// messages, not for data. Blocking. Through the store, or the memory that ranks share.
  std::vector<nlohmann::json> all_gather_object(const nlohmann::json& value, std::string_view name);

  /// Returns rank 0's value on every rank. Blocking. Through the store, or the memory that ranks share.
  nlohmann::json broadcast_object(const nlohmann::json& value, std::string_view name);

  /// Gathers values for `operation`: what the two functions above call, and what a back end
  /// implements.
  virtual std::vector<nlohmann::json> exchange(std::string_view operation, std::string_view name,
                                               const nlohmann::json& value) = 0;

  /// Blocks until every rank has called it.
  virtual void barrier(std::string_view name) = 0;

  /// Throws the first error if the group is dead. Local, does not block. Call it after the host has
  /// read a value of a device and before it believes it: a lost rank leaves such values undefined.
  virtual void check(std::string_view name) = 0;

  /// Reports to the peers through the store that this rank fails and why ("rank r failed:
  /// reason"), and marks every group of the world as dead. A peer that waits or calls later throws
  /// CommunicationError with that text within a quarter of a second. Blocks up to half a second;
  /// rank 0 up to a second more, until its peers have read it, if its end ends the store.
  /// Never throws. The peers' errors have this `kind`.
  virtual void abort(std::string_view reason, ErrorKind kind = ErrorKind::other) noexcept = 0;
  /// The same with the message and kind of an exception. Call it when one leaves your loop.
  void abort(const std::exception& error) noexcept;

  /// Closes the group when its running operations have ended. With its last group a rank leaves
  /// the world: the ranks meet first, so that no peer loses data or its store. Rank 0 waits for
  /// every living rank, up to the timeout; other ranks wait up to the heartbeat limit. After a
  /// failure or Ctrl-C it closes immediately (rank 0: within a second). A second call does
  /// nothing. A destructor without close() does not communicate: peers that wait find out when
  /// this process ends. Groups that are still open are closed before static destructors run.
  virtual void close() noexcept = 0;

  /// Creates another group of the same ranks, with its own name, timeout and order of operations.
  /// Collective.
  virtual std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) = 0;

  /// Creates a group of some ranks of this one. `ranks` is ascending and includes this rank. Rank i
  /// of the new group is ranks[i] of this one. Errors use the ranks of the world. Collective over
  /// `ranks`: each of them passes the same list. Throws InputError if the list is not ascending, out
  /// of range or without this rank.
  virtual std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                                  const CommunicatorOptions& options) = 0;

  /// Continues with the remaining ranks after a failure. They meet in the store and agree on who
  /// they are. Then this group has only them, with new connections and consecutive ranks in the
  /// old order. Earlier operations and the world's other groups stay dead. One rank may remain.
  /// Errors still use the rank numbers from when the world began.
  /// A rank is lost if its process has ended, it has sent no heartbeat for the heartbeat limit, it
  /// failed (abort) or left, or it has not called shrink() before the timeout. A lost rank that
  /// calls it later gets an error.
  /// Returns nullopt on every rank, and leaves the group as it was, if no rank is lost: nothing
  /// failed, or ranks only disagreed, or a late rank has arrived.
  /// Collective over the remaining ranks. Blocks until all have called it, up to the timeout.
  /// Handles further losses in the meantime.
  /// Throws CommunicationError if rank 0 is lost, because it serves the store (unless the launcher
  /// does: hasten launch, torchrun), and on a rank that the others count as lost. Throws
  /// InputError for a group that does not have all ranks of the world.
  virtual std::optional<Survivors> shrink();

 protected:
  Communicator() = default;
  friend std::vector<int> detail::ranks_of_host(const Communicator& group);
  virtual std::vector<int> host_members() const { return {rank()}; }
  /// reduce_scatter as an all_to_all whose rows wait() sums: for back ends that have no other.
  Work reduce_scatter_by_all_to_all(const Collective& what);
};

} // namespace hasten
