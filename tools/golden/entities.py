"""Prints tests/tasks/entities_golden.h: scores of the Python package seqeval.

Run: python tools/golden/entities.py > tests/tasks/entities_golden.h
     tools/format.sh tests/tasks/entities_golden.h
"""

import random
import warnings

from seqeval.metrics import accuracy_score, classification_report, f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities

warnings.filterwarnings("ignore")  # of invalid sequences, which are wanted
random.seed(7)
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "S-LOC", "E-PER", "MISC", "I-A-B"]


def sentence(length, source=None):
    """Random tags; or those of `source` with one of four changed."""
    tags = source or random.choices(LABELS, weights=[4, 2, 2, 2, 2, 1, 1, 1, 1], k=length)
    return [random.choice(LABELS) if source and random.random() < 0.25 else tag for tag in tags]


truth = [sentence(random.randint(1, 12)) for _ in range(200)]
predicted = [sentence(0, tags) for tags in truth]
number = {label: i for i, label in enumerate(LABELS)}

print("// Scores of seqeval, by tools/golden/entities.py.\n#pragma once\n")
print("#include <cstdint>\n#include <map>\n#include <string>\n#include <vector>\n")
print("namespace hasten::entities_golden {\n")
quoted = ", ".join(f'"{label}"' for label in LABELS)
print(f"inline const std::vector<std::string> kLabels = {{{quoted}}};")
for name, rows in (("kTruth", truth), ("kPredicted", predicted)):
    lists = ", ".join("{" + ", ".join(str(number[tag]) for tag in tags) + "}" for tags in rows)
    print(f"inline const std::vector<std::vector<int64_t>> {name} = {{{lists}}};")

values = {"precision": precision_score(truth, predicted), "recall": recall_score(truth, predicted), "f1": f1_score(truth, predicted), "accuracy": accuracy_score(truth, predicted)}
print("inline const std::map<std::string, double> kValues = {" + ", ".join(f'{{"{k}", {float(v)!r}}}' for k, v in values.items()) + "};")
print("struct Scores { double precision, recall, f1; int64_t support; };")
report = classification_report(truth, predicted, output_dict=True)
types = sorted(key for key in report if not key.endswith(" avg"))
print("inline const std::map<std::string, Scores> kTypes = {" + ", ".join(
    f'{{"{key}", {{{float(report[key]["precision"])!r}, {float(report[key]["recall"])!r}, {float(report[key]["f1-score"])!r}, {int(report[key]["support"])}}}}}'
    for key in types) + "};")
print(f"inline constexpr int64_t kEntities = {len(get_entities(truth))}; // in kTruth")
print("\n} // namespace hasten::entities_golden")
