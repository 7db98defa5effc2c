// The shared memory as a back end of c10d, for programs without a Communicator: each call of c10d
// becomes a Collective with its tensors.
#include "hasten/comm/shared_memory_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "hasten/base/error.h"
#include "reduce_rows.h"
#include "tensor_checks.h"
#include "transfer_queue.h"

namespace hasten::detail {

using std::chrono::milliseconds;
using Kind = Collective::Kind;
using Tensors = std::vector<at::Tensor>;
using C10dWork = c10::intrusive_ptr<c10d::Work>;

static ReduceOp reduce_op(const c10d::ReduceOp& op) {
  using Theirs = c10d::ReduceOp;
  static_assert(Theirs::SUM == 0 && Theirs::AVG == 1 && Theirs::PRODUCT == 2 && Theirs::MIN == 3 &&
                Theirs::MAX == 4);
  constexpr std::array kOurs{ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN,
                             ReduceOp::MAX};
  if (op.op_ > Theirs::MAX) {
    throw InputError("comm::shm", "the reduction is not one of SUM, AVG, MIN, MAX and PRODUCT");
  }
  return kOurs[op.op_];
}

/// All have one number of elements and one dtype.
static void check_alike(std::string_view kind, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.is_cpu() || !tensor.is_contiguous() ||
        tensor.numel() != tensors[0].numel() || tensor.scalar_type() != tensors[0].scalar_type()) {
      throw InputError("comm::" + std::string(kind), "tensor is " + tensor_text(tensor),
                       "contiguous tensors of the CPU, with one number of elements and one dtype",
                       "call .contiguous()");
    }
  }
}

/// An operation of SharedBackend.
class SharedWork final : public c10d::Work {
 public:
  SharedWork(int rank, std::shared_ptr<TransferQueue> queue, TransferArguments arguments,
             milliseconds timeout)
      : Work(rank),
        queue_(std::move(queue)),
        outputs_(arguments.outputs),
        timeout_(timeout),
        item_(queue_->start(std::move(arguments))) {}

  bool isCompleted() override {
    queue_->drive(*item_, milliseconds(0));
    return item_->outcome().has_value();
  }
  bool isSuccess() const override { return item_->outcome() == std::exception_ptr(nullptr); }
  std::exception_ptr exception() const override { return item_->outcome().value_or(nullptr); }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }

  bool wait(milliseconds timeout) override {
    const milliseconds limit = timeout != kNoTimeout ? timeout : timeout_;
    const auto start = std::chrono::steady_clock::now();
    while (!item_->has_ended()) {
      queue_->drive(*item_, milliseconds(50));
      if (!item_->has_ended() && limit.count() > 0 &&
          std::chrono::steady_clock::now() - start > limit) {
        throw CommunicationError(
            "comm::shm",
            item_->transfer.text() + ": Timed out after " + std::to_string(limit.count()) + " ms",
            "every rank to run it", "", ErrorKind::timed_out);
      }
    }
    if (const std::exception_ptr error = exception()) {
      std::rethrow_exception(error);
    }
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    item_->on_end([future, outputs = outputs_](const std::exception_ptr& error) {
      if (error) {
        future->setError(error);
      } else {
        future->markCompleted(c10::IValue(outputs));
      }
    });
    queue_->progress_in_thread(); // its callbacks come without anybody who waits
    return future;
  }

 private:
  const std::shared_ptr<TransferQueue> queue_;
  const Tensors outputs_;
  const milliseconds timeout_;
  const std::shared_ptr<TransferQueue::Item> item_;
};

class SharedBackend final : public c10d::Backend {
 public:
  SharedBackend(int rank, int size, std::shared_ptr<TransferQueue> queue)
      : Backend(rank, size), queue_(std::move(queue)) {}
  /// Operations that have not ended fail.
  ~SharedBackend() override { queue_->stop(); }

  const std::string getBackendName() const override { return "shm"; }
  /// shared_zeros(), which collectives read in place.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return shared_zeros(size, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  void setSequenceNumberForGroup() override {}

  C10dWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return start(collective(Kind::all_reduce, tensors, 0, options.reduceOp), tensors, tensors,
                 options.timeout);
  }
  C10dWork allreduce_coalesced(Tensors& tensors,
                               const c10d::AllreduceCoalescedOptions& options) override {
    return last_of(tensors, [&](size_t i) {
      Tensors one{tensors[i]};
      return allreduce(one, options);
    });
  }
  C10dWork reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return start(collective(Kind::reduce, tensors, options.rootRank, options.reduceOp), tensors,
                 options.rootRank == getRank() ? tensors : Tensors(), options.timeout);
  }
  C10dWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const bool root = options.rootRank == getRank();
    return start(collective(Kind::broadcast, tensors, options.rootRank), root ? tensors : Tensors(),
                 root ? Tensors() : tensors, options.timeout);
  }
  C10dWork allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                     const c10d::AllgatherOptions& options) override {
    return start(collective(Kind::all_gather, inputs), inputs, outputs.at(0), options.timeout);
  }
  C10dWork _allgather_base(at::Tensor& output, at::Tensor& input,
                           const c10d::AllgatherOptions& options) override {
    return start({.kind = Kind::all_gather}, {input}, rows(output), options.timeout);
  }
  C10dWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) override {
    return last_of(inputs,
                   [&](size_t i) { return _allgather_base(outputs.at(i), inputs[i], options); });
  }
  C10dWork gather(std::vector<Tensors>& outputs, Tensors& inputs,
                  const c10d::GatherOptions& options) override {
    return start(collective(Kind::gather, inputs, options.rootRank), inputs,
                 options.rootRank == getRank() ? outputs.at(0) : Tensors(), options.timeout);
  }
  C10dWork scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                   const c10d::ScatterOptions& options) override {
    return start(collective(Kind::scatter, outputs, options.rootRank),
                 options.rootRank == getRank() ? inputs.at(0) : Tensors(), outputs,
                 options.timeout);
  }
  C10dWork reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                          const c10d::ReduceScatterOptions& options) override {
    return start(collective(Kind::reduce_scatter, outputs, 0, options.reduceOp), inputs.at(0),
                 outputs, options.timeout);
  }
  C10dWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output};
    std::vector<Tensors> inputs{rows(input)};
    return reduce_scatter(outputs, inputs, options);
  }
  C10dWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::ReduceScatterOptions& options) override {
    return last_of(
        inputs, [&](size_t i) { return _reduce_scatter_base(outputs.at(i), inputs[i], options); });
  }
  C10dWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                         std::vector<int64_t>& input_splits,
                         const c10d::AllToAllOptions& options) override {
    const auto uneven = [](const std::vector<int64_t>& splits) {
      return std::ranges::any_of(splits, [&](int64_t size) { return size != splits[0]; });
    };
    if (uneven(output_splits) || uneven(input_splits)) {
      throw InputError("comm::all_to_all", "the splits are not equal", "equal splits");
    }
    return start({.kind = Kind::all_to_all}, rows(input), rows(output), options.timeout);
  }
  C10dWork alltoall(Tensors& outputs, Tensors& inputs,
                    const c10d::AllToAllOptions& options) override {
    return start({.kind = Kind::all_to_all}, inputs, outputs, options.timeout);
  }
  C10dWork barrier(const c10d::BarrierOptions& options) override {
    const auto nothing = std::make_shared<std::vector<std::string>>(static_cast<size_t>(getSize()));
    return start({.text = "barrier", .values = nothing}, options.timeout);
  }

 private:
  /// Of an operation of which this rank has one tensor on a side.
  Collective collective(Kind kind, const Tensors& tensors, int64_t root = 0,
                        const c10d::ReduceOp& op = c10d::ReduceOp::SUM) const {
    if (tensors.size() != 1) {
      throw InputError("comm::" + std::string(Collective{kind}.kind_name()),
                       "tensors=" + std::to_string(tensors.size()), "one tensor");
    }
    check_root("shm", root, getSize());
    return {.kind = kind, .op = reduce_op(op), .root = static_cast<int>(root)};
  }

  /// Transfers end in their order, so the last one's end is that of all.
  template <typename Start>
  static C10dWork last_of(const Tensors& tensors, const Start& start_one) {
    C10dWork last;
    for (size_t i = 0; i < tensors.size(); ++i) {
      last = start_one(i);
    }
    return last;
  }

  C10dWork start(TransferArguments arguments, milliseconds timeout) {
    return c10::make_intrusive<SharedWork>(getRank(), queue_, std::move(arguments), timeout);
  }

  C10dWork start(Collective what, Tensors inputs, Tensors outputs, milliseconds timeout) {
    const std::string kind(what.kind_name());
    check_alike(kind, inputs);
    check_alike(kind, outputs);
    const bool reduces = what.kind == Kind::all_reduce || what.kind == Kind::reduce ||
                         what.kind == Kind::reduce_scatter;
    const at::Tensor& one = inputs.empty() ? outputs[0] : inputs[0];
    const at::Tensor& result = outputs.empty() ? inputs[0] : outputs[0];
    const bool floats = at::isFloatingType(one.scalar_type());
    if (one.numel() != result.numel() ||
        (one.scalar_type() != result.scalar_type() &&
         !(what.kind == Kind::reduce_scatter && floats &&
           at::isFloatingType(result.scalar_type()))) ||
        (reduces && (!is_reducible(one.scalar_type()) || !is_reducible(result.scalar_type()) ||
                     (what.op == ReduceOp::AVG && !floats)))) {
      throw InputError("comm::" + kind,
                       "output is " + tensor_text(result) + " for an input " + tensor_text(one),
                       "as many elements of a dtype that can be reduced");
    }
    std::string text = kind + (reduces ? " " + std::string(reduce_op_name(what.op)) : "") + " of " +
                       tensor_text(one) + ", root " + std::to_string(what.root);
    return start({std::move(what), std::move(text), std::move(inputs), std::move(outputs)},
                 timeout);
  }

  /// The rows of a tensor that has one for each rank.
  Tensors rows(const at::Tensor& all) const {
    if (!all.is_contiguous() || all.numel() % getSize() != 0) {
      throw InputError(
          "comm::shm", "tensor is " + tensor_text(all),
          "a contiguous tensor with one row for each of " + std::to_string(getSize()) + " ranks");
    }
    return all.detach().view({getSize(), all.numel() / getSize()}).unbind(0);
  }

  const std::shared_ptr<TransferQueue> queue_;
};

} // namespace hasten::detail

namespace hasten {

c10::intrusive_ptr<c10d::Backend> make_shared_memory_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout) {
  std::vector<int> names(static_cast<size_t>(size));
  std::iota(names.begin(), names.end(), 0);
  int exchange = 0;
  auto queues = detail::share_memory(rank, names, [&](const nlohmann::json& own) {
    const auto key = [&](int of) {
      return "shm/" + std::to_string(exchange) + "/" + std::to_string(of);
    };
    const std::string text = own.dump();
    store->set(key(rank), std::vector<uint8_t>(text.begin(), text.end()));
    std::vector<nlohmann::json> all;
    for (const int name : names) {
      store->wait({key(name)}, timeout);
      const std::vector<uint8_t> found = store->get(key(name));
      all.push_back(nlohmann::json::parse(found.begin(), found.end()));
    }
    ++exchange;
    return all;
  });
  return c10::make_intrusive<detail::SharedBackend>(rank, size, std::move(queues[0]));
}

} // namespace hasten
