"""Runs benchmarks: ours and the peer interleaved, median of the rounds, one report.

Called by scripts/bench.sh, which builds our side and installs the peer's. A benchmark
is a class below with `cases` and `round()`; every value is a time, bytes or a count of
mistakes, so below 1 is better for us. The report is
{"benchmark", "machine", "torch", "commit",
 "rows": [{"case", "unit", "ours", "peer", "peer_name", "limit", "ratio", "spread"}]}
with ratio = ours / peer of the medians, spread = [least, largest] ratio of a round and
limit = the physical or analytic bound in the same unit, null where there is none.
"""

import argparse
import csv
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RANKS = 2
PEER = "Hugging Face Trainer"


@dataclasses.dataclass
class Case:
    name: str
    unit: str
    most: float  # ratio above which the benchmark fails; infinity where told, not held
    digits: int = 3
    limit: float | None = None  # our value may not be above it, without a peer


@dataclasses.dataclass
class Process:
    """What one side of a round left: what it printed, when it began, the largest rank."""

    output: str
    start: float
    peak_bytes: int


def environment(rank_variables=None):
    """One thread a rank, whatever the machine: both sides alike."""
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return dict(variables, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", **(rank_variables or {}))


def wait_all(commands):
    """Runs the commands at once; [(what the first printed, when, largest peak)]."""
    start = time.time()
    children, errors = [], []
    for command, variables in commands:
        errors.append(tempfile.TemporaryFile("w+"))
        children.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=errors[-1], text=True)
        )
    peak, outputs = 0, []
    for child, error in zip(children, errors):
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            for other in children:
                if other.returncode is None:
                    other.kill()
            error.seek(0)
            sys.exit(f"error: {' '.join(child.args)} ended with {child.returncode}\n{error.read()[-4000:]}")
        peak = max(peak, usage.ru_maxrss * 1024)
        outputs.append(output)
    return Process(outputs[0], start, peak)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Bench:
    """What the benchmarks share: the files, and one run of either side."""

    def __init__(self, options):
        self.options = options
        self.work = options.work
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.train, self.eval = self.work / "train.csv", self.work / "eval.csv"
        if options.data:
            self.copy_rows(options.data, self.train)
            self.copy_rows(options.eval_data or options.data, self.eval)
        else:
            select = [sys.executable, ROOT / "scripts/demo_data.py", "select", options.reviews, self.train, self.eval]
            rows = ["--train-rows", "256" if options.smoke else "6000", "--test-rows", "1000"]
            subprocess.run(select + rows, check=True)
        self.eval_rows = sum(1 for _ in csv.reader(self.eval.open(newline=""))) - 1

    @staticmethod
    def copy_rows(source, target):
        """A .csv with columns text and label, or a .tsv of two columns without names."""
        with open(source, encoding="utf-8", newline="") as file, open(target, "w", newline="") as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(("text", "label"))
            if str(source).endswith(".tsv"):
                rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
                writer.writerows(row[:2] for row in rows)
            else:
                writer.writerows((row["text"], row["label"]) for row in csv.DictReader(file))

    def model_flags(self, model):
        tokenizer = self.options.pretrained
        return ["--model", self.options.pretrained] if model == "minilm" else ["--model", model, "--tokenizer", tokenizer]

    def ours(self, model, *flags):
        """`hasten train` on two ranks; its records are in work/out."""
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        command = [self.options.programs / "hasten", "train", *self.model_flags(model)]
        command += ["--train-file", self.train, "--text-column", "text", "--label-column", "label"]
        command += ["--nproc", str(RANKS), "--output-dir", out, "--save-strategy", "no", *flags]
        return wait_all([(list(map(str, command)), environment())])

    def peer(self, model, *flags):
        """The peer's script as two processes; (process, the object it printed)."""
        port = str(free_port())
        command = [self.options.peer_python, ROOT / "benchmarks/peers/reviews.py", "--train", self.train]
        command += ["--model", self.options.pretrained if model == "minilm" else model]
        command += ["--tokenizer", self.options.pretrained, "--output", self.work / "peer", *flags]
        commands = []
        for rank in range(RANKS):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            commands.append((list(map(str, command)), environment({k: str(v) for k, v in variables.items()})))
        process = wait_all(commands)
        return process, json.loads(process.output.splitlines()[-1])

    def records(self):
        with open(self.work / "out/metrics.jsonl", encoding="utf-8") as file:
            return [json.loads(line) for line in file]


class FirstLine(threading.Thread):
    """Notes when a file gets its first line: the record of the first update is written
    through as soon as its loss is known."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self.path, self.seen = path, None
        path.unlink(missing_ok=True)
        self.start()

    def run(self):
        for _ in range(60_000):
            try:
                if self.path.stat().st_size:
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

    name = "startup"
    rounds = 5
    cases = [Case("first_step_bert_mini", "s", 0.25)]

    def round(self):
        flags = ["--max-steps", "1", "--logging-steps", "1", "--per-device-train-batch-size", "8"]
        watch = FirstLine(self.work / "out/metrics.jsonl")
        process = self.ours("bert-mini", "--eval-strategy", "no", *flags)
        yield "first_step_bert_mini", watch.time() - process.start, None
        if not self.options.smoke:
            process, report = self.peer("bert-mini", "--max-steps", "1", "--batch-size", "8", "--padding", "grouped")
            yield "first_step_bert_mini", None, report["first_step_time"] - process.start


class TrainerReviews(Bench):
    """Fine-tuning on short reviews, two ranks of one thread: time and memory."""

    name = "trainer_reviews"
    rounds = 3
    cases = [
        Case("grouped_fp32", "s/1000 samples", 1.0),
        Case("defaults", "s/1000 samples", 0.14),
        Case("defaults_peak_resident", "bytes a rank", 0.6, 0),
    ]
    batch = 32

    def seconds(self):
        record = next(record for record in reversed(self.records()) if "train_runtime" in record)
        return 1000 / record["train_samples_per_second"]

    def round(self):
        steps = 4 if self.options.smoke else 60
        same = ["--max-steps", str(steps)]
        process = self.ours("bert-mini", *same, "--eval-strategy", "no", "--per-device-train-batch-size", str(self.batch))
        seconds = self.seconds()
        yield "grouped_fp32", seconds, None
        yield "defaults", seconds, None
        yield "defaults_peak_resident", process.peak_bytes, None
        if self.options.smoke:
            return
        same += ["--batch-size", str(self.batch)]
        _, report = self.peer("bert-mini", *same, "--padding", "grouped")
        yield "grouped_fp32", None, 1000 * report["train_runtime"] / report["samples"]
        process, report = self.peer("bert-mini", *same, "--padding", "max_length")
        yield "defaults", None, 1000 * report["train_runtime"] / report["samples"]
        yield "defaults_peak_resident", None, process.peak_bytes


class TrainerAccuracy(Bench):
    """Mistakes after fine-tuning, the same model, data, epochs: mean of three seeds."""

    name = "trainer_accuracy"
    rounds = 3
    # One percentage point is the bound; told here, held by whoever reads the row.
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
            if not self.options.smoke:
                flags = ["--batch-size", "16", "--epochs", epochs, "--eval", self.eval, "--padding", "grouped"]
                _, report = self.peer(model, *same, *flags)
                yield case, None, 1000 * (1 - report["accuracy"])


class AcceleratorOverhead(Bench):
    """The accelerator's loop beside LibTorch's own, one process, one thread."""

    name = "accelerator_overhead"
    peer_name = "plain LibTorch loop"
    rounds = 5
    cases = [
        Case("bert_mini", "s/step", 1.01, 5),
        Case("ten_parameters", "us/step", float("inf"), 2),
        Case("ten_parameters_extra", "us/step", float("inf"), 2, limit=15),
    ]

    def __init__(self, options):  # no data: both loops get the same made-up batch
        self.options = options

    def round(self):
        command = [self.options.programs / "accelerator_overhead"] + ["--smoke"] * self.options.smoke
        output = wait_all([(list(map(str, command)), environment())]).output
        values = {line["case"]: line for line in map(json.loads, output.splitlines())}
        bert, ten = values["bert_mini"], values["ten_parameters"]
        yield "bert_mini", bert["ours"], bert["plain"]
        yield "ten_parameters", 1e6 * ten["ours"], 1e6 * ten["plain"]
        yield "ten_parameters_extra", 1e6 * (ten["ours"] - ten["plain"]), None


class DdpStep(Bench):
    """Forward, backward and reduction on two ranks of one thread, beside torch's own DDP."""

    # "…_over_alone": what a step takes longer than the same one in one process. Memory is
    # ours alone: what a rank of two holds more than one process, in gradient copies.

    name = "ddp_step"
    rounds = 5
    peer_name = "PyTorch DDP"
    cases = [
        Case("bert_mini", "s/step", 1.0, 5),
        Case("bert_mini_over_alone", "s/step", float("inf"), 5),
        Case("bert_mini_extra_memory", "gradient copies", float("inf"), 4, limit=0.05),
        Case("small_tensors", "s/step", 1.0, 5),
        Case("small_tensors_over_alone", "s/step", float("inf"), 5),
        Case("small_tensors_extra_memory", "gradient copies", float("inf"), 4, limit=0.05),
    ]

    def __init__(self, options):
        self.options = options

    def ours_once(self, case, steps, ranks):
        command = [self.options.programs / "ddp_step", case, "--steps", str(steps)]
        if ranks > 1:
            command = [self.options.programs / "hasten", "launch", "--nproc", str(ranks), *command]
        return json.loads(wait_all([(list(map(str, command)), environment())]).output.splitlines()[-1])

    def peer_once(self, case, steps, ranks):
        command = [self.options.peer_python, ROOT / "benchmarks/peers/ddp_step.py", case, "--steps", str(steps)]
        port, commands = str(free_port()), []
        for rank in range(ranks):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables = {k: str(v) for k, v in variables.items()} if ranks > 1 else None
            commands.append((list(map(str, command)), environment(variables)))
        return json.loads(wait_all(commands).output.splitlines()[-1])

    def round(self):
        for case, steps in (("bert-mini", 40), ("small-tensors", 100)):
            row = case.replace("-", "_")
            steps = 2 if self.options.smoke else steps
            ours, alone = self.ours_once(case, steps, RANKS), self.ours_once(case, steps, 1)
            yield row, ours["seconds"], None
            yield f"{row}_over_alone", ours["seconds"] - alone["seconds"], None
            yield f"{row}_extra_memory", (ours["peak_bytes"] - alone["peak_bytes"]) / alone["gradient_bytes"], None
            if not self.options.smoke:
                peer, alone = self.peer_once(case, steps, RANKS), self.peer_once(case, steps, 1)
                yield row, None, peer["seconds"]
                yield f"{row}_over_alone", None, peer["seconds"] - alone["seconds"]


class OptimizerStep(Bench):
    """AdamW's step, one thread: BERT-base's shapes, and 2000 tensors of 256."""

    # "…_all": unscale, clip by norm, step and zeroed gradients. "…_torch": beside
    # torch::optim::AdamW. "…_all_over_step": ours alone. "…_stream": beside streaming the
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
        if not smoke:
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


BENCHMARKS = {
    bench.name: bench for bench in (Startup, TrainerReviews, TrainerAccuracy, AcceleratorOverhead, DdpStep, OptimizerStep)
}


def commit():
    result = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or None


def machine():
    model = next(
        (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return f"{model}, {os.cpu_count()} cores"


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


def rows_of(bench, values):
    middle = getattr(bench, "middle", statistics.median)
    rows = []
    for case in bench.cases:
        ours, peers = values[case.name]
        row = {"case": case.name, "unit": case.unit, "ours": middle(ours), "peer": None}
        row |= {"peer_name": getattr(bench, "peer_name", PEER), "limit": case.limit, "ratio": None, "spread": None}
        if peers:
            ratios = [a / b if b else float("inf") for a, b in zip(ours, peers)]
            row |= {"peer": middle(peers), "spread": [min(ratios), max(ratios)]}
            row["ratio"] = row["ours"] / row["peer"] if row["peer"] else None
        rows.append(row)
    return rows


def print_table(bench, rows):
    print(f"\n{bench.name}: {bench.__doc__}")
    print(f"{'case':<24}{'ours':>16}{'peer':>16}{'ratio':>8}{'at most':>9}  spread       unit")
    for case, row in zip(bench.cases, rows):
        shown = f"{row['case']:<24}{row['ours']:>16,.{case.digits}f}"
        if row["peer"] is not None:
            most = f"{case.most:.2f}" if case.most != float("inf") else "-"
            spread = f"{row['spread'][0]:.3f}-{row['spread'][1]:.3f}"
            shown += f"{row['peer']:>16,.{case.digits}f}{row['ratio'] or 0:>8.3f}{most:>9}  {spread:<12}"
        elif case.limit is not None:
            shown += f"{'':>24}{case.limit:>9,.2f}  {'':<12}"
        print(f"{shown} {row['unit']}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--data", type=pathlib.Path, help=".csv with text,label, or .tsv of two columns")
    parser.add_argument("--eval-data", type=pathlib.Path)
    for name in ("programs", "peer-python", "pretrained", "reviews", "work"):
        parser.add_argument(f"--{name}", type=pathlib.Path)
    parser.add_argument("--torch-version")
    options = parser.parse_args()
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
        rounds = 1 if options.smoke else options.rounds or bench.rounds
        rows = rows_of(bench, measure(bench, rounds))
        print_table(bench, rows)
        for case, row in zip(bench.cases, rows):
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
