"""The peer of checkpoint_overhead.cpp: torch.utils.checkpoint, non-reentrant, and its
selective form, one thread. Peaks count torch's CPU allocations of one step.

python checkpoint_overhead.py [--smoke]
"""

import argparse
import functools
import json
import statistics
import time

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import BertConfig, BertForSequenceClassification

REGIONS = 100
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def median_seconds(rounds, run):
    seconds = []
    for number in range(-1, rounds):
        start = time.perf_counter()
        run()
        if number >= 0:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def say(case, unit, value):
    print(json.dumps({"case": case, "unit": unit, "value": value}), flush=True)


def region_overhead(smoke):
    rounds = 2 if smoke else 20
    layer = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)

    def fn(value):
        return torch.relu(layer(value))

    def derive(region):
        outputs = [checkpoint(fn, x, use_reentrant=False) if region else fn(x) for _ in range(REGIONS)]
        torch.stack(outputs).sum().backward()

    plain = median_seconds(rounds, lambda: derive(False))
    again = median_seconds(rounds, lambda: [fn(x) for _ in range(REGIONS)])
    region = median_seconds(rounds, lambda: derive(True))
    say("region_overhead", "us/region", 1e6 * (region - plain - again) / REGIONS)
    say("region", "us/region", 1e6 * region / REGIONS)


def peak_bytes(step):
    """The largest sum of the profiler's memory events over one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def policy(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def whole_models(smoke):
    torch.manual_seed(1)
    rows, tokens = (2, 16) if smoke else (16, 128)
    layers, width, heads = (2, 128, 2) if smoke else (4, 256, 4)
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width)
    model = BertForSequenceClassification(config).train()
    ids = torch.randint(1, 30000, (rows, tokens))
    labels = torch.randint(0, 2, (rows,))
    model(input_ids=ids, labels=labels).loss.backward()

    def step():
        model.zero_grad(set_to_none=False)
        model(input_ids=ids, labels=labels).loss.backward()

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    forms = {
        "none": None,
        "full": {"use_reentrant": False},
        "ops": {"use_reentrant": False, "context_fn": contexts},
    }
    for name, arguments in forms.items():
        if arguments is None:
            model.gradient_checkpointing_disable()
        else:
            model.gradient_checkpointing_enable(arguments)
        say(f"bert_mini_{name}", "s/step", median_seconds(1 if smoke else 9, step))
        say(f"bert_mini_{name}_peak", "bytes", peak_bytes(step))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    region_overhead(options.smoke)
    whole_models(options.smoke)


main()
