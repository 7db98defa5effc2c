// The state behind an Accelerator and its handles.
#pragma once

#include <nlohmann/json.hpp>

#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "accelerator_state.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/accumulation/gradient_window.h"
#include "hasten/amp/loss_scale.h"
#include "hasten/base/world.h"
#include "hasten/core/autocast.h"
#include "hasten/optim/optimizer_state.h"
#include "hasten/parallel/fully_shard.h"
#include "hasten/parallel/sync_batch_norm.h"
#include "order_check.h"
#include "sharded_state.h"

namespace hasten {
class FolderCommit;
}

namespace hasten::detail {

struct StateLoad;

// What the core knows of a LocalSGD scope.
class LocalScope : public Stateful {
 public:
  // The model whose windows reduce nothing.
  virtual size_t model() const = 0;
  // This rank has run out of batches, the others make a round of this kind, not
  // 0. Collective.
  virtual void join_round(int64_t kind) = 0;
  // Attempted optimizer steps, and when what happened last; ranks set them to the
  // largest (of AcceleratorCore::clocks(), theirs first) when all have run out.
  virtual std::vector<int64_t> clocks() const = 0;
  virtual void set_clocks(const int64_t* clocks) = 0;
  // After a CommunicationError: true where the ranks that are left go on, as a
  // smaller world. Collective over them.
  virtual bool recover() = 0;
  // In that, this rank's end of the data was agreed on: others had left it.
  virtual bool ended_in_recovery() const = 0;
  // A state was loaded: the last window has been counted.
  virtual void loaded() = 0;
};

struct RegisteredObject {
  std::string name{};
  std::shared_ptr<Stateful> object{};
  StateScope scope = StateScope::shared;
};

// Slots of one model; `all`: the whole of it.
struct SlotList {
  size_t model = 0;
  bool all = false;
  std::vector<int64_t> slots{};
};

// What to do with gradients: clip_value where it is above 0, else by norm.
struct GradientClip {
  double max_norm = 0;
  double norm_type = 2;
  double clip_value = 0;
  bool error_if_nonfinite = false;
};

// Moves the moments of torch's optimizers, and of those derived from them.
void move_optimizer_state(torch::optim::Optimizer& optimizer, const at::Device& device);

// Rank `from`'s bytes (1-d, uint8) on every rank, however many they are; what the
// others give is not looked at. Collective: a size, then the bytes.
at::Tensor broadcast_bytes(Communicator& communicator, at::Tensor bytes, int from,
                           const char* name);

// AcceleratorOptions::debug or HASTEN_DEBUG=1.
bool debugs(const AcceleratorOptions& options);

// Sum of the values' bit patterns, which no rounding hides.
int64_t bit_sum(const at::Tensor& tensor);

// Where this rank computes: its own GPU, or the CPU.
at::Device accelerator_device(const AcceleratorOptions& options, int local_rank);

class AcceleratorCore {
 public:
  AcceleratorCore(AcceleratorOptions options, World world,
                  std::shared_ptr<Communicator> communicator, bool owns_communicator);

  void prepare_model(std::shared_ptr<torch::nn::Module> module);
  std::shared_ptr<OptimizerState> prepare_optimizer(
      const std::shared_ptr<torch::optim::Optimizer>& optimizer);
  std::shared_ptr<SchedulerState> prepare_scheduler(
      std::function<void()> step, std::vector<std::shared_ptr<OptimizerState>> optimizers);
  void tie_loaders(const std::vector<std::shared_ptr<LoaderState>>& loaders,
                   const std::vector<torch::nn::Module*>& models, bool with_optimizer);

  void open(std::shared_ptr<LoaderState> loader, std::optional<double> weight,
            const std::vector<torch::nn::Module*>& modules);
  void close(bool unwinding) noexcept;
  void request(uint32_t bits) { shared_->requests |= bits; }
  void backward(const at::Tensor& loss, std::optional<double> sum_weight,
                const BackwardOptions& options);
  uint64_t push_sync(const std::vector<torch::nn::Module*>& models, bool sync);
  void pop_sync(uint64_t id) noexcept;
  bool sync_gradients() const;

  StepResult optimizer_step(OptimizerState& optimizer);
  void register_comm_hook(const torch::nn::Module* module, std::shared_ptr<CommHook> hook);
  void sync_buffers();
  // Of those of these models that have some to even out. `forward`: also says that a
  // forward of synchronised ones comes.
  void even_out_buffers(uint64_t models, bool forward = false);
  // accelerator_uneven.cpp
  // This rank's batches have ended: of `loader`, null: of all. `joins`: takes part in
  // what the others still do, else they must end as well. Collective, blocking.
  void end_ranges(const LoaderState* loader, bool joins);

  void zero_grad(OptimizerState& optimizer);
  bool scheduler_step(SchedulerState& scheduler);
  // accelerator_gradients.cpp
  double clip(const std::vector<SlotList>& lists, const GradientClip& how);
  GradientNorms gradient_norms(size_t model, const GradientNormsOptions& norms_options);
  std::vector<SlotList> slots_of(const std::vector<at::Tensor>& parameters);
  size_t model_index(const torch::nn::Module* module, const char* where) const;

  // accelerator_shards.cpp: sharded models.
  // Ddp on a rank alone.
  Strategy strategy_in_use() const {
    return communicator->world_size() == 1 ? Strategy::ddp : options.strategy;
  }
  // Ranks that hold a copy of a sharded model together.
  int shard_ranks() const {
    return shard_group_ ? shard_group_->world_size() : communicator->world_size();
  }
  // A rank of a copy of its own has all rows, as they are.
  bool holds_parts(size_t model) const {
    return models_[model].sharded != nullptr && shard_ranks() > 1;
  }
  // What a LocalSGD scope of the model averages over: ranks that hold the same rows,
  // or null where all hold parts of one copy.
  std::shared_ptr<Communicator> copies_of(size_t model) const {
    return models_[model].sharded ? replicas_ : communicator;
  }
  // Null where ranks have whole copies, or the model was not prepared.
  FullyShard* sharded(const torch::nn::Module* module) const {
    const auto known = model_index_.find(module);
    return known == model_index_.end() ? nullptr : models_[known->second].sharded.get();
  }
  void summon_full_params(const std::vector<size_t>& models, const std::function<void()>& use,
                          int on_rank = 0);
  void load_full_params(const std::vector<size_t>& models, const std::function<void()>& load);

  // accelerator_state.cpp, load_state.cpp
  void save_state(const std::filesystem::path& folder, const SaveStateOptions& request);
  LoadedState load_state(const std::filesystem::path& folder, const LoadStateOptions& request);
  void register_object(std::string name, std::shared_ptr<Stateful> object, StateScope scope);

  // accelerator_local.cpp: the scope of LocalSGD.
  // Throws InputError where there is a scope, or the model's window is open.
  void open_local(LocalScope& scope);
  void close_local() noexcept;
  bool between_windows(size_t model) const;
  // Between windows: whether the scope's model reduces nothing.
  void set_local(bool local);
  // Stands for the model's last window for which an optimizer's step was
  // attempted; 0: none yet.
  uint64_t attempted(size_t model) const { return models_[model].attempted; }
  // Of the model's last window; 0 where it had no row of this rank.
  double window_weight(size_t model) const {
    const GradientWindow* last = models_[model].window;
    return last == nullptr ? 0 : last->report().weight;
  }
  // Optimizers that have parameters of the model.
  std::vector<std::shared_ptr<OptimizerState>> optimizers_of(size_t model) const;
  DataParallel& data_parallel(size_t model) { return *models_[model].parallel; }
  // Behind a failure: goes on with the ranks that are left. False where nobody is
  // lost. Collective over them.
  bool shrink();
  // The scope's clocks and the schedulers'; at the data's end ranks take the
  // largest.
  std::vector<int64_t> clocks() const;
  void take_clocks(const int64_t* most);
  // Tells ranks that have run out of batches that a round comes. Collective.
  void announce_round(uint64_t number, int64_t kind);
  ParameterNames parameter_names() const;

  void set_accumulation(int64_t steps);

  // accelerator_precision.cpp
  // At construction. Collective.
  void choose_precision(Precision wanted);
  void set_precision(Precision wanted);
  Precision precision() const { return precision_; }
  AutocastOptions autocast_options() const;
  const LossScale& loss_scale() const { return loss_scale_; }
  // At the end of a LocalSGD scope: schedules and loss scale. Collective.
  void agree_after_local();

  void begin_range(LoaderState& loader);
  void begin_evaluation();
  void end_range(LoaderState& loader);
  void finish();
  void enter_loop(const std::shared_ptr<LoaderState>& loader);
  // The loader of the innermost loop that goes on; null outside of loops.
  const LoaderState* active_loader();

  // Set at construction, but for gradient_accumulation_steps, and for rank and size
  // where ranks were lost.
  AcceleratorOptions options;
  World world;
  const std::shared_ptr<OrderCheck> order_check; // debug only, else null
  const std::shared_ptr<Communicator> communicator;
  const bool owns_communicator;
  const at::Device device;

  GradientWindow* window = nullptr; // the open batch's
  bool stands_in = false; // that batch
  WindowReport report{};
  bool finished = false;

 private:
  struct ModelState {
    std::shared_ptr<DataParallel> parallel;
    std::shared_ptr<FullyShard> sharded; // of the same; null: whole copies
    SyncBatchNormConversion sync_norms;
    bool synced = false; // its forwards communicate
    bool announced = false; // one outside accumulate(), since its last window
    std::shared_ptr<LoaderState> loader;
    GradientWindow* window = nullptr; // the last one it took part in
    uint64_t completed = 0; // serial of its last complete window; 0: none yet
    uint64_t attempted = 0; // serial of the last one stepped for, or skipped
    bool local = false; // its windows reduce nothing
    bool outside = false; // that one was made outside accumulate()
    bool non_finite = false; // the gradients hold something of that kind
    bool bad_loss = false; // the last window's loss was not finite
    bool looked = false; // for an overflow, since its last window; found:
    bool overflow = false;
    uint64_t opened = 0; // batches, for looking at its parameters now and then
  };
  struct SyncScope {
    uint64_t id = 0;
    uint64_t models = 0; // mask
    bool sync = false;
  };
  // Something done with a window's gradients.
  struct Done {
    std::function<void()> again;
    int64_t optimizer = -1; // whose step it was; below 0: none
  };
  // What a handle does with the gradients of its parameters.
  enum class Acts { in_window, once, always };

  bool in_window(const ModelState& model) const {
    return model.window != nullptr && model.completed == 0;
  }
  void backward_outside(const at::Tensor& loss, std::optional<double> sum_weight,
                        const BackwardOptions& options);
  // A window is complete now.
  void completed(GradientWindow& done, bool outside);
  // Before a window's backward may begin.
  void begin_models(uint64_t mask);
  // hsdp: this rank's groups. Collective, the first time.
  void open_shard_groups();
  bool has_replicas(uint64_t mask) const;
  void prepare_sharded(ModelState& state, std::shared_ptr<torch::nn::Module> module,
                       BufferPolicy buffers);
  void prepare_whole(ModelState& state, std::shared_ptr<torch::nn::Module> module,
                     BufferPolicy buffers);
  void refuse_optimizer(const torch::optim::Optimizer& optimizer,
                        const std::vector<SlotList>& lists) const;
  // Of one that has stepped before: moments like a whole parameter become rows.
  void cut_optimizer_state(torch::optim::Optimizer& optimizer);
  void refuse_sharded_outside(const std::vector<size_t>& models) const;
  // Throws InputError inside a forward.
  void reshard(const char* where);
  HeldRowsByName held_rows() const;
  NamedTensors shards() const;
  void refuse_other_windows(const std::vector<size_t>& models, const GradientWindow& next,
                            const char* where) const;
  void add_feeder(uint64_t mask, const LoaderState* loader);
  uint64_t models_of_loss(const at::Tensor& loss) const;
  uint64_t quiet_models() const;
  bool reduces(uint64_t mask) const;
  const LoaderState* current_loader(uint64_t mask) const;
  void note_reading(const LoaderState* loader);
  void check_parameters(const ModelState& model) const;
  Acts acts(const std::vector<SlotList>& lists) const;
  void refuse_local_gradients(const std::vector<SlotList>& lists, const char* where) const;
  void note_step(const OptimizerState& optimizer);
  void step_scaled(OptimizerState& optimizer, const std::vector<SlotList>& lists);
  // What all gradients of whole models are still to be multiplied by; applies it
  // where that is not one number, or a list is part of a model.
  double common_factor(const std::vector<SlotList>& lists);
  void decide_who_scales();
  void compare_ranks();
  void update_slots(OptimizerState& optimizer);
  uint64_t completed_window(const std::vector<SlotList>& lists) const;
  WindowOptions window_options() const {
    return {options.gradient_accumulation_steps, options.loss_weighting,
            options.check_accumulation};
  }
  GradientWindow& window_of(uint64_t mask) { return window_at(window_key(mask)); }
  GradientWindow& window_at(uint64_t key);
  std::shared_ptr<Communicator> window_communicator(uint64_t key);
  std::vector<size_t> models_in(uint64_t mask) const;
  std::shared_ptr<LoaderState> training_loader(const std::vector<size_t>& models) const;
  // Of a list's parameters; the same numbers in few pieces, too.
  struct Gathered {
    std::vector<at::Tensor> gradients{};
    std::vector<at::Tensor> pieces{};
  };
  Gathered gradients_of(const std::vector<SlotList>& lists);
  // Of the whole gradients; `all` is what this rank holds of them. Collective where
  // a model is sharded.
  double norm_of(const std::vector<SlotList>& lists, const Gathered& all, double norm_type);
  double clip_now(const std::vector<SlotList>& lists, const GradientClip& how);
  [[noreturn]] void refuse_non_finite(const std::vector<SlotList>& lists, const char* where,
                                      double norm) const;
  // What a rank that trained on has, to the stale ranks. Collective, blocking.
  void share_learners();
  bool is_shared(const OptimizerState& optimizer) const;
  nlohmann::json collect_trained(NamedTensors& tensors) const;
  void take_trained(const NamedTensors& tensors, const nlohmann::json& values);
  void take_model(size_t index, const NamedTensors& tensors, const nlohmann::json& values);
  uint64_t window_key(uint64_t mask) const;
  void refuse_mixed(uint64_t mask, const char* where) const;
  void align_clocks();
  void collect_local(StateParts& parts) const;
  void plan_scope(StateLoad& load);
  void plan_local(StateLoad& load);
  StateParts collect_state() const;
  void collect_learners(StateParts& parts) const;
  void collect_windows(StateParts& parts) const;
  void write_models(const std::filesystem::path& folder, NamedTensors& shared) const;
  void write_shared(FolderCommit& commit, StateParts& parts, const SaveStateOptions& options);
  void write_state(const std::filesystem::path* folder, const SaveStateOptions* request);
  void save_with_peers();
  void plan_models(StateLoad& load);
  void plan_windows(StateLoad& load);
  bool plans_gradients(const StateLoad& load) const;
  void plan_learners(StateLoad& load);
  void plan_loaders(StateLoad& load);
  void plan_objects(StateLoad& load);
  void plan_random(StateLoad& load);
  // accelerator_precision.cpp
  void begin_autocast();
  void end_autocast(bool batch_closes) noexcept;
  bool scales() const;
  void publish_loss_scale();
  bool overflowed(ModelState& model);
  void note_norm(const std::vector<SlotList>& lists, double norm);
  bool leaves_out_step(const std::vector<SlotList>& lists, uint64_t complete);
  nlohmann::json saved_loss_scale() const;
  void plan_loss_scale(StateLoad& load);
  // A window whose last batch had no backward: by now, or when its data has ended.
  void complete_open_window(const std::vector<SlotList>& lists);
  void complete_at_end(const LoaderState* loader);
  void complete_without_backward(GradientWindow& last);
  bool feeds(uint64_t key, const LoaderState* loader) const;
  bool left_out_last(const LoaderState* loader) const;
  void drop_unfinished(const LoaderState* loader);
  void take_part(const LoaderState* loader, bool joins);
  void serve_peers(const LoaderState* loader, bool joins, bool& survivable);
  void join_window(const WindowTotals& totals);
  void end_with_copy(const LoaderState* loader);
  void sync_announced(uint64_t models, bool joined, bool here);
  // accelerator_sync_norm.cpp
  void convert_batch_norms(const std::shared_ptr<torch::nn::Module>& module, ModelState& state,
                           BufferPolicy& buffers);
  uint64_t synced_models(uint64_t mask) const;
  // Tells ranks that have run out of batches that these models' buffers or forwards
  // come; whether there are such ranks. Collective.
  bool announce_models(uint64_t models);
  // Whom windows of these models concern now: all ranks, or, inside a LocalSGD scope,
  // those of this copy.
  WindowControl& control_of(uint64_t models);
  // A training forward of one comes. Collective where there is one.
  void announce_forward(uint64_t mask);
  // In such a forward; whether this rank's rows count.
  bool rows_count(size_t model);
  void refuse_joined(uint64_t mask) const;
  void check_steps();

  bool seeded_ = false;
  Precision precision_ = Precision::no;
  LossScale loss_scale_;
  uint64_t scaled_serial_ = 0; // last window that the scale followed
  std::vector<std::unique_ptr<ForwardScope>> forwards_; // of the open batch
  std::optional<Autocast> batch_cast_; // of the open batch, until its backward
  std::optional<AutocastState> before_batch_;
  std::vector<ModelState> models_;
  std::unordered_map<const torch::nn::Module*, size_t> model_index_;
  std::unordered_map<const void*, std::pair<size_t, std::string>>
      parameter_owner_; // TensorImpl -> model, name
  std::vector<std::shared_ptr<OptimizerState>> optimizers_;
  std::vector<std::vector<SlotList>> optimizer_slots_; // [optimizer]
  std::vector<std::shared_ptr<SchedulerState>> schedulers_;
  std::vector<std::shared_ptr<LoaderState>> loaders_; // all, as prepared
  std::vector<std::shared_ptr<LoaderState>> training_;
  std::vector<RegisteredObject> objects_;
  std::vector<std::shared_ptr<LoaderState>> loops_; // innermost last
  std::map<uint64_t, GradientWindow> windows_; // by window_key()
  // Loaders whose batches are in a window. Pointers are compared, no more.
  std::map<uint64_t, std::vector<const LoaderState*>> fed_by_; // by window_key()
  std::vector<SyncScope> sync_scopes_; // innermost last
  uint64_t next_scope_ = 0;
  bool last_batch_completed_ = true;
  bool accumulates_ = false; // accumulate() was called
  uint64_t closed_without_backward_ = 0; // mask: the last guard was
  std::shared_ptr<WindowShared> shared_;
  std::shared_ptr<Communicator> alone_; // a world of one, for local windows
  std::shared_ptr<Communicator> sync_norms_; // for forwards; null: none needed
  // hsdp: ranks that hold a copy together, and those that hold the same rows; null
  // where there is one copy.
  std::shared_ptr<Communicator> shard_group_;
  std::shared_ptr<Communicator> replicas_;
  std::optional<WindowControl> copy_control_; // of local windows of one copy
  LocalScope* local_scope_ = nullptr;
  std::vector<int> launch_ranks_{}; // [rank] once ranks have been lost
  WindowControl control_;
  uint64_t serial_ = 0; // complete windows
  bool warned_of_steps_ = false;
  bool stale_ = false; // this rank joined windows since it was equal to the others
  std::vector<Done> done_; // with the last complete window, in order
};

} // namespace hasten::detail
