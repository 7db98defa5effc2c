"""Prints tests/optim/optimizer_golden.h: parameters of an MLP after steps of
PyTorch's AdamW, Adam and SGD, of transformers' Adafactor, and of Lion as
plain operations by the equations of its paper.

Run: python tools/golden/optimizers.py > tests/optim/optimizer_golden.h
     tools/format.sh tests/optim/optimizer_golden.h
"""

import math

import torch
import transformers
from transformers.optimization import Adafactor

STEPS = 20
SHAPES = [(5, 3), (5,), (2, 5), (2,)]
DOUBLE = torch.float64


def numbers(count, a, b):
    return torch.tensor([math.sin(a * i + b) for i in range(count)], dtype=DOUBLE)


def parameters():
    made = [0.5 * numbers(math.prod(s), 1.3, 0.7 + i).view(s) for i, s in enumerate(SHAPES)]
    return [p.clone().requires_grad_() for p in made]


def loss(p):
    x, y = numbers(12, 0.9, 0.2).view(4, 3), numbers(8, 2.1, 0.4).view(4, 2)
    return (torch.tanh(x @ p[0].T + p[1]) @ p[2].T + p[3] - y).square().mean()


class Lion:
    """Chen and others, arXiv 2302.06675, algorithm 2."""

    def __init__(self, params, lr, betas, weight_decay):
        self.p, self.lr, self.betas, self.decay = params, lr, betas, weight_decay
        self.m = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self):
        b1, b2 = self.betas
        for p, m in zip(self.p, self.m):
            c = b1 * m + (1 - b1) * p.grad
            p -= self.lr * (torch.sign(c) + self.decay * p)
            m.copy_(b2 * m + (1 - b2) * p.grad)


CASES = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, amsgrad=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.05),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.2),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.05),
    "adafactor_relative": lambda p: Adafactor(p),
    "adafactor_warmup_beta1": lambda p: Adafactor(p, warmup_init=True, beta1=0.9),
    "adafactor_lr": lambda p: Adafactor(
        p, lr=0.02, relative_step=False, scale_parameter=False, weight_decay=0.1, clip_threshold=0.7
    ),
    "lion": lambda p: Lion(p, 0.01, (0.9, 0.99), 0.1),
}


def main():
    print("// Written by tools/golden/optimizers.py with torch", torch.__version__.split("+")[0], end=" ")
    print("and transformers", transformers.__version__ + ".")
    print("#pragma once\n\n#include <map>\n#include <string>\n#include <vector>\n")
    print("namespace hasten::golden {\n")
    print(f"/// Parameters of the MLP after {STEPS} updates, in fp64, one after the other.")
    print("inline const std::map<std::string, std::vector<double>> kOptimizers = {")
    for name, make in CASES.items():
        p = parameters()
        optimizer = make(p)
        for _ in range(STEPS):
            for q in p:
                q.grad = None
            loss(p).backward()
            optimizer.step()
        values = torch.cat([q.detach().flatten() for q in p]).tolist()
        print(f'    {{"{name}",\n     {{' + ",\n      ".join(f"{v:.17g}" for v in values) + "}},")
    print("};\n\n} // namespace hasten::golden")


main()
