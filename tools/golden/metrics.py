"""Prints tests/metrics/metrics_golden.h: metrics of scikit-learn and SciPy.

Run: python tools/golden/metrics.py > tests/metrics/metrics_golden.h
     tools/format.sh tests/metrics/metrics_golden.h
"""

import warnings

import numpy as np
import scipy
import scipy.stats
import sklearn
from sklearn import metrics

warnings.filterwarnings("ignore")  # of the edge cases, which are wanted
random = np.random.default_rng(20)


def number(value):
    if np.isnan(value):
        return "kNan"
    return repr(float(value))


def array(kind, name, values):
    text = ", ".join(number(v) if kind == "double" else str(int(v)) for v in values)
    print(f"inline const std::vector<{kind}> {name} = {{{text}}};")


def value(name, result):
    print(f"inline constexpr double {name} = {number(result)};")


def classification():
    """Five labels: 3 is predicted only, 4 never occurs; label 2 is frequent."""
    truth = random.choice([0, 1, 2, 2, 2], 60)
    predicted = np.where(random.random(60) < 0.6, truth, random.choice([0, 1, 2, 3], 60))
    array("int64_t", "kLabels", truth)
    array("int64_t", "kPredicted", predicted)
    value("kAccuracy", metrics.accuracy_score(truth, predicted))
    value("kMatthews", metrics.matthews_corrcoef(truth, predicted))
    for average in ("micro", "macro", "weighted"):
        scores = metrics.precision_recall_fscore_support(
            truth, predicted, average=average, zero_division=0
        )
        for name, score in zip(("Precision", "Recall", "F1"), scores):
            value(f"k{average.capitalize()}{name}", score)
    matrix = metrics.confusion_matrix(truth, predicted, labels=range(5))
    array("int64_t", "kConfusion", matrix.flatten())


def auroc():
    """Probabilities of two decimals, so that there are ties."""
    truth = random.integers(0, 2, 50)
    scores = np.round(np.clip(0.3 * truth + random.random(50) * 0.8, 0, 1), 2)
    array("int64_t", "kBinaryLabels", truth)
    array("double", "kScores", scores)
    value("kAuroc", metrics.roc_auc_score(truth, scores))
    value("kAurocOneClass", metrics.roc_auc_score(np.ones(3), [0.1, 0.2, 0.3]))


def regression():
    targets = np.round(random.normal(3, 2, 40), 1)  # some are equal
    predictions = np.round(0.7 * targets + random.normal(0, 1, 40), 1)
    array("double", "kTargets", targets)
    array("double", "kPredictions", predictions)
    value("kMse", metrics.mean_squared_error(targets, predictions))
    value("kRmse", metrics.root_mean_squared_error(targets, predictions))
    value("kMae", metrics.mean_absolute_error(targets, predictions))
    value("kR2", metrics.r2_score(targets, predictions))
    value("kPearson", scipy.stats.pearsonr(predictions, targets).statistic)
    value("kSpearman", scipy.stats.spearmanr(predictions, targets).statistic)
    alike = [0.5, 0.5, 0.5]
    value("kR2AlikeRight", metrics.r2_score(alike, alike))
    value("kR2AlikeWrong", metrics.r2_score(alike, [0.1, 0.2, 0.3]))
    value("kR2OneRow", metrics.r2_score([1.0], [2.0]))
    value("kPearsonAlike", scipy.stats.pearsonr(alike, [1.0, 2.0, 3.0]).statistic)
    value("kSpearmanAlike", scipy.stats.spearmanr(alike, [1.0, 2.0, 3.0]).statistic)


print(
    f"""// Written by tools/golden/metrics.py with scikit-learn {sklearn.__version__} and SciPy
// {scipy.__version__}.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace hasten::golden {{

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
"""
)
classification()
auroc()
regression()
print("\n} // namespace hasten::golden")
