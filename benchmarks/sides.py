"""What benchmarks share: one case of a report, and one run of either side."""

import csv
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RANKS = 2
_CPU = pathlib.Path("/proc/cpuinfo").read_text().split()
# Without instructions for 16-bit numbers a step of a language model takes minutes on either side.
PRECISIONS = ("fp32", "bf16") if {"avx512_bf16", "amx_bf16", "bf16"} & set(_CPU) else ("fp32",)
PICTURES = "docs/pictures"


@dataclasses.dataclass
class Case:
    name: str
    unit: str
    most: float  # ratio above which the benchmark fails; infinity: only reported
    digits: int = 3
    limit: float | None = None  # our value may not be above it, without a peer
    peer: str | None = None  # where it is another than the benchmark's

    def beside_before(self, most):
        """The same where the other side is an earlier commit: held where it is held at all."""
        held = self.most != float("inf")
        return dataclasses.replace(self, most=most if held else self.most, limit=None, peer="before")


@dataclasses.dataclass
class Process:
    """What one side of a round left: what it printed, when it began, the largest rank."""

    output: str
    start: float
    peak_bytes: int
    others: list = dataclasses.field(default_factory=list)  # what the other ranks printed


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
    return Process(outputs[0], start, peak, outputs[1:])


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launched(options, program, *arguments, ranks=RANKS):
    """What rank 0 of one of our programs printed last, under `hasten launch`."""
    command = [options.programs / program, *arguments]
    if ranks > 1:
        command = [options.programs / "hasten", "launch", "--nproc", str(ranks), *command]
    return json.loads(wait_all([(list(map(str, command)), environment())]).output.splitlines()[-1])


def at_once(options, program, *arguments, ranks=RANKS):
    """What each of so many processes that know nothing of each other printed last."""
    command = list(map(str, [options.programs / program, *arguments]))
    process = wait_all([(command, environment())] * ranks)
    return [json.loads(output.splitlines()[-1]) for output in (process.output, *process.others)]


def rank_environment(rank, ranks, address, port, local_ranks):
    """torchrun's variables for one rank; none for a rank alone."""
    if ranks == 1:
        return environment()
    variables = {"RANK": rank, "LOCAL_RANK": rank % local_ranks, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": local_ranks}
    variables |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    return environment({key: str(value) for key, value in variables.items()})


def run_peer(options, script, *arguments, ranks=RANKS):
    """A peer's script as so many processes; (process, the object rank 0 printed last)."""
    command = list(map(str, [options.peer_python, ROOT / "benchmarks/peers" / script, *arguments]))
    port = free_port()
    process = wait_all([(command, rank_environment(rank, ranks, "127.0.0.1", port, ranks)) for rank in range(ranks)])
    return process, json.loads(process.output.splitlines()[-1])


def peer_ranks(options, script, *arguments, ranks=RANKS):
    """What rank 0 of a peer's script printed last."""
    return run_peer(options, script, *arguments, ranks=ranks)[1]


class Bench:
    """What the benchmarks on reviews share: the files, and one run of either side."""

    def __init__(self, options):
        self.empty_work(options)
        self.train, self.eval = self.work / "train.csv", self.work / "eval.csv"
        if options.data:
            self.copy_rows(options.data, self.train)
            self.copy_rows(options.eval_data or options.data, self.eval)
        else:
            select = [sys.executable, ROOT / "scripts/demo_data.py", "select", options.reviews, self.train, self.eval]
            rows = ["--train-rows", "256" if options.smoke else "6000", "--test-rows", "1000"]
            subprocess.run(select + rows, check=True)
        self.eval_rows = sum(1 for _ in csv.reader(self.eval.open(newline=""))) - 1

    def empty_work(self, options):
        self.options, self.work = options, options.work
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)

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

    def ours(self, model, *flags, ranks=RANKS):
        """`hasten train`; its records are in work/out."""
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        command = [self.options.programs / "hasten", "train", *self.model_flags(model)]
        command += ["--train-file", self.train, "--text-column", "text", "--label-column", "label"]
        command += ["--nproc", str(ranks), "--output-dir", out, "--save-strategy", "no", *flags]
        return wait_all([(list(map(str, command)), environment())])

    def peer(self, model, *flags, ranks=RANKS):
        """The peer's script; (process, the object it printed)."""
        arguments = ["--train", self.train, "--model", self.options.pretrained if model == "minilm" else model]
        arguments += ["--tokenizer", self.options.pretrained, "--output", self.work / "peer", *flags]
        return run_peer(self.options, "reviews.py", *arguments, ranks=ranks)

    def records(self):
        with open(self.work / "out/metrics.jsonl", encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def peak(self):
        """Resident bytes of our largest rank, without what it maps of its peers' memory."""
        return max(record["peak_resident_bytes"] for record in self.records() if record["type"] == "epoch")
