"""Prints tests/optim/optim_golden.h: schedules and decay groups of transformers.

Run: python tools/golden/optim.py > tests/optim/optim_golden.h
     tools/format.sh tests/optim/optim_golden.h
"""

import torch
import transformers
from torch import nn
from transformers import (
    get_constant_schedule,
    get_constant_schedule_with_warmup,
    get_linear_schedule_with_warmup,
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
        for _ in range(total + 3):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        print(f'    {{"{name}", {warmup}, {total},')
        print("     {" + ",\n      ".join(f"{rate:.17g}" for rate in rates) + "}},")
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
