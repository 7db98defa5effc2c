// What an Accelerator may be told.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hasten/accelerator/prepare.h"
#include "hasten/accumulation/gradient_window.h"
#include "hasten/amp/loss_scale.h"
#include "hasten/base/timeouts.h"
#include "hasten/core/autocast.h"
#include "hasten/core/precision.h"
#include "hasten/parallel/fully_shard.h"
#include "hasten/parallel/strategy.h"

namespace hasten {

/// How far a PreparedScheduler goes for one optimizer step.
enum class SchedulerTicks {
  /// One tick.
  per_optimizer_step,
  /// One tick for every rank, as Accelerate does: for schedules that were sized
  /// by the batches of one process.
  per_process,
};

struct AcceleratorOptions {
  /// Batches of one rank inside accumulate() that make one optimizer step, ≥ 1.
  int64_t gradient_accumulation_steps = 1;
  /// How batches of different sizes are weighed against each other.
  LossWeighting loss_weighting = LossWeighting::joined_batch;
  /// In the middle of a window, which only accumulate() makes, it is an error that
  /// names the parameter where an optimizer that was not prepared has stepped, or
  /// somebody else than the accelerator has clipped, zeroed or dropped gradients. Found
  /// by version counters and, on the CPU, 16 elements of each tensor: up to 1 us a
  /// parameter and batch. Sharded models are not looked at: such a call finds nothing
  /// there. False for models whose parameters change between batches on purpose.
  bool check_accumulation = true;
  SchedulerTicks scheduler_ticks = SchedulerTicks::per_optimizer_step;
  /// What forwards inside accumulate(), up to the batch's last backward, compute in;
  /// elsewhere inside the scope of Accelerator::autocast(). Equal on all ranks;
  /// automatic is agreed on at construction, after a short probe.
  /// fp16 scales losses: gradients are without the scale when backward returns, and
  /// steps whose gradients are not finite are left out, on every rank alike; the
  /// schedule does not go on then, Local SGD's count does.
  Precision mixed_precision = Precision::no;
  /// Of fp16. `growth_interval` counts windows that were stepped for. Where there are
  /// several ranks the first window's weight is not known beforehand, and its losses
  /// may be too large for the scale: its step is then left out. A rank inside a
  /// LocalSGD scope has a scale of its own; at its end all take the smallest.
  GradScalerOptions grad_scaler{};
  /// Operators that stay in fp32 on the CPU with bf16 and fp16.
  Fp32Ops fp32_ops = Fp32Ops::as_on_gpus;
  /// Leaves the multiplication of a window's gradients, and clip_grad_norm_'s, to
  /// the optimizer's kernel: one pass over them less each. p.grad() is final only
  /// after PreparedOptimizer::step() then; do not use torch's clip. Has an effect
  /// where every prepared optimizer is a FusedOptimizer over whole models.
  bool scale_in_step = false;
  /// An optimizer does not step, on any rank, with gradients of a loss that was
  /// not finite on one, or whose clipped norm was not. Costs nothing.
  bool skip_non_finite_steps = false;
  /// Seeds torch's generators: at construction equally on all ranks (initial
  /// weights), in the first prepare() of a model differently (dropout). With the epoch
  /// it decides the order of ranges that draw from torch's default generator. Empty
  /// leaves the generators alone; several ranks then read such ranges as with 0.
  std::optional<uint64_t> seed = 42;
  /// Stay on the CPU even where there is a GPU for this local rank.
  bool cpu = false;
  /// Gradients are reduced in pieces of about this size while backward runs.
  /// MiB, > 0. Larger: fewer collectives, less overlap.
  double bucket_cap_mb = 25;
  /// Allows windows that do not depend on every trainable parameter; off, one
  /// is an error that names it, where there are several ranks. See DdpOptions.
  bool find_unused_parameters = false;
  /// Promises that every window uses the same parameters. See DdpOptions.
  bool static_graph = false;
  /// What each rank holds of prepared models. No effect on a rank alone. All but ddp
  /// divide the modules that the model has in ModuleLists and Sequentials and calls
  /// through call_block, and the rest as one unit: forwards run inside accumulate()
  /// (training) or forward_scope() (evaluation), on every rank equally often; a
  /// prepared loader sees to that. Gradients, parameters and moments are this rank's
  /// part of each, norms those of the whole. Optimizers that need whole parameters
  /// (LAMB, Adafactor), communication hooks and, but for hsdp, LocalSGD scopes are
  /// refused.
  Strategy strategy = Strategy::ddp;
  /// Of hsdp: ranks that hold one copy together, neighbours, a divisor of the number
  /// of ranks. 0: those of a host.
  int shard_size = 0;
  /// How, but for its `strategy`, `replicas` and `everyone`. With mixed_precision set before prepare(), units but
  /// the root are put together in its 16 bits, unless precision.param_dtype says
  /// otherwise: half the bytes, and no cast of them stays until backward.
  FullyShardOptions fully_shard{};
  /// Names of the modules that are units, "encoder.layer.0", which the model calls
  /// through call_block. Empty: the entries of its ModuleLists and Sequentials.
  std::vector<std::string> shard_units{};
  /// What makes buffers (running statistics) equal on all ranks: when a window opens
  /// and is complete, in save_state(), and for evaluation inside a window. Costs it
  /// two messages a dtype and one more, for models with floating-point ones.
  BufferPolicy buffers = BufferPolicy::broadcast;
  /// BatchNorm1d, 2d and 3d of models take mean and variance from the rows of all
  /// ranks (hasten/parallel/sync_batch_norm.h): a batch on n ranks trains as on one.
  /// Costs two messages a layer that ranks wait for, and a small one a batch. Every
  /// rank needs a batch whenever one has, if only a stand-in: else it is an error on
  /// all. Not inside LocalSGD. Nothing on a rank alone.
  bool sync_batchnorm = false;
  /// How loaders are shared out over ranks (hasten/accelerator/prepared_loader.h).
  DataLoaderConfiguration dataloader_config{};
  /// Longest wait for a rank that is alive but late, and longest until one that died
  /// or froze is named; see CommunicatorOptions. No effect on a group that is given.
  /// Milliseconds.
  std::chrono::milliseconds timeout = default_ddp_timeout();
  std::chrono::milliseconds heartbeat_timeout = default_heartbeat_timeout();
  /// Finds ranks that drift apart: whenever a window is complete, the ranks
  /// compare which collectives they called since and what their parameters are,
  /// and each collective's shape before it runs. An error names the first that
  /// differs. Costs a pass over the parameters and some milliseconds a window.
  /// HASTEN_DEBUG=1 in the environment turns it on too.
  bool debug = false;
};

} // namespace hasten
