"""The peer of optimizer_step.cpp: PyTorch's AdamW(fused=True), the same shapes.

python optimizer_step.py [--steps N]
Prints one JSON line per case: {"case", "step", "all"}, median seconds of processor time of the step alone
and of unscale + clip_grad_norm_ + step + zero_grad(set_to_none=False).
"""

import argparse
import json
import statistics
import time

import torch

HIDDEN = 768


def bert_base():
    shapes = [(30522, HIDDEN), (512, HIDDEN), (2, HIDDEN), (HIDDEN,), (HIDDEN,)]
    for _ in range(12):
        shapes += [(HIDDEN, HIDDEN), (HIDDEN,)] * 4 + [(HIDDEN,)] * 2
        shapes += [(4 * HIDDEN, HIDDEN), (4 * HIDDEN,), (HIDDEN, 4 * HIDDEN), (HIDDEN,)] + [(HIDDEN,)] * 2
    return shapes + [(HIDDEN, HIDDEN), (HIDDEN,)]


def median_seconds(steps, act):
    seconds = []
    for step in range(-2, steps):
        start = time.thread_time()
        act()
        if step >= 0:
            seconds.append(time.thread_time() - start)
    return statistics.median(seconds)


def measure(name, shapes, steps):
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    gradients = [parameter.grad for parameter in parameters]

    def everything():
        torch._foreach_mul_(gradients, 0.5)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        gradients[0].view(-1)[0] = 1

    result = {"case": name, "step": median_seconds(steps, optimizer.step)}
    result["all"] = median_seconds(steps, everything)
    print(json.dumps(result), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure("bert_base", bert_base(), options.steps)
    measure("small_tensors", [(256,)] * 2000, 20 * options.steps)


main()
