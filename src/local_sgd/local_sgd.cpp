// A scope from its beginning to its end, and its state.
#include "hasten/local_sgd/local_sgd.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <sstream>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "local_sgd_scope.h"

namespace hasten {

namespace detail {

static void check_options(const LocalSGDOptions& options) {
  const int64_t steps = options.local_sgd_steps;
  const int64_t fragments = std::max<int64_t>(1, options.average.fragments);
  const auto text = [](const char* name, int64_t value) {
    return std::string(name) + "=" + std::to_string(value);
  };
  const std::string longest_delay = std::to_string(steps / fragments);
  struct Row {
    bool bad;
    std::string what;
    std::string expected;
  };
  for (const Row& row : {
           Row{steps < 1, text("local_sgd_steps", steps),
               "1 or more optimizer steps between two averages"},
           Row{options.post_local_start < 0, text("post_local_start", options.post_local_start),
               "0 or more"},
           Row{fragments > 1 && (fragments > steps || options.schedule),
               text("fragments", fragments),
               "at most " + text("local_sgd_steps", steps) +
                   ", and no schedule: each fragment has its own step"},
           Row{options.delay < 0 || (!options.schedule && options.average.fragments > 0 &&
                                     options.delay > steps / fragments),
               text("delay", options.delay), "from 0 to steps / fragments=" + longest_delay},
           Row{options.inner_steps < 0 || (options.inner_steps > 0 &&
                                           (options.schedule || steps % options.inner_steps != 0)),
               text("inner_steps", options.inner_steps),
               "0, or a divisor of " + text("local_sgd_steps", steps) + " without a schedule"},
           Row{options.delay > 0 && !options.average.transactional, text("delay", options.delay),
               "0 with transactional=false"},
           Row{options.average.alpha && options.delay == 0,
               "average.alpha=" + std::to_string(options.average.alpha.value_or(0)) +
                   " with delay=0",
               "delay > 0: without a delay no step lies between snapshot and average"},
           Row{options.on_peer_failure == PeerFailure::survivors && !options.average.transactional,
               "on_peer_failure=survivors with transactional=false",
               "transactional=true: otherwise an interrupted synchronisation leaves partial sums"},
       }) {
    if (row.bad) {
      throw InputError(kLocalSGDWhere, row.what, row.expected);
    }
  }
}

static void check_shards(const RunContext& run, const LocalSGDOptions& options, bool replicas) {
  if (!replicas) {
    throw InputError(kLocalSGDWhere,
                     std::string("a model with strategy=") + strategy_name(run.options().strategy) +
                         ": all " + std::to_string(run.world().world_size) +
                         " ranks hold shards of one replica",
                     "several replicas, which are averaged",
                     "use strategy=ddp, or hsdp with a shard_size below the number of ranks");
  }
  if (options.on_peer_failure == PeerFailure::survivors) {
    throw InputError(kLocalSGDWhere,
                     std::string("on_peer_failure=survivors with strategy=") +
                         strategy_name(run.options().strategy),
                     "stop: the shards of a lost rank are lost",
                     "save states, and resume from the last one");
  }
}

static void compare_scopes(Communicator& communicator, const LocalSGDOptions& options,
                           size_t index) {
  const nlohmann::json mine = {{"local_sgd_steps", options.local_sgd_steps},
                               {"enabled", options.enabled},
                               {"model", index},
                               {"post_local_start", options.post_local_start},
                               {"delay", options.delay},
                               {"inner_steps", options.inner_steps},
                               {"moments", static_cast<int>(options.moments)},
                               {"on_peer_failure", static_cast<int>(options.on_peer_failure)}};
  const auto all = communicator.all_gather_object(mine, "LocalSGD scope");
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] != all[0]) {
      throw InputError(kLocalSGDWhere,
                       "rank " + std::to_string(rank) + " opens a scope with " + all[rank].dump() +
                           ", rank 0 with " + all[0].dump(),
                       "the same scope on every rank");
    }
  }
}

static Averager::NamedTensorList trainable(const DataParallel& model) {
  Averager::NamedTensorList list;
  for (const auto& [name, parameter] : model.parameters()) {
    if (parameter.requires_grad()) {
      list.emplace_back(name, parameter);
    }
  }
  return list;
}

} // namespace detail

LocalSGD::Impl::Impl(std::shared_ptr<detail::AcceleratorCore> accelerator,
                     torch::nn::Module& module, LocalSGDOptions settings)
    : core(std::move(accelerator)),
      options(std::move(settings)),
      schedule(options),
      control(core->run.communicator()) {
  detail::check_options(options);
  index = core->models.index(&module, detail::kLocalSGDWhere);
  copies = core->models.replicas_of(index);
  if (options.enabled && core->models.sharded(&module) != nullptr) {
    detail::check_shards(core->run, options, copies != nullptr);
  }
  detail::compare_scopes(*core->run.communicator(), options, index);
  if (options.enabled && core->run.world().world_size > 1) {
    open();
  }
}

void LocalSGD::Impl::open() {
  optimizers = core->optimizers.of_model(index);
  if (optimizers.empty()) {
    throw InputError(detail::kLocalSGDWhere, "no prepared optimizer has parameters of the model",
                     "the optimizer whose steps are counted",
                     "pass model and optimizer to accelerator.prepare() before the scope");
  }
  core->local.open(*this);
  try {
    open_groups();
    averager = std::make_unique<Averager>(
        transfers, detail::trainable(*core->models[index].parallel), options.average);
    open_parts();
    progress.own_weight.assign(static_cast<size_t>(averager->fragments()), 0);
    progress.taken_weight = progress.own_weight;
    if (options.post_local_start == 0) {
      begin_local();
    }
  } catch (...) {
    core->local.close();
    throw;
  }
  counted = core->windows.attempted(index);
  opened = Clock::now();
  active = true;
}

// Makes the parts for one set of ranks, except the averager. Collective.
void LocalSGD::Impl::open_parts() {
  group_averager = nullptr;
  if (group) {
    group_averager =
        std::make_unique<Averager>(group, detail::trainable(*core->models[index].parallel),
                                   AveragerOptions{.transactional = options.average.transactional,
                                                   .slice_mb = options.average.slice_mb,
                                                   .measure_spread = false});
  }
  buffers =
      std::make_unique<detail::AveragedBuffers>(copies, *core->models[index].parallel->module());
  moments =
      std::make_unique<detail::AveragedMoments>(copies, optimizers, core->models.parameter_names());
}

// Operations of one group wait for each other, so a transfer that runs while the ranks train has
// another one. Every rank gets all ranks' group names, and makes a group with the ranks of its name.
void LocalSGD::Impl::open_groups() {
  close_groups();
  CommunicatorOptions like = copies->options();
  like.name = "local sgd transfers";
  transfers = options.delay > 0 && copies->world_size() > 1 ? copies->duplicate(like) : copies;
  if (options.inner_steps == 0) {
    return;
  }
  const std::string name = options.group.empty() ? host_name() : options.group;
  const auto names = copies->all_gather_object(name, "groups of ranks");
  std::vector<int> members;
  for (size_t rank = 0; rank < names.size(); ++rank) {
    if (names[rank] == name) {
      members.push_back(static_cast<int>(rank));
    }
  }
  like.name = "local sgd group";
  group = members.size() > 1 ? copies->new_group(members, like) : nullptr;
}

void LocalSGD::Impl::close_groups() {
  if (group) {
    group->close();
  }
  if (transfers && transfers != copies) {
    transfers->close();
  }
}

double LocalSGD::Impl::learning_rate() const {
  const auto& groups = optimizers.front()->optimizer->param_groups();
  return groups.empty() ? 0 : groups.front().options().get_lr();
}

void LocalSGD::Impl::log_summary() const {
  std::ostringstream line;
  line.precision(3);
  line << "local sgd: " << progress.steps << " steps, " << progress.rounds << " averages, "
       << format_bytes(report.bytes) << " sent by each rank, " << report.seconds << " s in them ("
       << 100 * report.seconds / std::chrono::duration<double>(Clock::now() - opened).count()
       << " % of the time)";
  if (!std::isnan(report.last.spread)) {
    line << ", last spread " << report.last.spread;
  }
  log_info(line.str());
}

void LocalSGD::Impl::loaded() { counted = core->windows.attempted(index); }

void LocalSGD::Impl::save_state(NamedTensors& tensors, nlohmann::json& values) const {
  if (active && core->windows.attempted(index) != counted) {
    throw InputError(
        detail::kLocalSGDWhere,
        "a state between the optimizer's step() and the scope's, which has not counted the step",
        "a state after the scope's step()", "save at the end of the loop's body");
  }
  values = progress;
  values["average"] = detail::save_below(*averager, tensors, "average.");
}

void LocalSGD::Impl::load_state(const NamedTensors& tensors, const nlohmann::json& values) {
  auto loaded = values.get<Progress>();
  if (loaded.own_weight.size() != progress.own_weight.size() ||
      loaded.taken_weight.size() != loaded.own_weight.size()) {
    throw InputError(detail::kLocalSGDWhere,
                     "the state has fragments=" + std::to_string(loaded.own_weight.size()),
                     std::to_string(progress.own_weight.size()) + ", as here");
  }
  averager->load_state(detail::tensors_below(tensors, "average."), values.at("average"));
  if (local != (loaded.steps >= options.post_local_start)) {
    local = !local;
    core->local.set_local(local);
  }
  progress = std::move(loaded);
  unread = false;
}

LocalSGD::LocalSGD(Accelerator& accelerator, torch::nn::Module& model, LocalSGDOptions options)
    : impl_(std::make_unique<Impl>(accelerator.core(), model, std::move(options))) {}

void LocalSGD::Impl::leave(bool unwinding) noexcept {
  if (!std::exchange(active, false)) {
    return;
  }
  if (unwinding) {
    core->run.communicator()->abort("an exception left the scope of LocalSGD");
  }
  core->local.close();
}

LocalSGDReport LocalSGD::Impl::current_report() {
  try {
    report_round();
  } catch (const CommunicationError&) { // the next synchronisation throws it
    if (options.on_peer_failure == PeerFailure::stop) {
      throw;
    }
  }
  LocalSGDReport now = report;
  if (copies) {
    now.ranks_per_copy = core->run.world().world_size / copies->world_size();
  }
  now.steps = progress.steps;
  now.rounds = progress.rounds;
  now.inner_rounds = progress.inner_rounds;
  const double seconds = std::chrono::duration<double>(Clock::now() - opened).count();
  now.communication_share = seconds > 0 ? now.seconds / seconds : 0;
  return now;
}

LocalSGD::~LocalSGD() {
  const bool unwinding = std::uncaught_exceptions() > exceptions_at_entry_;
  if (active() && !unwinding) {
    log_error(
        "[accelerator::LocalSGD] destroyed without finish(): every rank keeps "
        "its own parameters");
  }
  impl_->leave(unwinding);
}

bool LocalSGD::step() { return impl_->step(); }

void LocalSGD::synchronize() { impl_->synchronize(); }

void LocalSGD::finish() { impl_->finish(); }

void LocalSGD::abort() noexcept { impl_->leave(false); }

bool LocalSGD::active() const { return impl_->is_active(); }

int64_t LocalSGD::steps() const { return impl_->count(); }

LocalSGDReport LocalSGD::report() const { return impl_->current_report(); }

} // namespace hasten
