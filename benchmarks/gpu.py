"""hasten's Trainer on a GPU compared with Hugging Face's, with a plain loop, and with what the
GPU can do."""

import dataclasses
import json

from sides import Bench, Case, environment, run_peer, wait_all

BATCH = 32
TOKENS = {128: 0.77, 512: 0.95}  # tokens a sample: the ratio to Hugging Face's Trainer
PLAIN, PLAIN_IF_LAUNCHES_BOUND = 1.02, 0.91
ADAMW_BYTES = 7 * 4  # a parameter: it reads weight, gradient and two moments, and writes three


class Gpu(Bench):
    """BERT-base in bf16 on a GPU, one process: the Trainer, a plain loop, the GPU's limits."""

    # "…_over_floor": a step compared with the longer of two: its products, 6 * parameters * tokens
    # operations at the rate of a large bf16 product, together with AdamW's bytes at the rate of a
    # large copy; or its launches at what a launch costs. All rates are measured in this run.

    name = "gpu"
    rounds = 3
    plain = "plain LibTorch loop"

    def __init__(self, options):
        self.options = options
        self.device = options.device or ("cpu" if options.smoke else "cuda")
        self.cases = [
            case
            for tokens, most in TOKENS.items()
            for case in (
                Case(f"{tokens}_step", "s/step", most, 5),
                Case(f"{tokens}_step_over_plain", "s/step", PLAIN, 5, peer=self.plain),
                Case(f"{tokens}_peak", "bytes", 1.0, 0),
                Case(f"{tokens}_peak_over_plain", "bytes", float("inf"), 0, peer=self.plain),
                Case(f"{tokens}_first_step", "s", 0.5),
                Case(f"{tokens}_launches", "launches/step", float("inf"), 0),
                Case(f"{tokens}_launches_over_plain", "launches/step", float("inf"), 0, peer=self.plain),
                Case(f"{tokens}_over_floor", "s/step", float("inf"), 5, peer="floor"),
            )
        ]

    def flags(self, tokens):
        flags = ["--device", self.device, "--batch", BATCH, "--tokens", tokens, "--steps", 40]
        return list(map(str, flags)) + ["--batch", "2", "--steps", "2", "--smoke"] * self.options.smoke

    def program(self, mode, tokens):
        """What gpu_step prints, with the seconds from its start to its first step."""
        command = [self.options.programs / "gpu_step", mode, *self.flags(tokens)]
        more = {}
        if self.device == "test_device":  # tests/support/preloaded_device.cpp
            more["LD_PRELOAD"] = str(self.options.programs / "test_device.so")
        process = wait_all([(list(map(str, command)), environment(more))])
        return self.from_start(process, json.loads(process.output.splitlines()[-1]))

    def peer(self, tokens):
        return self.from_start(*run_peer(self.options, "gpu_step.py", *self.flags(tokens), ranks=1))

    @staticmethod
    def from_start(process, report):
        return report | {"first_step": report.get("first_step", 0) - process.start}

    def floor(self, limits, step, tokens):
        """The least seconds of a step, and whether launches take the longest."""
        products = 6 * step["in_products"] * BATCH * tokens / limits["flops"]
        computed = products + ADAMW_BYTES * step["parameters"] / limits["bytes"]
        launched = step["launches"] * limits["launch"]
        return max(computed, launched), launched > computed

    def hold_plain_to(self, tokens, most):
        name = f"{tokens}_step_over_plain"
        self.cases = [dataclasses.replace(case, most=most) if case.name == name else case for case in self.cases]

    def round(self):
        limits = self.program("floor", 128)
        for tokens in TOKENS:
            ours, plain = self.program("trainer", tokens), self.program("plain", tokens)
            peer = self.peer(tokens) if self.options.peers else {}
            launches_bind = self.floor(limits, plain, tokens)[1]
            self.hold_plain_to(tokens, PLAIN_IF_LAUNCHES_BOUND if launches_bind else PLAIN)
            for value, row in (("step", "step"), ("peak_bytes", "peak"), ("first_step", "first_step"), ("launches", "launches")):
                yield f"{tokens}_{row}", ours[value], peer.get(value)
                if row != "first_step":
                    yield f"{tokens}_{row}_over_plain", ours[value], plain[value]
            yield f"{tokens}_over_floor", ours["step"], self.floor(limits, ours, tokens)[0]
