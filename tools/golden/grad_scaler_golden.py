#!/usr/bin/env python3
"""Writes tests/amp/grad_scaler_golden.h: scales of torch.amp.GradScaler and the
parameters it leads to.

Needs torch. The reference is torch's scaler on the CPU, with a parameter of three
numbers stepped by torch.optim.SGD; planted infinities and NaN stand for overflows.
"""

import pathlib
import random

import torch

HEADER = """// Made by tools/golden/grad_scaler_golden.py with torch.amp.GradScaler (torch {version}).
#pragma once

#include <string>
#include <vector>

namespace hasten {{

struct ScalerGolden {{
  double init_scale, growth_factor, backoff_factor;
  long growth_interval;
  // A letter a step: '.' finite gradients, 'i' an infinity, 'n' a NaN.
  std::string steps;
  // After each step: the scale, the tracker, the parameter's first number.
  std::vector<double> scales;
  std::vector<long> trackers;
  std::vector<double> parameters;
}};

inline const std::vector<ScalerGolden> kScalerGoldens = {{
{goldens}
}};

}} // namespace hasten
"""


def run(init, growth, backoff, interval, steps):
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = torch.optim.SGD([parameter], lr=0.125, momentum=0.5)
    scales, trackers, values = [], [], []
    for step in steps:
        optimizer.zero_grad()
        scaler.scale((parameter * parameter).sum() / 4).backward()
        if step != ".":
            parameter.grad[1] = float("inf" if step == "i" else "nan")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        trackers.append(scaler._get_growth_tracker())
        values.append(parameter[0].item())
    return scales, trackers, values


def main():
    random.seed(7)
    draws = "".join(random.choice("......in") for _ in range(48))
    cases = [
        (65536.0, 2.0, 0.5, 2000, "i" * 20 + "." * 4),  # through 1 and below
        (65536.0, 2.0, 0.5, 3, draws),
        (3.0, 1.5, 0.7, 2, draws),  # no powers of two: rounded to fp32
        (2.0**126, 2.0, 0.5, 1, "..." + "i" + "...."),  # the end of fp32
    ]
    text = []
    for init, growth, backoff, interval, steps in cases:
        scales, trackers, values = run(init, growth, backoff, interval, steps)
        print(steps, scales[-1], values[-1])
        rows = [
            "{" + ", ".join(float(x).hex() for x in scales) + "}",
            "{" + ", ".join(str(x) for x in trackers) + "}",
            "{" + ", ".join(float(x).hex() for x in values) + "}",
        ]
        text.append(
            f"      {{{float(init).hex()}, {growth}, {backoff}, {interval}, \"{steps}\",\n       " + ",\n       ".join(rows) + "},"
        )
    path = pathlib.Path(__file__).parents[2] / "tests/amp/grad_scaler_golden.h"
    path.write_text(HEADER.format(version=torch.__version__, goldens="\n".join(text)))


if __name__ == "__main__":
    main()
