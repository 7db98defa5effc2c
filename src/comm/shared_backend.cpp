#include "shared_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "backend_call.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/comm/shared_memory_backend.h"
#include "reduce_rows.h"
#include "tensor_checks.h"

namespace hasten::detail {

using std::chrono::milliseconds;
using Kind = Collective::Kind;

/// Throws the reason of the first rank that has one.
static void throw_reason(const std::vector<nlohmann::json>& all, const std::vector<int>& names) {
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].is_string()) {
      throw Error("comm::share_memory",
                  "rank " + std::to_string(names[i]) + ": " + all[i].get<std::string>());
    }
  }
}

/// What `make` returns, or the text of its exception.
template <typename Make>
nlohmann::json or_reason(const Make& make) {
  try {
    return make();
  } catch (const Error& error) {
    return std::string(error.text());
  } catch (const c10::Error& error) { // over a MemoryLimit
    return std::string(error.what_without_backtrace());
  }
}

std::shared_ptr<SharedRanks> share_memory(int rank, const std::vector<int>& names,
                                          const ExchangeJson& exchange) {
  std::unique_ptr<SharedMemory> own;
  const std::vector<nlohmann::json> addresses = exchange(or_reason([&]() -> nlohmann::json {
    own = std::make_unique<SharedMemory>(Stages::kBytes);
    return own->address();
  }));
  throw_reason(addresses, names);
  std::vector<std::unique_ptr<SharedMemory>> all;
  throw_reason(
      exchange(or_reason([&]() -> nlohmann::json {
        for (const nlohmann::json& address : addresses) {
          all.push_back(std::cmp_equal(all.size(), rank)
                            ? std::move(own)
                            : std::make_unique<SharedMemory>(address.get<SharedMemoryAddress>()));
        }
        return true;
      })),
      names);
  all[static_cast<size_t>(rank)]->hide();
  return std::make_shared<SharedRanks>(std::move(all), rank, names);
}

SharedBackend::SharedBackend(int rank, int size, std::shared_ptr<SharedRanks> ranks)
    : Backend(rank, size), ranks_(std::move(ranks)) {}

SharedBackend::~SharedBackend() { ranks_->queue.stop(); }

static ReduceOp reduce_op(const c10d::ReduceOp& op) {
  for (const ReduceOp ours :
       {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX, ReduceOp::MIN, ReduceOp::PRODUCT}) {
    if (op == c10d_op(ours)) {
      return ours;
    }
  }
  throw InputError("comm::shm", "the reduction is not one of SUM, AVG, MIN, MAX and PRODUCT");
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

TransferArguments SharedBackend::arguments(Kind kind, const Tensors& tensors, int64_t root,
                                           const c10d::ReduceOp& op) const {
  if (tensors.size() != 1) {
    throw InputError("comm::" + std::string(Collective{kind}.kind_name()),
                     "tensors=" + std::to_string(tensors.size()), "one tensor");
  }
  check_root("shm", root, getSize());
  return {.kind = kind, .op = reduce_op(op), .root = static_cast<int>(root)};
}

/// Much data is read where it is, if all ranks have it in shared memory.
void SharedBackend::find_places(TransferArguments& arguments) const {
  const bool scatters = arguments.kind == Kind::reduce_scatter;
  const size_t row = arguments.count * c10::elementSize(arguments.from);
  if ((arguments.kind != Kind::all_reduce && arguments.kind != Kind::all_gather && !scatters) ||
      row * (scatters ? static_cast<size_t>(getSize()) : 1) < kLeastShared) {
    return;
  }
  arguments.places = &ranks_->places;
  for (size_t i = 1; i < arguments.inputs.size(); ++i) {
    if (arguments.inputs[i] != arguments.inputs[0] + i * row) { // rows of several tensors
      return;
    }
  }
  arguments.place = find_shared(arguments.inputs[0]);
}

C10dWork SharedBackend::start(TransferArguments arguments, const Tensors& inputs,
                              const Tensors& outputs, milliseconds timeout) {
  const std::string_view kind = Collective{arguments.kind}.kind_name();
  check_alike(kind, inputs);
  check_alike(kind, outputs);
  const bool reduces = arguments.kind == Kind::all_reduce || arguments.kind == Kind::reduce ||
                       arguments.kind == Kind::reduce_scatter;
  const at::Tensor& one = inputs.empty() ? outputs[0] : inputs[0];
  const at::Tensor& result = outputs.empty() ? inputs[0] : outputs[0];
  const bool floats = at::isFloatingType(one.scalar_type());
  if (one.numel() != result.numel() ||
      (one.scalar_type() != result.scalar_type() &&
       !(arguments.kind == Kind::reduce_scatter && floats &&
         at::isFloatingType(result.scalar_type()))) ||
      (reduces && (!is_reducible(one.scalar_type()) || !is_reducible(result.scalar_type()) ||
                   (arguments.op == ReduceOp::AVG && !floats)))) {
    throw InputError("comm::" + std::string(kind),
                     "output is " + tensor_text(result) + " for an input " + tensor_text(one),
                     "as many elements of a dtype that can be reduced");
  }
  arguments.count = static_cast<size_t>(one.numel());
  if (reduces) {
    arguments.from = one.scalar_type();
    arguments.to = result.scalar_type();
  } else { // moves bytes
    arguments.count *= one.element_size();
  }
  const auto begin = [](const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); };
  const auto begins = mapped(inputs, begin);
  arguments.inputs.assign(begins.begin(), begins.end());
  arguments.outputs = mapped(outputs, begin);
  find_places(arguments);
  arguments.text = std::exchange(next_text_, {});
  if (arguments.text.empty()) {
    const std::string reduction = reduces ? " " + std::string(reduce_op_name(arguments.op)) : "";
    arguments.text = std::string(kind) + reduction + " of " + tensor_text(one) + ", root " +
                     std::to_string(arguments.root);
  }
  return c10::make_intrusive<SharedWork>(getRank(), getSize(), ranks_, std::move(arguments), inputs,
                                         outputs, timeout);
}

/// The rows of a tensor that has one for each rank.
SharedBackend::Tensors SharedBackend::rows(const at::Tensor& all) const {
  if (!all.is_contiguous() || all.numel() % getSize() != 0) {
    throw InputError(
        "comm::shm", "tensor is " + tensor_text(all),
        "a contiguous tensor with one row for each of " + std::to_string(getSize()) + " ranks");
  }
  return all.detach().view({getSize(), all.numel() / getSize()}).unbind(0);
}

C10dWork SharedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return start(arguments(Kind::all_reduce, tensors, 0, options.reduceOp), tensors, tensors,
               options.timeout);
}

// Transfers end in their order, so the last one's end is that of all.
C10dWork SharedBackend::allreduce_coalesced(Tensors& tensors,
                                            const c10d::AllreduceCoalescedOptions& options) {
  C10dWork last;
  for (const at::Tensor& tensor : tensors) {
    Tensors one{tensor};
    last = allreduce(one, options);
  }
  return last;
}

C10dWork SharedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return start(arguments(Kind::reduce, tensors, options.rootRank, options.reduceOp), tensors,
               options.rootRank == getRank() ? tensors : Tensors(), options.timeout);
}

C10dWork SharedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const bool root = options.rootRank == getRank();
  return start(arguments(Kind::broadcast, tensors, options.rootRank), root ? tensors : Tensors(),
               root ? Tensors() : tensors, options.timeout);
}

C10dWork SharedBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& options) {
  return start(arguments(Kind::all_gather, inputs), inputs, outputs.at(0), options.timeout);
}

C10dWork SharedBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                        const c10d::AllgatherOptions& options) {
  return start({.kind = Kind::all_gather}, {input}, rows(output), options.timeout);
}

C10dWork SharedBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  C10dWork last;
  for (size_t i = 0; i < inputs.size(); ++i) {
    last = _allgather_base(outputs.at(i), inputs[i], options);
  }
  return last;
}

C10dWork SharedBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                               const c10d::GatherOptions& options) {
  return start(arguments(Kind::gather, inputs, options.rootRank), inputs,
               options.rootRank == getRank() ? outputs.at(0) : Tensors(), options.timeout);
}

C10dWork SharedBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ScatterOptions& options) {
  return start(arguments(Kind::scatter, outputs, options.rootRank),
               options.rootRank == getRank() ? inputs.at(0) : Tensors(), outputs, options.timeout);
}

C10dWork SharedBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const c10d::ReduceScatterOptions& options) {
  return start(arguments(Kind::reduce_scatter, outputs, 0, options.reduceOp), inputs.at(0), outputs,
               options.timeout);
}

C10dWork SharedBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  std::vector<Tensors> inputs{rows(input)};
  return reduce_scatter(outputs, inputs, options);
}

C10dWork SharedBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::ReduceScatterOptions& options) {
  C10dWork last;
  for (size_t i = 0; i < inputs.size(); ++i) {
    last = _reduce_scatter_base(outputs.at(i), inputs[i], options);
  }
  return last;
}

C10dWork SharedBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                      std::vector<int64_t>& output_splits,
                                      std::vector<int64_t>& input_splits,
                                      const c10d::AllToAllOptions& options) {
  const auto uneven = [](const std::vector<int64_t>& splits) {
    return std::ranges::any_of(splits, [&](int64_t size) { return size != splits[0]; });
  };
  if (uneven(output_splits) || uneven(input_splits)) {
    throw InputError("comm::all_to_all", "the splits are not equal", "equal splits");
  }
  return start({.kind = Kind::all_to_all}, rows(input), rows(output), options.timeout);
}

C10dWork SharedBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                 const c10d::AllToAllOptions& options) {
  return start({.kind = Kind::all_to_all}, inputs, outputs, options.timeout);
}

C10dWork SharedBackend::barrier(const c10d::BarrierOptions& options) {
  TransferArguments made{.kind = Kind::all_gather, .text = std::exchange(next_text_, {})};
  made.text = made.text.empty() ? "barrier" : made.text;
  return c10::make_intrusive<SharedWork>(getRank(), getSize(), ranks_, std::move(made), Tensors(),
                                         Tensors(), options.timeout);
}

C10dWork SharedBackend::exchange(std::shared_ptr<std::vector<std::string>> values) {
  TransferArguments made{
      .kind = Kind::all_gather, .text = std::exchange(next_text_, {}), .values = std::move(values)};
  return c10::make_intrusive<SharedWork>(getRank(), getSize(), ranks_, std::move(made), Tensors(),
                                         Tensors(), kNoTimeout);
}

SharedWork::SharedWork(int rank, int size, std::shared_ptr<SharedRanks> ranks,
                       TransferArguments arguments, Tensors inputs, Tensors outputs,
                       milliseconds timeout)
    : Work(rank),
      ranks_(std::move(ranks)),
      outputs_(std::move(outputs)),
      timeout_(timeout),
      item_(std::make_shared<TransferQueue::Item>(std::move(arguments), rank, size)) {
  item_->on_end([inputs = std::move(inputs), outputs = outputs_](const std::exception_ptr&) {
    // Keeps the tensors until then.
  });
  ranks_->queue.start(item_);
}

bool SharedWork::isCompleted() {
  drive(milliseconds(0));
  return item_->outcome().has_value();
}

bool SharedWork::wait(milliseconds timeout) {
  const milliseconds limit = timeout != kNoTimeout ? timeout : timeout_;
  const auto start = std::chrono::steady_clock::now();
  while (!item_->has_ended()) {
    drive(milliseconds(50));
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

c10::intrusive_ptr<c10::ivalue::Future> SharedWork::getFuture() {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  on_end([future, outputs = outputs_](const std::exception_ptr& error) {
    if (error) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(outputs));
    }
  });
  ranks_->queue.progress_in_thread(); // its callbacks come without anybody who waits
  return future;
}

} // namespace hasten::detail

namespace hasten {

c10::intrusive_ptr<c10d::Backend> make_shared_memory_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout) {
  std::vector<int> names(static_cast<size_t>(size));
  std::iota(names.begin(), names.end(), 0);
  int exchange = 0;
  auto ranks = detail::share_memory(rank, names, [&](const nlohmann::json& own) {
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
  return c10::make_intrusive<detail::SharedBackend>(rank, size, std::move(ranks));
}

} // namespace hasten
