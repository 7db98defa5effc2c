"""Prints tests/optim/optim_golden.h: schedules and decay groups of transformers.

Run: python tools/golden/optim.py > tests/optim/optim_golden.h
     tools/format.sh tests/optim/optim_golden.h
"""

import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from transformers import (
    get_constant_schedule,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_hard_restarts_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)
from transformers.trainer_pt_utils import get_parameter_names

# As in Trainer.get_decay_parameter_names.
PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]

# Dotted path of a leaf module and its kind.
LEAVES = [
    ("embeddings.word_embeddings", "Embedding"),
    ("embeddings.LayerNorm", "LayerNorm"),
    ("encoder.layer.0.attention.self.query", "Linear"),
    ("encoder.layer.0.attention.output.LayerNorm", "LayerNorm"),
    ("encoder.layer.0.norm", "Linear"),
    ("encoder.layer.0.pre_norm", "Linear"),
    ("encoder.layer.0.norm1", "Linear"),
    ("encoder.layer.0.normal", "Linear"),
    ("encoder.layer.0.norm.inner", "Linear"),
    ("encoder.layer.0.pre_norm_out", "Linear"),
    ("encoder.layer.0.RMSNormish", "Linear"),
    ("encoder.layer.0.debiased", "Linear"),
    ("h.0.ln_1", "LayerNorm"),
    ("h.0.Norm", "Linear"),
    ("ln_f", "LayerNorm"),
    ("norm", "Linear"),
    ("classifier", "Linear"),
]

SCHEDULES = [
    ("linear", 0, 8, lambda o: get_linear_schedule_with_warmup(o, 0, 8)),
    ("linear", 3, 10, lambda o: get_linear_schedule_with_warmup(o, 3, 10)),
    ("linear", 5, 5, lambda o: get_linear_schedule_with_warmup(o, 5, 5)),
    ("constant", 0, 4, lambda o: get_constant_schedule(o)),
    ("constant_with_warmup", 4, 7, lambda o: get_constant_schedule_with_warmup(o, 4)),
    ("cosine", 3, 11, lambda o: get_cosine_schedule_with_warmup(o, 3, 11)),
    ("cosine, 1.25 cycles", 0, 9, lambda o: get_cosine_schedule_with_warmup(o, 0, 9, 1.25)),
    ("restarts", 2, 9, lambda o: get_cosine_with_hard_restarts_schedule_with_warmup(o, 2, 9)),
    ("restarts, 3 cycles", 2, 14, lambda o: get_cosine_with_hard_restarts_schedule_with_warmup(o, 2, 14, 3)),
    ("least 0.1", 2, 9, lambda o: get_cosine_with_min_lr_schedule_with_warmup(o, 2, 9, min_lr=2e-4)),
    ("polynomial", 3, 9, lambda o: get_polynomial_decay_schedule_with_warmup(o, 3, 9)),
    ("polynomial, power 2, to 0.05", 0, 7, lambda o: get_polynomial_decay_schedule_with_warmup(o, 0, 7, 1e-4, 2.0)),
    ("inverse root", 4, 9, lambda o: get_inverse_sqrt_schedule(o, 4)),
    ("inverse root", 0, 4, lambda o: get_inverse_sqrt_schedule(o, 0)),
    ("inverse root, scale 50", 4, 9, lambda o: get_inverse_sqrt_schedule(o, 4, 50)),
    ("stable", 3, 12, lambda o: get_wsd_schedule(o, 3, 4, 12)),
    ("stable, cosine up, linear down, to 0.1", 3, 12, lambda o: get_wsd_schedule(o, 3, 4, 12, None, "cosine", "linear", 0.1)),
    ("stable, root, to 0.1", 3, 12, lambda o: get_wsd_schedule(o, 3, 4, 12, None, "1-sqrt", "1-sqrt", 0.1)),
    ("one cycle", 0, 10, lambda o: OneCycleLR(o, 2e-3, total_steps=10)),
    ("one cycle, straight", 0, 13, lambda o: OneCycleLR(o, 2e-3, total_steps=13, pct_start=0.4, anneal_strategy="linear")),
    ("one cycle, three phases", 0, 15, lambda o: OneCycleLR(o, 2e-3, total_steps=15, three_phase=True, div_factor=10)),
]

# Metrics of evaluations, and ReduceLROnPlateau's arguments.
PLATEAU_METRICS = [1.0, 0.9, 0.9, 0.95, 0.89999, 0.91, 0.5, 0.6, 0.7, 0.8, 0.5, 0.49, 0.6, 0.6, 0.6, 0.6]
PLATEAUS = [
    {"patience": 1, "factor": 0.5},
    {"patience": 0, "factor": 0.1, "cooldown": 2, "min_lr": 1e-4},
    {"mode": "max", "patience": 2, "threshold": 0.05, "threshold_mode": "abs"},
]


def tree():
    make = {
        "Embedding": lambda: nn.Embedding(3, 2),
        "Linear": lambda: nn.Linear(2, 2),
        "LayerNorm": lambda: nn.LayerNorm(2),
    }
    root = nn.Module()
    for path, kind in LEAVES:
        parent = root
        *folders, name = path.split(".")
        for folder in folders:
            if not hasattr(parent, folder):
                parent.add_module(folder, nn.Module())
            parent = getattr(parent, folder)
        if not hasattr(parent, name):
            parent.add_module(name, make[kind]())
    return root


def main():
    print("// Written by tools/golden/optim.py with torch", torch.__version__.split("+")[0], end=" ")
    print("and transformers", transformers.__version__ + ".")
    print("#pragma once\n\n#include <cstdint>\n#include <vector>\n")
    print("namespace hasten::golden {\n")
    print("struct ScheduleCase {\n  const char* name;\n  int64_t warmup;\n  int64_t total;")
    print("  std::vector<double> learning_rates; // [completed updates], peak 2e-3\n};\n")
    print("inline const std::vector<ScheduleCase> kSchedules = {")
    for name, warmup, total, make in SCHEDULES:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2e-3)
        scheduler = make(optimizer)
        rates = []
        count = total if name.startswith("one cycle") else total + 3
        for k in range(count):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            if k + 1 < count:
                scheduler.step()
        print(f'    {{"{name}", {warmup}, {total},')
        print("     {" + ",\n      ".join(f"{rate:.17g}" for rate in rates) + "}},")
    print("};\n")
    print("inline const std::vector<double> kPlateauMetrics = {")
    print("    " + ", ".join(map(repr, PLATEAU_METRICS)) + "};\n")
    print("/// Rates after each of them, beginning at 2e-3.")
    print("inline const std::vector<std::vector<double>> kPlateauRates = {")
    for arguments in PLATEAUS:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2e-3)
        scheduler = ReduceLROnPlateau(optimizer, **arguments)
        rates = []
        for metric in PLATEAU_METRICS:
            scheduler.step(metric)
            rates.append(optimizer.param_groups[0]["lr"])
        print("    {" + ", ".join(f"{rate:.17g}" for rate in rates) + "}, // " + str(arguments).replace("'", ""))
    print("};\n")
    model = tree()
    decayed = set(get_parameter_names(model, [nn.LayerNorm], PATTERNS))
    print("/// A leaf module's path and kind; both orders are those of the model.")
    print("struct LeafCase {\n  const char* path;\n  const char* kind;\n};\n")
    print("inline const std::vector<LeafCase> kLeaves = {")
    for path, kind in LEAVES:
        print(f'    {{"{path}", "{kind}"}},')
    print("};\n")
    print("inline const std::vector<const char*> kDecayed = {")
    for name, _ in model.named_parameters():
        if name in decayed:
            print(f'    "{name}",')
    print("};\n\n} // namespace hasten::golden")


main()
