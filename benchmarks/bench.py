"""Runs benchmarks: ours and the peer interleaved, median of the rounds, one report.

Called by scripts/bench.sh, which builds our side and installs the peer's. A benchmark
is a class below with `cases` and `round()`; every value is a time, bytes or a count of
mistakes, so below 1 is better for us. The report is
{"benchmark", "machine", "torch", "commit",
 "rows": [{"case", "unit", "ours", "peer", "peer_name", "limit", "ratio", "spread"}]}
with ratio = ours / peer of the medians, spread = [least, largest] ratio of a round and
limit = the physical or analytic bound in the same unit, null where there is none.
With --before FOLDER the other side is the programs in FOLDER, those of an earlier commit.
"""

import argparse
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time

from decoders import Decoders, Tinyshakespeare
from download import Download
from families import Families
from fsdp import FsdpMemory, FsdpStep
from gpu import Gpu
from hosts import Hosts
from links import Links
from local_sgd import LocalSGDAverage, LocalSGDReviews, LocalSGDW8a, SlowLink
from precision import Precision
from resident_memory import ResidentMemory
from sides import PICTURES, RANKS, ROOT, Bench, Case, at_once, environment, launched, peer_ranks, wait_all
from tokenizers_bench import Tokenizers

PEER = "Hugging Face Trainer"
MOST_OF_BEFORE = 1.03  # of an earlier commit, in cases that are held to a ratio at all


class FirstStep(threading.Thread):
    """Notes when metrics.jsonl gets the record of the first step, which is written through
    as soon as its loss is known."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self.path, self.seen = path, None
        path.unlink(missing_ok=True)
        self.start()

    def run(self):
        for _ in range(60_000):
            try:
                if '"train"' in self.path.read_text():
                    self.seen = time.time()
                    return
            except FileNotFoundError:
                pass
            time.sleep(0.002)

    def time(self):
        self.join(1)
        return self.seen


class Startup(Bench):
    """From the start of the program to the end of the first optimizer step."""

    # "…_cached": the token ids are there from the run before.

    name = "startup"
    rounds = 5
    cases = [Case("first_step_bert_mini", "s", 0.16), Case("first_step_bert_mini_cached", "s", 0.18)]

    def round(self):
        cache = self.work / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        flags = ["--max-steps", "1", "--logging-steps", "1", "--per-device-train-batch-size", "8"]
        flags += ["--eval-strategy", "no", "--cache-dir", cache]
        for case in self.cases:
            watch = FirstStep(self.work / "out/metrics.jsonl")
            process = self.ours("bert-mini", *flags)
            yield case.name, watch.time() - process.start, None
        if self.options.peers:
            process, report = self.peer("bert-mini", "--max-steps", "1", "--batch-size", "8", "--padding", "grouped")
            for case in self.cases:
                yield case.name, None, report["first_step_time"] - process.start


class TrainerReviews(Bench):
    """Fine-tuning on short reviews, two ranks of one thread: time and memory."""

    name = "trainer_reviews"
    rounds = 3
    cases = [
        Case("grouped_fp32", "s/1000 samples", 0.80),
        Case("defaults", "s/1000 samples", 0.14),
        Case("defaults_peak_resident", "bytes a rank", 0.55, 0),
    ]
    batch = 32

    def seconds(self):
        record = next(record for record in reversed(self.records()) if "train_runtime" in record)
        return 1000 / record["train_samples_per_second"]

    def round(self):
        steps = 4 if self.options.smoke else 60
        same = ["--max-steps", str(steps)]
        self.ours("bert-mini", *same, "--eval-strategy", "no", "--per-device-train-batch-size", str(self.batch))
        seconds = self.seconds()
        yield "grouped_fp32", seconds, None
        yield "defaults", seconds, None
        yield "defaults_peak_resident", self.peak(), None
        if not self.options.peers:
            return
        same += ["--batch-size", str(self.batch)]
        _, report = self.peer("bert-mini", *same, "--padding", "grouped")
        yield "grouped_fp32", None, 1000 * report["train_runtime"] / report["samples"]
        process, report = self.peer("bert-mini", *same, "--padding", "max_length")
        yield "defaults", None, 1000 * report["train_runtime"] / report["samples"]
        yield "defaults_peak_resident", None, process.peak_bytes


class Tracking(Bench):
    """Trackers, report and progress of a run with a record for each step, compared with none."""

    name = "tracking"
    rounds = 5
    peer_name = "no trackers, no progress"
    cases = [Case("bert_mini", "s/step", 1.01, 5)]

    def round(self):
        flags = ["--max-steps", "4" if self.options.smoke else "150", "--logging-steps", "1"]
        flags += ["--eval-strategy", "no", "--per-device-train-batch-size", "8"]
        sides = [["--report-to", "tensorboard,csv,html"], ["--report-to", "none", "--disable-tqdm"]]
        seconds = []
        for side in sides:
            self.ours("bert-mini", *flags, *side, ranks=1)
            seconds.append(next(1 / r["train_steps_per_second"] for r in self.records() if r["type"] == "end"))
        yield "bert_mini", *seconds


class TrainerAccuracy(Bench):
    """Mistakes after fine-tuning, the same model, data, epochs: mean of three seeds."""

    name = "trainer_accuracy"
    rounds = 3
    # One percentage point is the bound. It is stated here; the reader of the row compares.
    cases = [Case("minilm", "mistakes/1000 rows", float("inf"), 1), Case("bert_mini", "mistakes/1000 rows", float("inf"), 1)]
    middle = staticmethod(statistics.mean)
    settings = {"minilm": ("minilm", "2", "5e-5"), "bert_mini": ("bert-mini", "3", "3e-4")}
    seed = 0

    def round(self):
        self.seed += 1
        for case, (model, epochs, rate) in self.settings.items():
            same = ["--seed", str(self.seed), "--learning-rate", rate]
            flags = ["--per-device-train-batch-size", "16", "--num-train-epochs", "0.05" if self.options.smoke else epochs]
            self.ours(model, *same, *flags, "--eval-file", self.eval)
            accuracy = next(r["eval_accuracy"] for r in reversed(self.records()) if "eval_accuracy" in r)
            yield case, 1000 * (1 - accuracy), None
            if self.options.peers:
                flags = ["--batch-size", "16", "--epochs", epochs, "--eval", self.eval, "--padding", "grouped"]
                _, report = self.peer(model, *same, *flags)
                yield case, None, 1000 * (1 - report["accuracy"])


class LoopOverhead(Bench):
    """A loop of ours compared with one written by hand, one process, one thread."""

    rounds = 5

    def __init__(self, options):  # no data: both loops get the same made-up batches
        self.options = options

    def round(self):
        command = [self.options.programs / self.name] + ["--smoke"] * self.options.smoke
        output = wait_all([(list(map(str, command)), environment())]).output
        values = {line["case"]: line for line in map(json.loads, output.splitlines())}
        bert, ten = values["bert_mini"], values["ten_parameters"]
        yield "bert_mini", bert["ours"], bert["plain"]
        yield "ten_parameters", 1e6 * ten["ours"], 1e6 * ten["plain"]
        yield "ten_parameters_extra", 1e6 * (ten["ours"] - ten["plain"]), None


class TrainerOverhead(LoopOverhead):
    """The Trainer's steps compared with a hand-written loop's, one process, one thread."""

    name = "trainer_overhead"
    peer_name = "loop by hand"
    cases = [
        Case("bert_mini", "s/step", 1.02, 5),
        Case("ten_parameters", "us/step", float("inf"), 2),
        Case("ten_parameters_extra", "us/step", float("inf"), 2),
    ]


class AcceleratorOverhead(LoopOverhead):
    """The accelerator's loop compared with LibTorch's own, one process, one thread."""

    name = "accelerator_overhead"
    peer_name = "plain LibTorch loop"
    cases = [
        Case("bert_mini", "s/step", 1.01, 5),
        Case("ten_parameters", "us/step", float("inf"), 2),
        Case("ten_parameters_extra", "us/step", float("inf"), 2, limit=15),
    ]


class DdpStep(Bench):
    """Forward, backward and reduction on two ranks of one thread, compared with torch's own DDP."""

    # "…_over_alone": what a step takes longer than the same one in one process. Memory is
    # ours alone, in gradient copies: what a rank of two holds more than one process, whose
    # gradients stay allocated, as they do between the batches of a window, or are freed
    # after each step. The small tensors have 512 KB, and what a rank shares 1 MiB. "self_rows":
    # batches of 32 samples a rank, compared with two processes at the same time that do not
    # communicate. "exposed_…": the share of a step in which a rank waits for communication, by
    # samples a rank.

    name = "ddp_step"
    rounds = 5
    peer_name = "PyTorch DDP"
    cases = [
        case
        for model, most, extra in (("bert_mini", 0.85, 0.05), ("small_tensors", 0.45, 2.1))
        for case in (
            Case(model, "s/step", most, 5),
            Case(f"{model}_over_alone", "s/step", float("inf"), 5),
            Case(f"{model}_extra_memory", "gradient copies", float("inf"), 4, limit=extra),
            Case(f"{model}_over_freed", "gradient copies", float("inf"), 4),
        )
    ] + [
        Case("exposed_8_rows", "share", float("inf"), 4, limit=0.08),
        Case("exposed_32_rows", "share", float("inf"), 4, limit=0.03),
        Case("self_rows", "s/step", 1.15, 5, peer="two processes, each alone"),
    ]

    def __init__(self, options):
        self.options = options

    def round(self):
        for case, steps in (("bert-mini", 40), ("small-tensors", 100)):
            row = case.replace("-", "_")
            same = [case, "--steps", 2 if self.options.smoke else steps]
            ours = launched(self.options, "ddp_step", *same)
            alone = launched(self.options, "ddp_step", *same, ranks=1)
            kept = launched(self.options, "ddp_step", *same, "--keep", ranks=1)
            yield row, ours["seconds"], None
            if case == "bert-mini":
                yield "exposed_8_rows", ours["exposed_seconds"] / ours["seconds"], None
            yield f"{row}_over_alone", ours["seconds"] - alone["seconds"], None
            for name, other in (("extra_memory", kept), ("over_freed", alone)):
                yield f"{row}_{name}", (ours["peak_bytes"] - other["peak_bytes"]) / other["gradient_bytes"], None
            if self.options.peers:
                peer, alone = (peer_ranks(self.options, "ddp_step.py", *same, ranks=ranks) for ranks in (RANKS, 1))
                yield row, None, peer["seconds"]
                yield f"{row}_over_alone", None, peer["seconds"] - alone["seconds"]
        same = ["bert-mini", "--batch", 4 if self.options.smoke else 32, "--steps", 2 if self.options.smoke else 10]
        for turn in range(1 if self.options.smoke else 4):
            # What else the machine does meets both: short pieces, and each side is the first in half of them.
            sides = {}
            for run in (launched, at_once) if turn % 2 == 0 else (at_once, launched):
                sides[run] = run(self.options, "ddp_step", *same)
            ours = sides[launched]
            yield "exposed_32_rows", ours["exposed_seconds"] / ours["seconds"], None
            yield "self_rows", ours["seconds"], statistics.mean(one["seconds"] for one in sides[at_once])


class Collectives(Bench):
    """Collectives alone, two ranks: through shared memory, compared with Gloo; best against best."""

    # "…_of_copy": how many times as long as copying the bytes in each rank's own memory, the limit.
    # "…_elsewhere": tensors that are not the group's, so that they are copied.
    # "…_4_ranks": the median of as many ranks, on whatever cores there are.

    name = "collectives"
    rounds = 3
    peer_name = "Gloo"
    middle = staticmethod(min)
    sizes = {"4k": 1 / 15, "256k": 1 / 4.5, "4096k": 1 / 2.4, "65536k": 1 / 2.4}
    cases = [
        *(Case(f"all_reduce_{size}", "us", most, 1) for size, most in sizes.items()),
        *(Case(f"all_reduce_elsewhere_{size}", "us", float("inf"), 1) for size in sizes),
        *(Case(f"reduce_scatter_{size}", "us", 0.25, 1) for size in sizes),
        *(Case(f"all_gather_{size}", "us", float("inf"), 1) for size in sizes),
        Case("all_reduce_65536k_of_copy", "copies", float("inf"), 2, limit=1.4),
        Case("barrier", "us", float("inf"), 1, limit=10),
        Case("values", "us", float("inf"), 1),
        *(Case(f"all_reduce_{size}_4_ranks", "us", 1.05, 1) for size in sizes),
    ]

    def __init__(self, options):
        self.options = options

    def round(self):
        ours, gloo = (launched(self.options, "collectives", backend) for backend in ("shm", "gloo"))
        for case in self.cases:
            if case.name in ours:
                yield case.name, *(1e6 * side[case.name]["best"] for side in (ours, gloo))
        copies = ours["all_reduce_65536k"]["best"] / ours["copy_65536k"]["best"]
        yield "all_reduce_65536k_of_copy", copies, None
        ours, gloo = (launched(self.options, "collectives", backend, ranks=4) for backend in ("shm", "gloo"))
        for size in self.sizes:
            name = f"all_reduce_{size}"
            yield f"{name}_4_ranks", *(1e6 * side[name]["median"] for side in (ours, gloo))


class OptimizerStep(Bench):
    """AdamW's step, one thread: BERT-base's shapes, and 2000 tensors of 256."""

    # "…_all": unscale, clip by norm, step and zeroed gradients. "…_torch": compared with
    # torch::optim::AdamW. "…_all_over_step": ours alone. "…_stream": compared with streaming the
    # 28 bytes a number that a step must move.

    name = "optimizer_step"
    rounds = 5
    peer_name = "PyTorch AdamW(fused=True)"
    cases = [
        Case("bert_base", "s/step", 0.95, 5),
        Case("bert_base_all", "s/step", 0.70, 5),
        Case("bert_base_torch", "s/step", 1 / 15, 5),
        Case("bert_base_all_over_step", "steps", float("inf"), 3, limit=1.4),
        Case("bert_base_stream", "s/step", float("inf"), 5),
        Case("small_tensors", "s/step", 0.1, 6),
        Case("small_tensors_all", "s/step", 0.1, 6),
        Case("small_tensors_torch", "s/step", 0.01, 6),
    ]

    def __init__(self, options):
        self.options = options

    def lines(self, command):
        output = wait_all([(list(map(str, command)), environment())]).output
        return {line["case"]: line for line in map(json.loads, output.splitlines())}

    def round(self):
        smoke = self.options.smoke
        ours = self.lines([self.options.programs / "optimizer_step"] + ["--smoke"] * smoke)
        peer = {}
        if self.options.peers:
            peer = self.lines([self.options.peer_python, ROOT / "benchmarks/peers/optimizer_step.py"])
        for case in ("bert_base", "small_tensors"):
            mine = ours.get(case, ours["small_tensors"])  # the smoke form has one case
            theirs = peer.get(case, {})
            yield case, mine["step"], theirs.get("step")
            yield f"{case}_all", mine["all"], theirs.get("all")
            yield f"{case}_torch", mine["step"], mine["torch"]
            if case == "bert_base":
                yield "bert_base_all_over_step", mine["all"] / mine["step"], None
                yield "bert_base_stream", mine["step"], mine["stream"]


class CheckpointOverhead(Bench):
    """Regions compared with torch.utils.checkpoint: what one costs, and a model's step and peak."""

    name = "checkpoint_overhead"
    rounds = 3
    peer_name = "torch.utils.checkpoint"
    cases = [
        Case("region_overhead", "us/region", 1.0, 2, limit=15),
        Case("region", "us/region", 1.0, 2),
        # With the engine installed and no region active, compared with before it was.
        Case("no_region", "us/op", 1.02, 4),
        Case("bert_mini_none", "s/step", float("inf"), 4),
        Case("bert_mini_full", "s/step", 1.0, 4),
        Case("bert_mini_ops", "s/step", 1.0, 4),
        Case("bert_mini_none_peak", "bytes", float("inf"), 0),
        Case("bert_mini_full_peak", "bytes", 1.0, 0),
        Case("bert_mini_ops_peak", "bytes", 1.0, 0),
    ]

    def __init__(self, options):
        self.options = options

    def values(self, command):
        command = [*command] + ["--smoke"] * self.options.smoke
        output = wait_all([(list(map(str, command)), environment())]).output
        return {line["case"]: line["value"] for line in map(json.loads, output.splitlines())}

    def round(self):
        ours = self.values([self.options.programs / "checkpoint_overhead"])
        yield "no_region", ours.pop("no_region_after"), ours.pop("no_region_before")
        for case, value in ours.items():
            yield case, value, None
        if self.options.peers:
            peer = self.values([self.options.peer_python, ROOT / "benchmarks/peers/checkpoint_overhead.py"])
            for case, value in peer.items():
                yield case, None, value


class Exported(Bench):
    """A step of a model that Python exported, compared with PyTorch's own and with hasten's family."""

    name = "exported"
    rounds = 5
    peer_name = "PyTorch, eager"
    shapes = {"bert-mini": (16, 64), "gpt2": (4, 128)}
    cases = [
        Case("bert-mini", "s/step", 1.0),
        Case("bert-mini_of_family", "s/step", 1.15, peer="the family"),
        Case("bert-mini_peak", "bytes", 1.02, 0),
        Case("bert-mini_ddp", "s/step", 0.85, peer="PyTorch DDP"),
        Case("gpt2_ddp", "s/step", 0.85, peer="PyTorch DDP"),
        Case("gpt2", "s/step", 1.0),
        Case("gpt2_of_family", "s/step", 1.15, peer="the family"),
        Case("gpt2_peak", "bytes", 1.02, 0),
    ]

    def __init__(self, options):
        self.empty_work(options)
        self.skipped = None if options.peers else "only Python exports a model"
        for model in self.shapes if options.peers else ():
            script = [options.peer_python, ROOT / "benchmarks/peers/exported_step.py"]
            wait_all([([*map(str, script), model, "--export", str(self.work / f"{model}.pt2")], environment())])

    def step(self, command, model):
        command = [*command, *self.shapes[model]] + ["--smoke"] * self.options.smoke
        return json.loads(wait_all([(list(map(str, command)), environment())]).output.splitlines()[-1])

    def round(self):
        program = self.options.programs / "exported_step"
        for model in self.shapes:
            ours = self.step([program, self.work / f"{model}.pt2"], model)
            peer = self.step([self.options.peer_python, ROOT / "benchmarks/peers/exported_step.py", model], model)
            yield model, ours["seconds"], peer["seconds"]
            yield f"{model}_of_family", ours["seconds"], self.step([program, model], model)["seconds"]
            yield f"{model}_peak", ours["peak"], peer["peak"]
            sizes = [*self.shapes[model]] + ["--smoke"] * self.options.smoke
            ours = launched(self.options, "exported_step", self.work / f"{model}.pt2", *sizes)
            yield f"{model}_ddp", ours["seconds"], peer_ranks(self.options, "exported_step.py", model, *sizes)["seconds"]


class ActivationPlan(Bench):
    """Plans under a budget compared with simple rules: all of it ours, the rule is the other side."""

    name = "activation_plan"
    rounds = 1
    peer_name = "the rule in the case's name"
    cases = [
        *(
            Case(f"{chain}_{row}", unit, most, digits)
            for chain, at_sqrt in (("unequal_24", 0.90), ("bert", 1.02))
            for row, unit, most, digits in (
                ("peak_at_20", "bytes", 1.0, 0),
                ("peak_at_30", "bytes", 1.0, 0),
                ("peak_at_50", "bytes", 1.0, 0),
                ("time_at_sqrt_peak", "s/step", at_sqrt, 4),
                ("time_at_each_peak", "s/step", 1.0, 4),
                ("time_with_ops_at_50", "s/step", 0.97, 4),
                ("time_of_small_peak", "s/step", 1.08, 4),
                ("small_peak", "bytes", 0.5 if chain == "bert" else float("inf"), 0),
                ("time_at_50", "s/step", float("inf"), 4),
            )
        ),
    ]

    def __init__(self, options):
        self.options = options

    def round(self):
        command = [self.options.programs / "activation_plan"] + ["--smoke"] * self.options.smoke
        output = wait_all([(list(map(str, command)), environment())]).output
        for line in map(json.loads, output.splitlines()):
            # A budget below the least: the least, which is above it.
            yield line["case"].removesuffix("_least"), line["ours"], line["other"]

    def picture(self, root):
        plan = [self.options.programs / "hasten", "plan", "--model", "bert-base", "--batch", "8x128", "--budget", "50%"]
        wait_all([(list(map(str, [*plan, "--svg", root / PICTURES / "activation_plan.svg"])), environment())])


BENCHMARKS = {
    bench.name: bench
    for bench in (
        Startup,
        TrainerReviews,
        Tracking,
        TrainerAccuracy,
        TrainerOverhead,
        AcceleratorOverhead,
        Collectives,
        DdpStep,
        FsdpStep,
        FsdpMemory,
        LocalSGDAverage,
        SlowLink,
        Links,
        LocalSGDW8a,
        LocalSGDReviews,
        CheckpointOverhead,
        Hosts,
        ActivationPlan,
        Exported,
        OptimizerStep,
        Precision,
        ResidentMemory,
        Gpu,
        Decoders,
        Tinyshakespeare,
        Families,
        Tokenizers,
        Download,
    )
}


def commit():
    result = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or None


def machine():
    model = next(
        (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    cores = f"{model}, {os.cpu_count()} cores"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if not shutil.which(query[0]):
        return cores
    return f"{cores}, {subprocess.run(query, capture_output=True, text=True).stdout.strip()}"


def measure(bench, rounds):
    """{case: ([ours], [peer])}, one value a round."""
    values = {case.name: ([], []) for case in bench.cases}
    for number in range(rounds):
        print(f"{bench.name}: round {number + 1} of {rounds}", file=sys.stderr)
        for case, ours, peer in bench.round():
            if ours is not None:
                values[case][0].append(ours)
            if peer is not None:
                values[case][1].append(peer)
    return values


def measure_before(bench, rounds):
    """{case: ([now], [before])}: the programs of two builds in turns."""
    values = {case.name: ([], []) for case in bench.cases}
    folders = (bench.options.programs, bench.options.before)
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            bench.options.programs = folders[side]
            print(f"{bench.name}: round {number + 1} of {rounds}, {folders[side]}", file=sys.stderr)
            for case, ours, _ in bench.round():
                if ours is not None:
                    values[case][side].append(ours)
    bench.options.programs = folders[0]
    return values


def rows_of(bench, values):
    middle = getattr(bench, "middle", statistics.median)
    rows = []
    for case in bench.cases:
        ours, peers = values[case.name]
        if not ours:
            continue  # nothing of that kind here
        row = {"case": case.name, "unit": case.unit, "ours": middle(ours), "peer": None}
        row |= {"peer_name": case.peer or getattr(bench, "peer_name", PEER), "limit": case.limit, "ratio": None, "spread": None}
        if peers:
            ratios = [a / b if b else float("inf") for a, b in zip(ours, peers)]
            row |= {"peer": middle(peers), "spread": [min(ratios), max(ratios)]}
            row["ratio"] = row["ours"] / row["peer"] if row["peer"] else None
        rows.append(row)
    return rows


def case_of(bench, row):
    return next(case for case in bench.cases if case.name == row["case"])


def print_table(bench, rows):
    print(f"\n{bench.name}: {bench.__doc__}")
    print(f"{'case':<24}{'ours':>16}{'peer':>16}{'ratio':>8}{'at most':>9}  spread       unit")
    for row in rows:
        case = case_of(bench, row)
        shown = f"{row['case']:<24}{row['ours']:>16,.{case.digits}f}"
        if row["peer"] is not None:
            most = f"{case.most:.2f}" if case.most != float("inf") else "-"
            spread = f"{row['spread'][0]:.3f}-{row['spread'][1]:.3f}"
            shown += f"{row['peer']:>16,.{case.digits}f}{row['ratio'] or 0:>8.3f}{most:>9}  {spread:<12}"
        elif case.limit is not None:
            shown += f"{'':>24}{case.limit:>9,.2f}  {'':<12}"
        else:
            shown += " " * 47
        print(f"{shown} {row['unit']}")
    for line in getattr(bench, "events", []):
        print(line)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--data", type=pathlib.Path, help=".csv with text,label, or .tsv of two columns; a text for tinyshakespeare")
    parser.add_argument("--eval-data", type=pathlib.Path)
    parser.add_argument("--before", type=pathlib.Path, help="a folder with the programs of an earlier commit: the other side")
    for name in ("programs", "peer-python", "pretrained", "reviews", "work"):
        parser.add_argument(f"--{name}", type=pathlib.Path)
    parser.add_argument("--torch-version")
    parser.add_argument("--device", help="of the benchmark gpu: cuda; cpu with --smoke; test_device")
    parser.add_argument("--pictures", action="store_true", help="write docs/pictures/ too")
    options = parser.parse_args()
    options.peers = not options.smoke and not options.before
    if options.list:
        for name, bench in BENCHMARKS.items():
            print(f"{name:<22}{bench.__doc__}")
        return
    names = options.names or (list(BENCHMARKS) if options.smoke else [])
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        parser.error(f"name some of: {', '.join(BENCHMARKS)}" + (f" (unknown: {unknown[0]})" if unknown else ""))
    reports, failed = [], False
    for name in names:
        bench = BENCHMARKS[name](options)
        if getattr(bench, "skipped", None):
            print(f"{name}: skipped: {bench.skipped}", file=sys.stderr)
            continue
        rounds = 1 if options.smoke else options.rounds or bench.rounds
        if options.before:
            bench.cases = [case.beside_before(MOST_OF_BEFORE) for case in bench.cases]
        rows = rows_of(bench, (measure_before if options.before else measure)(bench, rounds))
        print_table(bench, rows)
        if options.pictures and hasattr(bench, "picture"):
            bench.picture(ROOT)
        for row in rows:
            case = case_of(bench, row)
            slow = row["ratio"] is not None and row["ratio"] > case.most
            slow |= case.limit is not None and row["ours"] > case.limit
            failed |= slow and not options.smoke
        reports.append(
            {"benchmark": name, "machine": machine(), "torch": options.torch_version, "commit": commit(), "rows": rows}
        )
    if options.json:
        options.json.write_text(json.dumps(reports[0] if len(reports) == 1 else reports, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
