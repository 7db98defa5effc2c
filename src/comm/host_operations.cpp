// A group's operations on tensors. Each is checked on this rank, compared between ranks if it is
// new to the group, and passed to the back end.
#include <ATen/ATen.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "hasten/base/text.h"
#include "hasten/comm/few_sizes.h"
#include "host_group.h"
#include "shared_backend.h"

namespace hasten::detail {

static void complete(GroupCore::Started& state, const std::exception_ptr& error) {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
    state.complete(std::nullopt);
  } catch (const RanksDiffer& differ) {
    state.complete(OperationFailure{differ.what(), ErrorKind::other, true});
  } catch (...) {
    state.complete(current_failure());
  }
}

/// Lets the threads that wait for `state` move the work on.
static void follow(const std::shared_ptr<GroupCore::Started>& state,
                   const c10::intrusive_ptr<c10d::Work>& work) {
  auto own = c10::static_intrusive_pointer_cast<SharedWork>(work);
  state->drive = [own](std::chrono::milliseconds limit) { own->drive(limit); };
  own->on_end([state](const std::exception_ptr& error) { complete(*state, error); });
}

Work HostGroup::submit(std::string operation, const std::string& tensors, BackendCall call) {
  const c10::intrusive_ptr<SharedBackend> shared_backend = shared();
  // Ranks that share memory compare every operation there.
  const uint64_t sequence =
      shared_backend ? core_->enter(operation, tensors) : core_->enter_equal(operation, tensors);
  const std::shared_ptr<Backend> backend = backend_.lock();
  std::string text = operation + '\n' + tensors;
  auto state = std::make_shared<GroupCore::Started>(core_, std::move(operation), sequence);
  try {
    if (shared_backend) {
      shared_backend->name_next(std::move(text));
      follow(state, call.start(*shared_backend));
    } else {
      // c10d's own timed wait throws whenever its time ends.
      call.start(**backend)->getFuture()->addCallback([state](c10::ivalue::Future& f) {
        complete(*state, f.hasError() ? f.exception_ptr() : nullptr);
      });
    }
  } catch (...) {
    state->complete(current_failure());
  }
  Work work(std::move(state));
  return call.finish ? joined_work({std::move(work)}, std::move(call.finish)) : work;
}

/// The back ends move host memory only, so the tensors of another device go through copies there.
Work HostGroup::start_staged(const Collective& what) {
  using Kind = Collective::Kind;
  const bool root = what.root == rank();
  const bool reduces = what.kind == Kind::all_reduce || what.kind == Kind::reduce;
  const bool reads = reduces || (what.kind == Kind::broadcast && root); // the output
  const bool writes = what.kind == Kind::broadcast                             ? !root
                      : what.kind == Kind::reduce || what.kind == Kind::gather ? root
                                                                               : true;
  Collective staged = what;
  staged.output = reads    ? what.output.detach().cpu()
                  : writes ? at::empty_like(what.output, at::kCPU)
                           : at::Tensor();
  staged.input = what.input.defined() && (root || what.kind != Kind::scatter)
                     ? what.input.detach().cpu()
                     : at::Tensor();
  const Work work = start(staged);
  return writes ? joined_work({work},
                              [to = what.output.detach(), from = staged.output] { to.copy_(from); })
                : work;
}

Work HostGroup::start(const Collective& what) {
  using Kind = Collective::Kind;
  check_collective(what, rank(), world_size());
  const bool shared_memory = shared() != nullptr;
  if (what.kind == Kind::reduce_scatter && !shared_memory) {
    return reduce_scatter_by_all_to_all(what);
  }
  if (!what.shared().is_cpu()) {
    return start_staged(what);
  }
  return submit(operation_label(what.kind_name(), what.name), collective_text(what),
                {what, rank(), world_size(), /*sums_narrow=*/shared_memory,
                 /*averages=*/shared_memory});
}

at::Tensor HostGroup::allocate_tensor(int64_t numel, const at::TensorOptions& options) {
  return shared() ? shared_zeros(numel, options) : at::zeros({numel}, options);
}

void HostGroup::barrier(std::string_view name) {
  const Collective token{Collective::Kind::all_reduce, name, at::ones({1}, at::kInt)};
  submit(operation_label("barrier", name), "", {token, rank(), world_size()}).wait();
}

std::vector<nlohmann::json> HostGroup::exchange(std::string_view operation, std::string_view name,
                                                const nlohmann::json& value) {
  const std::string label = operation_label(operation, name);
  const uint64_t sequence = core_->enter(label);
  const c10::intrusive_ptr<SharedBackend> backend = shared();
  if (!backend) {
    return core_->exchange(label, sequence, value);
  }
  const WaitTime time;
  // CBOR, since JSON text has no NaN and no infinity.
  const auto texts = std::make_shared<std::vector<std::string>>(static_cast<size_t>(world_size()));
  nlohmann::json::to_cbor(value, (*texts)[static_cast<size_t>(rank())]);
  auto state = std::make_shared<GroupCore::Started>(core_, label, sequence);
  backend->name_next(label);
  follow(state, backend->exchange(texts));
  state->wait();
  return mapped(*texts, [](const std::string& text) { return nlohmann::json::from_cbor(text); });
}

// The numbers of rows go through the host.
at::Tensor HostGroup::all_gather_rows(const at::Tensor& rows, std::string_view name) {
  check_rows(rows);
  // The number of rows and a hash of their form in one small tensor, without the store.
  const std::string row_text = "rows of " + tensor_text(rows, 1);
  const auto form = static_cast<int64_t>(std::hash<std::string>{}(row_text));
  const at::Tensor own = at::tensor({rows.size(0), form}, at::kLong);
  const at::Tensor all = at::empty({world_size(), 2}, at::kLong);
  all_gather_async(all, own, std::string(name) + ", rows").wait();
  if (!all.select(1, 1).eq(form).all().item<bool>()) {
    const std::string operation = operation_label("all_gather_rows", name);
    core_->check_equal(operation, core_->enter(operation), row_text);
  }
  const at::Tensor counts = all.select(1, 0); // [rank]
  const int64_t longest = few_sizes(counts.max().item<int64_t>());
  at::Tensor padded = rows.detach();
  if (rows.size(0) < longest) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes[0] = longest;
    padded = at::zeros(sizes, rows.options());
    padded.narrow(0, 0, rows.size(0)).copy_(rows.detach());
  }
  std::vector<int64_t> sizes = padded.sizes().vec();
  sizes.insert(sizes.begin(), world_size());
  const at::Tensor gathered = at::empty(sizes, padded.options());
  all_gather_async(gathered, padded, name).wait();
  std::vector<at::Tensor> parts;
  for (int i = 0; i < world_size(); ++i) {
    parts.push_back(gathered[i].narrow(0, 0, counts[i].item<int64_t>()));
  }
  return at::cat(parts);
}

} // namespace hasten::detail
