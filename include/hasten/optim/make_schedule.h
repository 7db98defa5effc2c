// Makes schedules by the names and keywords of Hugging Face's --lr-scheduler-type and
// --lr-scheduler-kwargs.
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

/// Makes a schedule. `kwargs` is an object, or null for none. Keys, required ones with *:
///   cosine                num_cycles (0.5)
///   cosine_with_restarts  num_cycles (1)
///   cosine_with_min_lr    num_cycles (0.5), and one of min_lr, min_lr_rate *
///   polynomial            lr_end (1e-7), power (1)
///   inverse_sqrt          timescale
///   warmup_stable_decay   num_decay_steps *, num_stable_steps (the remaining steps),
///                         warmup_type, decay_type (linear, cosine, 1-sqrt),
///                         min_lr_ratio, num_cycles
///   one_cycle             pct_start, anneal_strategy (cos, linear), div_factor,
///                         final_div_factor, three_phase
/// The others have no keys. reduce_lr_on_plateau is constant here. lr_end and min_lr are divided by
/// `peak_lr`. constant, one_cycle and reduce_lr_on_plateau ignore the warm-up, as in Hugging Face.
/// Throws InputError for an unknown name or key (the message has the most similar one), a value of
/// another type or out of range, and, for every schedule, a warm-up longer than the total.
Schedule make_schedule(const std::string& name, int64_t warmup_steps, int64_t total_steps,
                       double peak_lr, const nlohmann::json& kwargs);

/// Options of reduce_lr_on_plateau from the keys mode (min, max; by default from
/// `greater_is_better`), factor, patience, threshold, threshold_mode (rel, abs), cooldown, min_lr,
/// eps.
ReduceLrOnPlateauOptions plateau_options(const nlohmann::json& kwargs, bool greater_is_better);

} // namespace hasten
