"""Prints tests/optim/optimizer_golden.h: parameters of an MLP after steps of
PyTorch's AdamW, Adam and SGD, of transformers' Adafactor, and of Lion as
plain operations by the equations of its paper; and a matrix and its moments
after steps of bitsandbytes' AdamW8bit.

Run: python tools/golden/optimizers.py > tests/optim/optimizer_golden.h
     tools/format.sh tests/optim/optimizer_golden.h
"""

import math

import bitsandbytes
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
    # Its tensors have fewer than min_8bit_size elements.
    "adamw_8bit": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}


def to_nearest(values, code, absmax, codes, blocksize):
    """bitsandbytes' rule on CUDA. Its library for the CPU rounds small fp32 values to others."""
    blocks = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % blocksize)).view(-1, blocksize)
    absmax.copy_(blocks.abs().amax(1))
    shares = blocks / absmax.unsqueeze(1)
    nearest = (shares.unsqueeze(-1) - code).abs().argmin(-1)
    codes.copy_(nearest.flatten()[: codes.numel()].view_as(codes))


def steps_of_8_bits():
    """Every 45th element of the parameter, and of its moments. Gradients have seven decades."""
    count = 4500
    p = numbers(count, 0.37, 0.1).float().view(3, 1500).requires_grad_()
    scale = torch.tensor([10.0 ** -(i % 7) for i in range(count)], dtype=DOUBLE)
    bitsandbytes.backends.cpu.ops._quant_blockwise_fp32_direct = to_nearest
    optimizer = bitsandbytes.optim.AdamW8bit([p], lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(STEPS):
        p.grad = (numbers(count, 1.7, float(step)) * scale).float().view_as(p)
        optimizer.step()
    state = optimizer.state[p]
    found = {"parameters": p.detach()}
    for i, name in (("1", "exp_avg"), ("2", "exp_avg_sq")):
        found[name] = bitsandbytes.functional.dequantize_blockwise(
            state["state" + i], absmax=state["absmax" + i], code=state["qmap" + i], blocksize=256
        )
    return {name: tensor.flatten()[::45].tolist() for name, tensor in found.items()}


def main():
    print("// Written by tools/golden/optimizers.py with torch", torch.__version__.split("+")[0], end=" ")
    print("and transformers", transformers.__version__ + ",")
    print("// and with bitsandbytes", bitsandbytes.__version__, "on the CPU.")
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
    print("};\n")
    print("/// Every 45th element of a matrix and of its moments after as many steps of AdamW8bit.")
    print("inline const std::map<std::string, std::vector<double>> kAdamW8bit = {")
    for name, values in steps_of_8_bits().items():
        print(f'    {{"{name}",\n     {{' + ",\n      ".join(f"{v:.9g}" for v in values) + "}},")
    print("};\n\n} // namespace hasten::golden")


main()
