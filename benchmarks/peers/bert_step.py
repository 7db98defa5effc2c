"""The peer of bert_step.cpp: transformers' BERT, forward and backward, one thread.

python bert_step.py [--rounds N] [--smoke] [--attention sdpa|eager]
"""

import argparse
import json
import statistics
import time

import torch
from transformers import BertConfig, BertForSequenceClassification

ROWS = 16
SHAPES = {"bert-mini": (4, 256, 4), "6x384": (6, 384, 12)}


def seconds_per_thousand(shape, tokens, padding, attention, rounds):
    torch.manual_seed(1)
    layers, width, heads = SHAPES[shape]
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        intermediate_size=4 * width, attn_implementation=attention)
    model = BertForSequenceClassification(config).train()
    ids = torch.randint(1, 30000, (ROWS, tokens))
    mask = torch.ones_like(ids)
    if padding:
        mask[1::2, tokens * 3 // 4:] = 0
    labels = torch.randint(0, 2, (ROWS,))
    seconds = []
    for number in range(-2, rounds):
        start = time.perf_counter()
        model.zero_grad(set_to_none=False)
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        if number >= 0:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1000 / ROWS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for shape in SHAPES:
        for tokens in (32, 64, 128):
            for padding in (False, True):
                if options.smoke and (tokens > 32 or padding):
                    continue
                value = seconds_per_thousand(
                    shape, tokens, padding, options.attention,
                    1 if options.smoke else options.rounds)
                print(json.dumps({
                    "case": f"{shape}, {tokens} tokens" + (", padded" if padding else ""),
                    "unit": "s/1000", "value": round(value, 6)}), flush=True)


main()
