// Schedules by the names and with the keywords that Hugging Face's
// --lr-scheduler-type and --lr-scheduler-kwargs have.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "hasten/optim/plateau.h"
#include "hasten/optim/schedule.h"

namespace hasten {

/// linear, cosine, cosine_with_restarts, cosine_with_min_lr, polynomial, constant,
/// constant_with_warmup, inverse_sqrt, warmup_stable_decay, reduce_lr_on_plateau,
/// one_cycle (torch's OneCycleLR).
const std::vector<std::string>& schedule_names();

/// `kwargs`: an object, or null for none. Keys, * needed:
///   cosine                num_cycles (0.5)
///   cosine_with_restarts  num_cycles (1)
///   cosine_with_min_lr    num_cycles (0.5), and one of min_lr, min_lr_rate *
///   polynomial            lr_end (1e-7), power (1)
///   inverse_sqrt          timescale
///   warmup_stable_decay   num_decay_steps *, num_stable_steps (what is left),
///                         warmup_type, decay_type (linear, cosine, 1-sqrt),
///                         min_lr_ratio, num_cycles
///   one_cycle             pct_start, anneal_strategy (cos, linear), div_factor,
///                         final_div_factor, three_phase
/// The others have none; reduce_lr_on_plateau is constant here. `peak_lr`: what
/// lr_end and min_lr are shares of. Throws InputError for an unknown name or key (the
/// nearest is offered), a value of another type or out of range, and warm-up where
/// there is none (constant, one_cycle, reduce_lr_on_plateau ignore it as theirs do)
/// above the total.
Schedule make_schedule(const std::string& name, int64_t warmup_steps, int64_t total_steps,
                       double peak_lr, const nlohmann::json& kwargs);

/// Of reduce_lr_on_plateau: mode (min, max; else `greater_is_better`), factor,
/// patience, threshold, threshold_mode (rel, abs), cooldown, min_lr, eps.
ReduceLrOnPlateauOptions plateau_options(const nlohmann::json& kwargs, bool greater_is_better);

} // namespace hasten
