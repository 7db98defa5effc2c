"""The peer of local_sgd_average.cpp: one average by Accelerate's LocalSGD, the same shapes.

python local_sgd_average.py bert-base|eleven-million|small-tensors [--rounds N]
Rank 0 prints one JSON line. Run by bench.py, which sets RANK and the rest of torchrun's
variables.
"""

import argparse
import json
import os
import statistics
import time

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD


def encoder_layers(layers, h):
    for _ in range(layers):
        for _ in range(4):
            yield from ((h, h), (h,))
        yield from ((4 * h, h), (4 * h,), (h, 4 * h), (h,), (h,), (h,), (h,), (h,))


def shapes_of(name):
    if name == "bert-base":
        first = [(30522, 768), (512, 768), (2, 768), (768,), (768,)]
        return first + list(encoder_layers(12, 768)) + [(768, 768), (768,)]
    if name == "eleven-million":
        return [(5948, 256)] + list(encoder_layers(12, 256))
    return [(1024,)] * 2000


class Shapes(torch.nn.Module):
    def __init__(self, shapes, value):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.full(shape, value) for shape in shapes])

    def forward(self, x):
        return sum(part.sum() for part in self.parts) * x


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=["bert-base", "eleven-million", "small-tensors"])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Shapes(shapes_of(options.case), 1.0))
    seconds = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=1) as local_sgd:
        for round in range(-2, options.rounds):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(accelerator.process_index + 1.0)
            accelerator.wait_for_everyone()
            start = time.perf_counter()
            local_sgd.step()
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
            if round >= 0:
                seconds.append(slowest.item())
    expected = (accelerator.num_processes + 1) / 2
    assert all(parameter.flatten()[-1] == expected for parameter in model.parameters())
    if accelerator.is_main_process:
        print(json.dumps({"seconds": statistics.median(seconds)}), flush=True)
    torch.distributed.destroy_process_group()
    os._exit(0)  # some of its Gloo programs abort in static destructors


main()
