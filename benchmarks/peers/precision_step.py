"""The peer of precision_step.cpp: transformers' BERT-base in bf16 by torch.autocast.

python precision_step.py [--smoke]

The quicker of its two kinds of attention; AdamW(fused=True); one thread.
"""

import argparse
import json
import statistics
import time

import torch
from transformers import BertConfig, BertForSequenceClassification

ROWS, TOKENS = 8, 128


def seconds(attention, rounds, layers):
    torch.manual_seed(1)
    config = BertConfig(num_hidden_layers=layers, attn_implementation=attention)
    model = BertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(1, 30000, (ROWS, TOKENS))
    mask, labels = torch.ones_like(ids), torch.randint(0, 2, (ROWS,))
    times = []
    for number in range(-1, rounds):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if number >= 0:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    torch.set_num_threads(1)
    best = min(seconds(attention, 1 if smoke else 3, 1 if smoke else 12) for attention in ("sdpa", "eager"))
    print(json.dumps({"case": "step_bf16", "unit": "s/step", "value": best}), flush=True)


main()
