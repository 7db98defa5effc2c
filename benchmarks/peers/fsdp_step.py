"""The peer of fsdp_step.cpp: torch's fully_shard, block by block, on Gloo.

python fsdp_step.py [--alone 1] [--layers N] [--width N] [--rows N] [--tokens N] [--steps N]
Rank 0 prints one JSON line. Alone: every rank has its own model. Run by bench.py, which sets RANK and the rest of torchrun's
variables.
"""

import argparse
import json
import os
import statistics
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

WARM_UP = 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, tokens, 3, width // 64, 64).permute(2, 0, 3, 1, 4).unbind(0)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, width, tokens):
        super().__init__()
        self.words, self.places = nn.Embedding(2048, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.words.weight)


def main():
    parser = argparse.ArgumentParser()
    for name, value in (("layers", 6), ("width", 384), ("rows", 4), ("tokens", 128), ("steps", 20), ("alone", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = Gpt(options.layers, options.width, options.tokens)
    for part in () if options.alone else (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 2048, (options.rows, options.tokens))
    labels = torch.randint(0, 2048, (options.rows * options.tokens,))
    seconds, gradients = [], []
    for step in range(-WARM_UP, options.steps):
        if step == 0:
            torch.distributed.barrier()
        start = time.perf_counter()
        nn.functional.cross_entropy(model(ids).flatten(0, 1), labels).backward()
        derived = time.perf_counter() - start
        optimizer.step()
        optimizer.zero_grad()
        if step >= 0:
            seconds.append(time.perf_counter() - start)
            gradients.append(derived)
    if torch.distributed.get_rank() == 0:
        times = {"seconds": statistics.median(seconds), "gradient_seconds": statistics.median(gradients)}
        print(json.dumps(times), flush=True)
    torch.distributed.destroy_process_group()
    os._exit(0)


main()
