#include "region.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <unordered_set>

#include "hasten/core/named_tensors.h"

namespace hasten::detail {

SavedShape SavedShape::of(const at::Tensor& tensor) {
  return {at::DimVector(tensor.sizes()), tensor.scalar_type(), tensor.device()};
}

std::string SavedShape::text() const {
  std::ostringstream text;
  text << at::IntArrayRef(sizes) << " " << dtype << " " << device;
  return text.str();
}

constexpr int64_t kSampled = 4; // elements of a parameter; an optimizer step changes all

static Unchanged unchanged_now(const at::Tensor& tensor, bool parameter) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return {parameter ? tensor : at::Tensor(),           counter,        counter.current_version(),
          parameter ? sample_of(tensor, kSampled) : 0, tensor.numel(), tensor.scalar_type()};
}

bool Unchanged::holds() const {
  const bool compared =
      tensor.defined() && tensor.numel() == numel && tensor.scalar_type() == dtype;
  return !counter.enabled() || (counter.current_version() == version &&
                                (!compared || sample_of(tensor, kSampled) == sample));
}

ForwardState ForwardState::now(const std::vector<at::Tensor>& inputs, bool preserve_rng_state) {
  ForwardState state;
  if (preserve_rng_state) {
    std::vector<at::Device> devices;
    for (const at::Tensor& input : inputs) {
      if (input.defined() && !input.is_meta()) {
        devices.push_back(input.device());
      }
    }
    state.random = generator_states(devices);
  }
  state.autocast = AutocastState::now(inputs);
  return state;
}

void ForwardState::restore() const {
  set_generator_states(random);
  autocast.restore();
}

RecomputeScope::RecomputeScope(const ForwardState& forward, const OncePlace& once)
    : random_(forward.random),
      autocast_before_(forward.autocast.again()),
      casts_(forward.autocast.enabled()),
      once_(OncePlace{once.store, once.next, true}) {
  forward.autocast.restore();
  drop_casts();
}

RecomputeScope::~RecomputeScope() {
  drop_casts();
  autocast_before_.restore();
}

// A cast weight from outside belongs to another graph.
void RecomputeScope::drop_casts() const {
  if (casts_) {
    drop_autocast_casts();
  }
}

// Hooks of a tensor that a region's forward saves: the tensor is not kept.
class ForwardHook final : public torch::autograd::SavedVariableHooks {
 public:
  explicit ForwardHook(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  ~ForwardHook() override {
    if (packed_) {
      region_->drop_saved(index_);
    }
  }
  void call_pack_hook(const at::Tensor& tensor) override {
    index_ = region_->add_saved(tensor);
    packed_ = true;
  }
  at::Tensor call_unpack_hook() override { return region_->unpack(index_); }

 private:
  std::shared_ptr<Region> region_;
  size_t index_ = 0;
  bool packed_ = false;
};

// Hooks of a tensor that a recomputation saves. The tensor goes to the region, and stays here for
// code that runs backward inside the region.
class Region::RecomputeHook final : public torch::autograd::SavedVariableHooks {
 public:
  RecomputeHook(Region& region, Recomputed& pass) : region_(region), pass_(pass) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    kept_ = tensor.tensor_data();
    region_.resave(pass_, kept_);
  }
  at::Tensor call_unpack_hook() override { return kept_; }

 private:
  // Only used while packing; the recomputation lives longer.
  Region& region_;
  Recomputed& pass_;
  at::Tensor kept_{};
};

class Region::RecomputeFactory final : public SavedHookFactory {
 public:
  RecomputeFactory(Region& region, Recomputed& pass) : region_(region), pass_(pass) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<RecomputeHook>(region_, pass_);
  }
  void between_operators() override { pass_.stop.look(); }
  bool recomputes() const override { return true; }

 private:
  Region& region_;
  Recomputed& pass_;
};

Region::Region(ActivationCheckpointOptions options, const Region* parent)
    : options_(std::move(options)) {
  // A nested region continues the run_once() values of the outer one.
  once_ = OncePlace::now_or_new();
  if (!once_place().store && parent != nullptr) {
    once_ = {parent->once_.store, parent->once_.store->size(), false};
  }
  if (options_.policy || options_.debug) {
    ops_ = std::make_shared<OpStore>();
  }
}

void Region::save_inputs(const std::vector<at::Tensor>& inputs) {
  for (const at::Tensor& input : inputs) {
    inputs_.emplace_back(input, /*is_output=*/false);
    if (input.defined() && !input.is_inference()) {
      input_versions_.push_back(unchanged_now(input, false));
    } else {
      input_versions_.emplace_back();
    }
  }
  if (SavedHookFactory* around = current_hook_factory(); around != nullptr) {
    around->between_operators();
  }
}

std::unique_ptr<torch::autograd::SavedVariableHooks> Region::make_hooks() {
  return std::make_unique<ForwardHook>(shared_from_this());
}

std::vector<at::Tensor> Region::run_forward(const RegionForward& part,
                                            std::vector<at::Tensor> inputs) {
  std::optional<OnceScope> once;
  if (!once_place().store) {
    once.emplace(OncePlace{once_.store, once_.store->size(), false});
  }
  std::optional<OpRecorder> recorder;
  std::optional<OpScope> ops;
  if (ops_) {
    SavedHookFactory* around = current_hook_factory();
    recorder.emplace(options_.policy, ops_, options_.debug,
                     around != nullptr && around->recomputes() ? around : nullptr);
    ops.emplace(&*recorder);
  }
  const HookScope hooks(this);
  return part(std::move(inputs));
}

// Parameters are the leaves that the region's nodes lead to. Older nodes have smaller sequence
// numbers: they count per thread, and this thread made all of them.
static void add_parameters(const std::vector<at::Tensor>& outputs, uint64_t first_node,
                           std::vector<Unchanged>& parameters) {
  std::vector<torch::autograd::Node*> open;
  std::unordered_set<torch::autograd::Node*> seen;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && node->sequence_nr() >= first_node && seen.insert(node).second) {
      open.push_back(node);
    }
  };
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      visit(output.grad_fn().get());
    }
  }
  while (!open.empty()) {
    torch::autograd::Node* node = open.back();
    open.pop_back();
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      parameters.push_back(unchanged_now(leaf->variable, true));
      continue;
    }
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
}

void Region::finish_forward(const std::vector<at::Tensor>& outputs, uint64_t first_node) {
  complete_ = true;
  if (ops_ && options_.early_stop) {
    ops_->drop_unreached();
  }
  for (size_t i = 0; i < input_versions_.size(); ++i) {
    if (!input_versions_[i].holds()) {
      throw InputError("activation_checkpoint",
                       label() + " changes its input " + std::to_string(i) + " in place",
                       "unchanged inputs, because the recomputation starts from them",
                       "clone the input in the region, or use the operator that is not in place");
    }
  }
  if (!saved_.empty()) {
    add_parameters(outputs, first_node, parameters_);
  }
}

size_t Region::add_saved(const at::Tensor& tensor) {
  saved_.emplace_back(
      options_.determinism_check == DeterminismCheck::none ? SavedShape{} : SavedShape::of(tensor));
  if (ops_) {
    ops_->needed = ops_->kept;
  }
  return saved_.size() - 1;
}

std::string Region::label() const {
  return options_.name.empty() ? "the region" : "region " + options_.name;
}

void Region::fail(const std::string& what, const std::string& fix) const {
  throw CheckpointError("activation_checkpoint::recompute", what + " in " + label(),
                        "a recomputation that saves the same tensors as forward", fix);
}

void Region::require_unchanged() const {
  for (size_t i = 0; i < input_versions_.size(); ++i) {
    const Unchanged& input = input_versions_[i];
    if (!input.holds()) {
      throw CheckpointError("activation_checkpoint::recompute",
                            "input " + std::to_string(i) + " of " + label() +
                                " was changed in place after forward: version=" +
                                std::to_string(input.counter.current_version()) + ", was " +
                                std::to_string(input.version),
                            "unchanged inputs", "clone it before changing it");
    }
  }
  for (const Unchanged& parameter : parameters_) {
    if (!parameter.holds()) {
      throw CheckpointError("activation_checkpoint::recompute",
                            "a parameter of shape " + SavedShape::of(parameter.tensor).text() +
                                " of " + label() + " was changed between forward and backward",
                            "unchanged parameters, because the recomputation uses them again",
                            "call backward before the optimizer steps");
    }
  }
}

// The recomputing thread calls it with mutex_ held.
void Region::resave(Recomputed& pass, const at::Tensor& tensor) {
  const size_t index = pass.count++;
  if (index >= saved_.size()) {
    if (complete_ && !options_.early_stop) {
      fail("more tensors are saved than the " + std::to_string(saved_.size()) + " of forward",
           "make the region depend only on its inputs");
    }
    return; // code that runs backward inside the region also saves tensors
  }
  Saved& saved = saved_[index];
  if (options_.determinism_check == DeterminismCheck::metadata) {
    const SavedShape shape = SavedShape::of(tensor);
    if (!(shape == saved.shape)) {
      fail("saved tensor " + std::to_string(index) + " of " + std::to_string(saved_.size()) +
               " is " + shape.text() + ", in forward it was " + saved.shape.text(),
           "make shapes depend only on the region's inputs; keep other "
           "decisions with hasten::run_once()");
    }
  }
  if (saved.alive) {
    pass.tensors[index] = tensor;
    ++pass.left;
  }
  pass.stop.reached = options_.early_stop && pass.count == saved_.size();
}

void Region::run_again(Recomputed& pass, bool keeps_graph) {
  std::vector<at::Tensor> inputs;
  for (const torch::autograd::SavedVariable& input : inputs_) {
    inputs.push_back(input.unpack());
  }
  const RecomputeScope scope(state_, once_);
  OpReplayer replayer(ops_, keeps_graph, &pass.stop);
  const OpScope ops(&replayer);
  RecomputeFactory factory(*this, pass);
  const HookScope hooks(&factory);
  try {
    forward_(std::move(inputs));
    count_recompute(false);
  } catch (const StopRecompute&) {
    count_recompute(true);
  } catch (const CheckpointError& error) {
    if (const std::string difference = replayer.difference(); !difference.empty()) {
      fail(difference, error.what());
    }
    throw;
  }
  if (pass.count < saved_.size()) {
    const std::string difference = replayer.difference();
    fail(std::to_string(pass.count) + " tensors are saved, in forward " +
             std::to_string(saved_.size()) + (difference.empty() ? "" : "; " + difference),
         "make the region depend only on its inputs");
  }
}

void Region::recompute(Recomputed& pass, bool keeps_graph) {
  const auto start = std::chrono::steady_clock::now();
  require_unchanged();
  pass.tensors.assign(saved_.size(), at::Tensor());
  pass.count = 0;
  pass.left = 0;
  pass.stop = {torch::autograd::get_current_graph_task_id(), false};
  run_again(pass, keeps_graph);
  count_recompute_time(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

at::Tensor Region::unpack(size_t index) {
  // One backward call is one pass. Outside of backward each unpacking is a pass of its own.
  const std::shared_ptr<SharedRegions>& shared = shared_regions();
  const int task = torch::autograd::get_current_graph_task_id();
  const int64_t backward = shared ? shared->id : task;
  const bool keeps_graph =
      shared || task == -1 || torch::autograd::get_current_graph_task_keep_graph();
  const std::lock_guard<std::mutex> lock(mutex_);
  auto it = passes_.find(backward);
  if (it == passes_.end() || index >= it->second.tensors.size() ||
      !it->second.tensors[index].defined()) {
    // The first unpacking in this backward, or the second one of the same tensor.
    const bool first = it == passes_.end();
    it = passes_.try_emplace(backward).first;
    try {
      recompute(it->second, keeps_graph);
    } catch (...) {
      passes_.erase(it);
      throw;
    }
    if (shared) {
      const std::lock_guard<std::mutex> list(shared->mutex);
      shared->regions.push_back(weak_from_this());
    } else if (task != -1 && first) {
      // The end of this backward frees the tensors that it did not use.
      torch::autograd::Engine::get_default_engine().queue_callback(
          [region = weak_from_this(), backward] {
            if (const auto alive = region.lock()) {
              alive->forget(backward);
            }
          });
    }
  }
  Recomputed& pass = it->second;
  at::Tensor tensor = std::move(pass.tensors[index]);
  pass.tensors[index] = at::Tensor();
  if (--pass.left == 0 || (task == -1 && !shared)) {
    passes_.erase(it);
  }
  return tensor;
}

void Region::forget(int64_t backward) {
  const std::lock_guard<std::mutex> lock(mutex_);
  passes_.erase(backward);
}

} // namespace hasten::detail
