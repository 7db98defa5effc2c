"""Prints tests/trainer/trainer_golden.h: losses of torch, transformers' LabelSmoother and
EarlyStoppingCallback, and multi-label scores of scikit-learn.

Run: python tools/golden/trainer.py > tests/trainer/trainer_golden.h
     tools/format.sh tests/trainer/trainer_golden.h
"""

import sklearn
import torch
import torch.nn.functional as F
import transformers
from sklearn import metrics
from transformers.trainer_callback import EarlyStoppingCallback, TrainerControl, TrainerState
from transformers.trainer_pt_utils import LabelSmoother

torch.manual_seed(7)
torch.set_default_dtype(torch.double)


def array(kind, name, values):
    text = ", ".join(repr(v) for v in values)
    print(f"inline const std::vector<{kind}> {name} = {{{text}}};")


def value(name, number):
    print(f"inline constexpr double {name} = {float(number)!r};")


def losses():
    logits = torch.randn(7, 3) * 2
    labels = torch.tensor([0, 2, 1, -100, 1, 0, 2])
    weights = torch.tensor([0.5, 2.0, 1.25])
    array("double", "kLogits", logits.flatten().tolist())
    array("int64_t", "kLabels", labels.tolist())
    array("double", "kClassWeights", weights.tolist())
    value("kPlain", F.cross_entropy(logits, labels))
    value("kSmoothed", F.cross_entropy(logits, labels, label_smoothing=0.2))
    smoother = LabelSmoother(epsilon=0.2)
    value("kLabelSmoother", smoother({"logits": logits}, labels))
    value("kWeighted", F.cross_entropy(logits, labels, weight=weights))
    both = F.cross_entropy(logits, labels, weight=weights, label_smoothing=0.2)
    value("kWeightedAndSmoothed", both)
    targets = (torch.rand(7, 3) < 0.4).double()
    array("double", "kTargets", targets.flatten().tolist())
    value("kBce", F.binary_cross_entropy_with_logits(logits, targets))
    value("kBcePosWeight", F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights))
    value("kMse", F.mse_loss(logits[:, 0], targets[:, 1]))
    truth, predicted = targets.int().numpy(), (logits > 0).int().numpy()
    for average in ("micro", "macro"):
        score = metrics.f1_score(truth, predicted, average=average, zero_division=0)
        value(f"kF1{average.capitalize()}", score)
    value("kSubsetAccuracy", metrics.accuracy_score(truth, predicted))


def early_stopping():
    """Values of evaluations, and after which of them transformers stops; 0: never."""
    cases = [
        (1, 0.0, False, [1.0, 0.9, 0.95, 0.8]),
        (2, 0.0, False, [1.0, 0.9, 0.95, 0.94, 0.8]),
        (2, 0.1, False, [1.0, 0.95, 0.91, 0.87, 0.5]),  # many small steps do not count
        (3, 0.0, True, [0.1, 0.1, 0.2, 0.2, 0.2, 0.2]),
        (2, 0.05, True, [0.5, 0.56, 0.6, 0.66, 0.7, 0.74]),
        (2, 0.0, True, [0.1, 0.2, 0.3, 0.4]),
    ]
    print("struct StoppingCase { int64_t patience; double threshold; bool greater;"
          " std::vector<double> values; int64_t stops_behind; };")
    print("inline const std::vector<StoppingCase> kStoppingCases = {")
    for patience, threshold, greater, values in cases:
        args = transformers.TrainingArguments(
            output_dir="unused", metric_for_best_model="score", greater_is_better=greater,
            eval_strategy="steps", report_to=[])
        state, control = TrainerState(), TrainerControl()
        callback = EarlyStoppingCallback(patience, threshold)
        stops = 0
        for number, score in enumerate(values, 1):
            callback.on_evaluate(args, state, control, {"eval_score": score})
            best = state.best_metric  # as Trainer._determine_best_metric
            if best is None or (score > best if greater else score < best):
                state.best_metric = score
            if control.should_training_stop:
                stops = number
                break
        text = ", ".join(map(repr, values))
        print(f"{{{patience}, {threshold}, {str(greater).lower()}, {{{text}}}, {stops}}},")
    print("};")


print(f"""// Made by tools/golden/trainer.py: torch {torch.__version__}, transformers
// {transformers.__version__}, scikit-learn {sklearn.__version__}.
#pragma once

#include <cstdint>
#include <vector>

namespace hasten::trainer_golden {{
""")
losses()
early_stopping()
print("\n} // namespace hasten::trainer_golden")
