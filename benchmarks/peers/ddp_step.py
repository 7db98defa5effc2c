"""The peer of ddp_step.cpp: torch's DistributedDataParallel, the same two models.

python ddp_step.py bert-mini|small-tensors [--steps N]
One process where RANK is not set: the plain loop. Rank 0 prints one JSON line. Run by
bench.py, which sets RANK and the rest of torchrun's variables.
"""

import argparse
import json
import os
import statistics
import time

import torch

WARM_UP = 5


class SmallTensors(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(64)) for _ in range(2000)])

    def forward(self, x):
        y = x
        for part in self.parts:
            y = torch.addcmul(y, x, part)
        return y


def bert_mini():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    model = BertForSequenceClassification(config).train()
    ids = torch.randint(1, 30000, (8, 64))
    mask, labels = torch.ones_like(ids), torch.randint(0, 2, (8,))
    return model, lambda wrapped: wrapped(input_ids=ids, attention_mask=mask, labels=labels).loss


def small_tensors():
    x = torch.randn(64)
    return SmallTensors(), lambda wrapped: wrapped(x).sum()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=["bert-mini", "small-tensors"])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, loss = bert_mini() if options.case == "bert-mini" else small_tensors()
    distributed = "RANK" in os.environ
    if distributed:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    seconds = []
    for step in range(-WARM_UP, options.steps):
        if step == 0 and distributed:
            torch.distributed.barrier()
        start = time.perf_counter()
        loss(model).backward()
        model.zero_grad()
        if step >= 0:
            seconds.append(time.perf_counter() - start)
    if not distributed or torch.distributed.get_rank() == 0:
        print(json.dumps({"seconds": statistics.median(seconds)}), flush=True)
    if distributed:
        torch.distributed.destroy_process_group()
    # Some of its Gloo programs abort in static destructors even so.
    os._exit(0)


main()
