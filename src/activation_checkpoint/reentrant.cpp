// Reentrant checkpoint, for processes with another autograd engine: forward runs without gradient;
// backward runs it again and calls backward inside backward.
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <mutex>

#include "hasten/base/log.h"
#include "hasten/core/recompute.h"
#include "op_replay.h"
#include "region.h"

namespace hasten::detail {

// What backward needs in addition to the saved tensors.
struct ReentrantCall : torch::CustomClassHolder {
  RegionForward forward{};
  ForwardState state{};
  std::vector<bool> derived{}; // whether each input requires a gradient
  OncePlace once{};
};

class ReentrantRegion : public torch::autograd::Function<ReentrantRegion> {
 public:
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  // `anchor` requires a gradient, so that there is a node even if no input does.
  static Tensors forward(Context* context, const at::Tensor& anchor, at::TensorList inputs,
                         const c10::intrusive_ptr<ReentrantCall>& call) {
    static_cast<void>(anchor);
    context->save_for_backward(inputs.vec());
    context->saved_data["call"] = c10::IValue::make_capsule(call); // lives as long as the node
    std::optional<OnceScope> once;
    if (!once_place().store) {
      once.emplace(call->once);
    }
    return call->forward(inputs.vec());
  }

  static Tensors backward(Context* context, Tensors gradients) {
    // Its backward inside backward makes no graph.
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid() ||
        at::GradMode::is_enabled()) {
      throw CheckpointError(
          "activation_checkpoint::reentrant",
          "autograd::grad or backward with inputs= or create_graph through a region",
          "a backward() without them, because another autograd engine "
          "is installed in this process and regions are reentrant",
          "call backward() without them, or leave activation checkpointing off");
    }
    auto call =
        c10::static_intrusive_pointer_cast<ReentrantCall>(context->saved_data["call"].toCapsule());
    const Tensors saved = context->get_saved_variables();
    Tensors inputs;
    for (size_t i = 0; i < saved.size(); ++i) {
      at::Tensor input = saved[i];
      if (input.defined()) {
        input = input.detach();
        input.set_requires_grad(call->derived[i]);
      }
      inputs.push_back(std::move(input));
    }
    Tensors outputs;
    {
      const RecomputeScope scope(call->state, call->once);
      OpReplayer writes;
      const OpScope ops(&writes);
      outputs = call->forward(inputs);
    }
    Tensors roots;
    Tensors seeds;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].defined() && outputs[i].requires_grad() && gradients[i].defined()) {
        roots.push_back(outputs[i]);
        seeds.push_back(gradients[i]);
      }
    }
    torch::autograd::backward(roots, seeds);
    Tensors result{at::Tensor()}; // gradient of the anchor
    for (const at::Tensor& input : inputs) {
      result.push_back(input.defined() ? input.grad() : at::Tensor());
    }
    result.emplace_back(); // gradient of the call
    return result;
  }
};

std::vector<at::Tensor> run_reentrant(RegionForward forward, std::vector<at::Tensor> inputs,
                                      const ActivationCheckpointOptions& options) {
  static std::once_flag once;
  std::call_once(once, [] {
    log_warning(
        "activation_checkpoint: another autograd engine (a Python "
        "interpreter's) is installed in this process, so regions are "
        "reentrant: no autograd::grad and no gradients of gradients through "
        "them, and no early stop");
  });
  auto call = c10::make_intrusive<ReentrantCall>();
  call->state = ForwardState::now(inputs, options.preserve_rng_state);
  for (const at::Tensor& input : inputs) {
    call->derived.push_back(input.defined() && input.requires_grad());
  }
  call->forward = std::move(forward);
  call->once = OncePlace::now_or_new();
  at::Tensor anchor = at::ones({});
  anchor.set_requires_grad(true);
  return ReentrantRegion::apply(anchor, at::TensorList(inputs), call);
}

} // namespace hasten::detail
