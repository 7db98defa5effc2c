"""The peer of exported_step.cpp: the same models in PyTorch, eager, with its AdamW, one thread.

python exported_step.py bert-mini|gpt2 ROWS TOKENS [--smoke]     prints {"seconds", "peak"}
python exported_step.py bert-mini|gpt2 --export MODEL.pt2         writes the exported model
"""

import argparse
import json
import os
import statistics
import time

import torch
import transformers
from torch.export import Dim, export
from torch.profiler import ProfilerActivity, profile


def model_of(name):
    torch.manual_seed(1)
    if name == "bert-mini":
        config = transformers.BertConfig(
            hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
        return transformers.BertForSequenceClassification(config).train()
    config = transformers.GPT2Config(
        vocab_size=5000, n_embd=320, n_layer=6, n_head=5, n_positions=512, use_cache=False)
    return transformers.GPT2LMHeadModel(config).train()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("sizes", nargs="*", type=int)
    parser.add_argument("--export")
    parser.add_argument("--smoke", action="store_true")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of(flags.model)
    if flags.export:
        example = {name: torch.ones(2, 9, dtype=torch.long) for name in ("input_ids", "attention_mask")}
        free = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in example}
        torch.export.save(export(model, (), example, dynamic_shapes=free, strict=False), flags.export)
        return
    rows, tokens = flags.sizes
    if "RANK" in os.environ:  # one of several
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(1, 4000, (rows, tokens))
    mask = torch.ones_like(ids)

    def step():
        adamw.zero_grad()
        scores = model(input_ids=ids, attention_mask=mask).logits.flatten(0, -2)
        labels = ids[:, 0] % 2 if scores.shape[0] == rows else ids.flatten()
        torch.nn.functional.cross_entropy(scores, labels).backward()
        adamw.step()

    seconds = []
    for number in range(-2, 1 if flags.smoke else 10):
        start = time.perf_counter()
        step()
        if number >= 0:
            seconds.append(time.perf_counter() - start)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    live = peak = 0
    for event in sorted((e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    print(json.dumps({"seconds": statistics.median(seconds), "peak": peak}))


if __name__ == "__main__":
    main()
