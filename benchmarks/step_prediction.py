"""Benchmark of the cost model: predicted steps compared with measured ones."""

import json

from sides import Case, environment, wait_all


class StepPrediction:
    """predict_step() of three strategies: how far it is from the step, compared with what it may be."""

    # "…_step": may be 10 % off. "…_exposed", the part that every rank waits: 15 %, or 3 % of the step.
    # "…_4_ranks": on whatever cores there are; only reported. "model": seconds to measure the costs.

    name = "step_prediction"
    rounds = 3
    peer_name = "allowed"
    strategies = ("ddp", "fsdp", "local_sgd")
    cases = [
        *(Case(f"{strategy}_{part}", "s", 1, 5) for strategy in strategies for part in ("step", "exposed")),
        *(Case(f"{strategy}_{part}_4_ranks", "s", float("inf"), 5) for strategy in strategies for part in ("step", "exposed")),
        Case("model", "s", float("inf"), 2, limit=1),
    ]

    def __init__(self, options):
        self.options = options

    def round(self):
        for ranks, end in ((2, ""), (4, "_4_ranks")):
            command = [self.options.programs / "hasten", "launch", "--nproc", ranks]
            command += [self.options.programs / "step_prediction", "--rounds", 1 if self.options.smoke else 15]
            output = wait_all([(list(map(str, command)), environment())]).output
            for line in map(json.loads, output.splitlines()):
                if "strategy" not in line:
                    if ranks == 2:
                        yield "model", line["model_seconds"], None
                    continue
                name, step, exposed = line["strategy"], line["seconds"], line["exposed_seconds"]
                allowed = (0.1 * step, max(0.15 * exposed, 0.03 * step))
                off = (line["predicted_seconds"] - step, line["predicted_exposed_seconds"] - exposed)
                for part, ours, most in zip(("step", "exposed"), off, allowed):
                    yield f"{name}_{part}{end}", abs(ours), most
