// A group's operations on tensors. Each is checked on this rank, compared between ranks if it is
// new to the group, and passed to Gloo.
#include <ATen/ATen.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "backend_call.h"
#include "gloo_group.h"
#include "tensor_checks.h"

namespace hasten::detail {

Work GlooGroup::submit(std::string operation, const std::string& tensors, const Start& start,
                       std::function<void()> finish) {
  const uint64_t sequence = core_->enter_equal(operation, tensors);
  const c10::intrusive_ptr<c10d::Backend> gloo = core_->connections();
  auto state = std::make_shared<GroupCore::Started>(core_, std::move(operation), sequence,
                                                    std::move(finish));
  try {
    // c10d's own timed wait throws whenever its time ends.
    start(*gloo)->getFuture()->addCallback([state](c10::ivalue::Future& f) {
      try {
        f.hasError() ? std::rethrow_exception(f.exception_ptr()) : state->complete(std::nullopt);
      } catch (...) {
        state->complete(current_failure());
      }
    });
  } catch (...) {
    state->complete(current_failure());
  }
  return Work(std::move(state));
}

/// Gloo moves host memory only, so the tensors of another device go through copies there.
Work GlooGroup::start_staged(const Collective& what) {
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
  return continued(start(staged),
                   [to = writes ? what.output.detach() : at::Tensor(), from = staged.output] {
                     if (to.defined()) {
                       to.copy_(from);
                     }
                   });
}

Work GlooGroup::start(const Collective& what) {
  using Kind = Collective::Kind;
  check_collective(what, rank(), world_size());
  if (what.kind == Kind::reduce_scatter) {
    return reduce_scatter_by_all_to_all(what);
  }
  if (!what.shared().is_cpu()) {
    return start_staged(what);
  }
  BackendCall call(what, rank(), world_size(), true);
  return submit(
      operation_label(what.kind_name(), what.name), collective_text(what),
      [&](c10d::Backend& gloo) { return call.start(gloo); }, call.finish);
}

void GlooGroup::barrier(std::string_view name) {
  std::vector<at::Tensor> token{at::ones({1}, at::kInt)};
  submit(operation_label("barrier", name), "", [&](c10d::Backend& gloo) {
    return gloo.allreduce(token, {});
  }).wait();
}

std::vector<nlohmann::json> GlooGroup::exchange(std::string_view operation, std::string_view name,
                                                const nlohmann::json& value) {
  const std::string label = operation_label(operation, name);
  return core_->exchange(label, core_->enter(label), value);
}

at::Tensor GlooGroup::all_gather_rows(const at::Tensor& rows, std::string_view name) {
  return gather_rows(*this, *core_, rows, name);
}

} // namespace hasten::detail
