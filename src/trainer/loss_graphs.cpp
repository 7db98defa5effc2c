#include "loss_graphs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <unordered_set>
#include <utility>

#include "core/cuda_library.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/core/autocast.h"
#include "hasten/core/device.h"
#include "hasten/core/named_tensors.h"
#include "hasten/core/side_stream.h"
#if __has_include(<ATen/core/GraphImplInterface.h>) // not in older releases
#include <ATen/core/GraphImplInterface.h>
#define HASTEN_HAS_GRAPHS 1
#endif

namespace hasten::detail {

constexpr const char* kGraphsWhere = "trainer::cuda_graphs";

#ifdef HASTEN_HAS_GRAPHS

// Batches of a shape that run before it is captured. Libraries choose and load kernels in them, and
// the window's scale settles.
constexpr int64_t kBatchesBefore = 3;
constexpr size_t kMostGraphs = 8; // shapes

using Graph = at::GraphImplInterface;

/// A parameter or buffer, as the graphs use it.
struct CapturedTensor {
  explicit CapturedTensor(const at::Tensor& tensor)
      : tensor(tensor),
        before(tensor.detach()),
        data(tensor.const_data_ptr()),
        trained(tensor.requires_grad()) {}
  bool unchanged() const {
    return tensor.const_data_ptr() == data && tensor.requires_grad() == trained &&
           tensor.scalar_type() == before.scalar_type() && tensor.sizes() == before.sizes() &&
           tensor.strides() == before.strides();
  }
  at::Tensor tensor;
  at::Tensor before; // keeps the memory, which no other tensor then has
  const void* data;
  bool trained;
};

struct CapturedLoss {
  std::vector<CapturedTensor> tensors{};
  std::vector<at::Tensor> trained{}; // the parameters that require a gradient
  Batch batch{}; // the graph reads it
  std::unique_ptr<Graph> forward{}, backward{};
  // The graphs write them. They are not freed, so that no other graph of the pool does.
  LossOutput output{};
  std::vector<at::Tensor> gradients{}; // of `trained`; undefined: not used
  at::Tensor seed{}; // the gradient of loss_sum, which backward reads
};

static std::vector<at::Tensor> tensors_of(const Batch& batch) {
  return mapped(batch.tensors, [](const auto& named) { return named.second; });
}

static std::string shape_of(const Batch& batch) {
  std::string shape = batch.padded ? "padded" : "";
  for (const auto& [name, tensor] : batch.tensors) {
    shape += c10::str(" ", name, tensor.sizes(), tensor.scalar_type());
  }
  return shape;
}

/// The weight follows from the batch's shape, or it is a tensor, which each replay writes.
static LossOutput checked(LossOutput output, const Batch& batch) {
  const DeviceScalar& weight = output.weight;
  if (!weight.tensor().defined() && weight != static_cast<double>(batch.rows()) &&
      std::ranges::none_of(batch.tensors, [&](const auto& named) {
        return weight == static_cast<double>(named.second.numel());
      })) {
    throw InputError(
        kGraphsWhere,
        c10::str("the loss function's weight is a number of the host: weight=", weight.item(),
                 " for ", batch.rows(), " samples"),
        "the number of samples or of a tensor's elements, or a DeviceScalar, which each step computes",
        "return weight = DeviceScalar(count) for a count on the device, or leave cuda_graphs out");
  }
  return output;
}

// Backward of a captured loss. Parameters get copies of the graph's gradients, because the next
// replay overwrites these. Autograd calls the hook of accumulated gradients also for one that was added
// here, and returned undefined.
class ReplayNode final : public torch::autograd::Node {
 public:
  explicit ReplayNode(std::shared_ptr<CapturedLoss> of) : of_(std::move(of)) {}
  std::string name() const override { return "hasten::ReplayNode"; }
  void release_variables() override { of_.reset(); }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    torch::autograd::variable_list made(of_->trained.size());
    if (!gradients[0].defined()) {
      return made;
    }
    const at::NoGradGuard no_grad;
    of_->seed.copy_(gradients[0]);
    of_->backward->replay();
    std::vector<at::Tensor> sums, fresh, from, from_fresh;
    for (size_t i = 0; i < made.size(); ++i) {
      const at::Tensor& gradient = of_->gradients[i];
      if (!gradient.defined()) {
        continue;
      }
      at::Tensor& sum = of_->trained[i].mutable_grad();
      if (sum.defined() && sum.layout() == at::kStrided &&
          sum.scalar_type() == gradient.scalar_type() &&
          torch::autograd::impl::hooks(of_->trained[i]).empty()) { // one launch for all
        sums.push_back(sum);
        from.push_back(gradient);
      } else {
        made[i] = at::empty_like(gradient);
        fresh.push_back(made[i]);
        from_fresh.push_back(gradient);
      }
    }
    if (!sums.empty()) {
      at::_foreach_add_(sums, from);
    }
    if (!fresh.empty()) {
      at::_foreach_copy_(fresh, from_fresh);
    }
    return made;
  }

 private:
  std::shared_ptr<CapturedLoss> of_;
};

/// Runs `work` on the side stream, which records it. Nothing is computed. Autograd runs the backward of
/// a node on its forward's stream, so both take the same one.
static std::unique_ptr<Graph> captured(const SideStream& side, at::MempoolId_t pool,
                                       const std::function<void()>& work) {
  std::unique_ptr<Graph> graph = at::create_graph_impl(side.stream().device_type());
  std::exception_ptr failure;
  side.follow();
  {
    const c10::StreamGuard here(side.stream());
    // Other threads may go on to copy batches.
    graph->capture_begin(pool, at::GraphCaptureMode::ThreadLocal);
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
    }
    try {
      graph->capture_end();
    } catch (const c10::Error&) { // as after any failure
      failure = failure ? failure : std::current_exception();
    }
  }
  side.join();
  if (failure) {
    std::rethrow_exception(failure);
  }
  return graph;
}

static LossOutput replay(const std::shared_ptr<CapturedLoss>& of, const Batch& batch) {
  {
    const at::NoGradGuard no_grad;
    at::_foreach_copy_(tensors_of(of->batch), tensors_of(batch));
  }
  of->forward->replay();
  LossOutput output = of->output;
  output.weight = output.weight.again();
  output.loss_sum = output.loss_sum.detach();
  // An intrusive_ptr since LibTorch 2.13, a shared_ptr before.
  const decltype(torch::autograd::Edge::function) node(std::make_unique<ReplayNode>(of));
  node->set_next_edges(torch::autograd::collect_next_edges(of->trained));
  torch::autograd::set_history(output.loss_sum, node);
  return output;
}

LossGraphs::LossGraphs(LossFunction loss, std::shared_ptr<torch::nn::Module> model,
                       const at::Device& device)
    : loss_(std::move(loss)), model_(std::move(model)), device_(device) {
  std::string why;
  if (device.is_cuda() && !at::has_graph_impl(device.type())) {
    // The library of src/cuda/cuda_graph.cpp registers them.
    open_library_beside(&kGraphsWhere, "libhasten_cuda_graph.so", why);
  }
  if (!at::has_graph_impl(device.type())) {
    throw InputError(
        kGraphsWhere, "cuda_graphs=true on " + device.str() + (why.empty() ? "" : ": " + why),
        "a device for which graphs are registered with LibTorch", "leave cuda_graphs out");
  }
}

LossGraphs::~LossGraphs() {
  if (!graphs_.empty()) {
    synchronize(device_); // a replay may still use their memory
  }
}

LossOutput LossGraphs::operator()(const Batch& batch) {
  const std::string shape = shape_of(batch);
  const auto found = graphs_.find(shape);
  if (found != graphs_.end() &&
      std::ranges::all_of(found->second->tensors, &CapturedTensor::unchanged)) {
    return replay(found->second, batch);
  }
  if (found != graphs_.end()) { // tensors of the model were replaced or frozen
    synchronize(device_);
    graphs_.clear();
    seen_.clear();
  }
  if (++seen_[shape] <= kBatchesBefore || graphs_.size() == kMostGraphs) {
    return checked(loss_(batch), batch);
  }
  return replay(graphs_[shape] = capture(batch), batch);
}

std::shared_ptr<CapturedLoss> LossGraphs::capture(const Batch& batch) {
  auto made = std::make_shared<CapturedLoss>();
  std::unordered_set<const void*> seen; // a shared parameter may have several names
  std::vector<at::Tensor> tensors = model_->parameters();
  const std::vector<at::Tensor> buffers = model_->buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) {
      made->tensors.emplace_back(tensor);
      if (tensor.requires_grad()) {
        made->trained.push_back(tensor);
      }
    }
  }
  made->batch = batch;
  clone_tensors(made->batch.tensors);
  at::MempoolId_t pool =
      graphs_.empty() ? at::MempoolId_t{0, 0} : graphs_.begin()->second->forward->pool();
  synchronize(device_);
  const SideStream side(device_);
  try {
    drop_autocast_casts(); // casts from before are no part of the graph
    made->forward =
        captured(side, pool, [&] { made->output = checked(loss_(made->batch), batch); });
    made->seed = at::empty_like(made->output.loss_sum, at::TensorOptions().requires_grad(false));
    const Autocast off({.device = device_.type(), .enabled = false});
    made->backward = captured(side, made->forward->pool(), [&] {
      // Each step calls their hooks, not the capture.
      std::vector<std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>> hooks;
      for (const at::Tensor& parameter : made->trained) {
        hooks.push_back(std::exchange(torch::autograd::impl::hooks(parameter), {}));
      }
      made->gradients = torch::autograd::grad({made->output.loss_sum}, made->trained, {made->seed},
                                              /*retain_graph=*/false, /*create_graph=*/false,
                                              /*allow_unused=*/true);
      for (size_t i = 0; i < hooks.size(); ++i) {
        torch::autograd::impl::hooks(made->trained[i]) = std::move(hooks[i]);
      }
    });
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw InputError(kGraphsWhere,
                     "the loss function cannot be captured: " + text.substr(0, text.find('\n')),
                     "operators of the device only: no value that the host reads, and no tensor of "
                     "the CPU",
                     "leave cuda_graphs out");
  }
  drop_autocast_casts(); // those of the graph are no values
  made->output.loss_sum = made->output.loss_sum.detach();
  if (made->output.outputs.defined()) {
    made->output.outputs = made->output.outputs.detach();
  }
  return made;
}

#else // HASTEN_HAS_GRAPHS

struct CapturedLoss {};

LossGraphs::LossGraphs(LossFunction loss, std::shared_ptr<torch::nn::Module> model,
                       const at::Device& device)
    : loss_(std::move(loss)), model_(std::move(model)), device_(device) {
  throw InputError(kGraphsWhere, "cuda_graphs=true with this LibTorch",
                   "a newer one, with at::accelerator::Graph", "leave cuda_graphs out");
}
LossGraphs::~LossGraphs() = default;
LossOutput LossGraphs::operator()(const Batch& batch) { return loss_(batch); }

#endif

} // namespace hasten::detail
