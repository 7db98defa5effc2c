// Options of Accelerator.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "hasten/accumulation/gradient_window.h"
#include "hasten/amp/loss_scale.h"
#include "hasten/base/timeouts.h"
#include "hasten/config/precision.h"
#include "hasten/config/strategy.h"
#include "hasten/core/autocast.h"
#include "hasten/loader/loader_state.h"
#include "hasten/parallel/fully_shard.h"

namespace hasten {

class GeneralTracker;

/// A tracker, or its name for make_tracker().
using TrackerChoice = std::variant<std::string, std::shared_ptr<GeneralTracker>>;

/// How often a PreparedScheduler steps for one optimizer step.
enum class SchedulerTicks {
  /// Once.
  per_optimizer_step,
  /// Once per rank, as in Accelerate: for schedules whose length is the number of batches of one
  /// process.
  per_process,
};

struct AcceleratorOptions {
  /// Batches of one rank inside accumulate() that make one optimizer step. ≥ 1.
  int64_t gradient_accumulation_steps = 1;
  /// Accelerate's GradientAccumulationPlugin. False: a window does not end with its loader's pass
  /// but continues with the next one's batches, and with several accumulate() in the body of a last
  /// batch. It can be saved and loaded in between. What is left at the end of the run is dropped
  /// with a warning.
  bool sync_with_dataloader = true;
  /// How the losses of batches of different sizes are weighted.
  LossWeighting loss_weighting = LossWeighting::joined_batch;
  /// Checks that parameters and gradients do not change between the batches of a window of
  /// accumulate(). An optimizer that was not prepared and steps there, or code that clips, zeroes
  /// or drops gradients there without the accelerator, is an error that names the parameter.
  /// Compares version counters and, on the CPU, 16 elements of each tensor: up to 1 us per
  /// parameter and batch. Sharded models are not checked. Set it to false for models whose
  /// parameters change between batches on purpose.
  bool check_accumulation = true;
  /// False: save_state() leaves out parameters that require no gradient, and load_state() leaves them
  /// as they are. For frozen weights that the program reads from elsewhere, such as a LoRA's base.
  bool save_frozen_weights = true;
  SchedulerTicks scheduler_ticks = SchedulerTicks::per_optimizer_step;
  /// The precision of forwards inside accumulate(), up to the batch's last backward; elsewhere use
  /// Accelerator::autocast(). Equal on all ranks. automatic: the ranks agree at construction: on the
  /// CPU after a short probe, on a GPU bf16 if every rank's has it in hardware. bf16 on a GPU without
  /// it is an InputError. fp16 scales losses. The gradients are unscaled when backward returns. Optimizer
  /// steps whose gradients are not finite are skipped on every rank: the scheduler does not step
  /// then, but Local SGD counts them.
  Precision mixed_precision = Precision::no;
  /// Products and convolutions of fp32 tensors use TF32 on the GPU, with 10 bits of fraction, for
  /// the whole process. InputError if the device is not an NVIDIA GPU with compute capability 8.0 or
  /// above. False leaves torch's settings: products in fp32, convolutions in TF32.
  bool tf32 = false;
  /// A run that is repeated on the same GPU gives the same bits, if the program's own code does: torch's
  /// deterministic kernels, for the whole process. They are slower, and an operator without one throws
  /// torch's error. Without it some kernels add in no fixed order. Makes no difference on the CPU, where
  /// runs always repeat. Source: torch.use_deterministic_algorithms.
  bool full_determinism = false;
  /// Options for fp16. `growth_interval` counts windows with an optimizer step. With several ranks
  /// the first window's weight is guessed from the number of batches and ranks, so gradients may
  /// overflow fp16; the optimizer step of that window is then skipped. A rank inside a LocalSGD
  /// scope has its own scale;
  /// at the end of the scope all ranks take the smallest.
  GradScalerOptions grad_scaler{};
  /// Operators that stay in fp32 on the CPU with bf16 and fp16.
  Fp32Ops fp32_ops = Fp32Ops::as_on_gpus;
  /// The optimizer's kernel multiplies the gradients by the window's factor and by
  /// clip_grad_norm_'s. This saves one pass over the gradients for each. p.grad() is then final
  /// only after PreparedOptimizer::step(); do not use torch's clip_grad_norm_. Takes effect if
  /// every prepared optimizer is a FusedOptimizer over unsharded models.
  bool scale_in_step = false;
  /// Skips the optimizer step on all ranks if a rank's loss was not finite or the norm from
  /// clipping was not finite. Costs nothing on the CPU, and a wait for another device in each step.
  bool skip_non_finite_steps = false;
  /// Seeds torch's generators: equally on all ranks at construction (initial weights), and
  /// differently in the first prepare() of a model (dropout). Seed and epoch also decide the order
  /// of ranges that draw from torch's default generator. Empty: the generators are not seeded;
  /// several ranks then read such ranges as with seed 0.
  std::optional<uint64_t> seed = 42;
  /// Where this rank computes: "cpu"; "cuda", of which each rank of the host takes the one with its
  /// local rank; "cuda:1"; or another type of device of LibTorch. "auto" takes the accelerator that
  /// LibTorch has if there is one for each rank of the host, else the CPU. InputError if the device
  /// does not exist. With backend gloo, which moves host memory, ranks may share a device.
  std::string device = "auto";
  /// Approximate size of a bucket: gradients are reduced in buckets while backward runs. MiB, > 0.
  /// A larger value means fewer collectives and less overlap.
  double bucket_cap_mb = 25;
  /// Allows windows that do not use every trainable parameter. If false, and with several ranks,
  /// such a window is an error that names a parameter. See DdpOptions.
  bool find_unused_parameters = false;
  /// Promises that every window uses the same parameters. See DdpOptions.
  bool static_graph = false;
  /// Which parts of prepared models each rank holds. No effect with one rank. All strategies except
  /// ddp shard the model by units: the modules that it has in ModuleLists and Sequentials and calls
  /// through call_block, and the rest as one unit. Forwards then run inside accumulate() (training)
  /// or forward_scope() (evaluation), equally often on every rank; a prepared loader ensures this.
  /// Gradients, parameters and moments are this rank's shards; norms are those of the whole model.
  /// InputError for optimizers that need whole parameters (Adafactor), communication hooks
  /// and, except with hsdp, LocalSGD scopes.
  Strategy strategy = Strategy::ddp;
  /// For hsdp: the number of consecutive ranks that hold one replica; a divisor of the number of
  /// ranks. 0: the ranks of one host.
  int shard_size = 0;
  /// Options of FullyShard. The accelerator sets `strategy`, `replicas` and `everyone`. If
  /// mixed_precision is set before prepare(), all units except the root are gathered in its 16
  /// bits, unless precision.param_dtype is set. This halves the bytes, and no cast copy is kept for
  /// backward.
  FullyShardOptions fully_shard{};
  /// Names of the modules that are units, such as "encoder.layer.0"; the model calls them through
  /// call_block. Empty: the entries of its ModuleLists and Sequentials.
  std::vector<std::string> shard_units{};
  /// How buffers (running statistics) are made equal on all ranks. This is done when a window opens
  /// and when it is complete, in save_state(), and before an evaluation inside a window. Costs two
  /// messages per dtype and one more, for models with floating-point buffers.
  BroadcastBuffers broadcast_buffers = BroadcastBuffers::on;
  /// BatchNorm1d, 2d and 3d compute mean and variance over the samples of all ranks
  /// (hasten/parallel/sync_batch_norm.h), so a batch on n ranks trains as on one. Costs two
  /// blocking messages per layer and a small one per batch. If one rank has a batch, every rank
  /// needs one, at least a stand-in; otherwise all ranks throw. Not inside LocalSGD. No effect with
  /// one rank.
  bool sync_batchnorm = false;
  /// How loaders distribute batches over ranks (hasten/loader/prepared_loader.h).
  DataLoaderConfiguration dataloader_config{};
  /// `timeout`: longest wait for a rank that is alive but late. `heartbeat_timeout`: longest time
  /// until a rank that died or froze is named. See CommunicatorOptions. No effect on a group that
  /// is passed to the Accelerator. Milliseconds.
  std::chrono::milliseconds timeout = default_ddp_timeout();
  std::chrono::milliseconds heartbeat_timeout = default_heartbeat_timeout();
  /// Moves tensors between ranks: a name of backend_names() (hasten/comm/backend.h), the same on
  /// all ranks, or "auto": nccl on GPUs; on the CPU shm if all ranks are on one host, else gloo. No
  /// effect on a group that is passed to the Accelerator.
  std::string backend = "auto";
  /// Finds ranks that diverge. When a window is complete, the ranks compare their parameters and
  /// the collectives that they called since the last one. They compare each collective's shapes
  /// before it runs. An error names the first difference. Costs a pass over the parameters and some
  /// milliseconds per window. HASTEN_DEBUG=1 in the environment also turns it on.
  bool debug = false;
  /// The trackers of init_trackers() (hasten/tracking/tracker.h), equally on all ranks:
  /// {"tensorboard", my_tracker}. Named ones need one of these folders; logging_dir counts if both
  /// are given.
  std::vector<TrackerChoice> log_with{};
  std::filesystem::path project_dir{};
  std::filesystem::path logging_dir{};
};

} // namespace hasten
