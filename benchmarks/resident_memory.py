"""Resident memory over a long run on texts of mixed lengths."""

import json
import pathlib
import shutil
import subprocess
import threading

import svg
from sides import PICTURES, RANKS, Bench, Case, environment, wait_all

KINDS = {f"{s}{c}": (s, c) for s in ("ddp", "fsdp") for c in ("", "_checkpointed")}
WARM = 300  # updates, in which every length has come


class Sampler(threading.Thread):
    """Notes the largest rank's resident bytes whenever the run has recorded steps."""

    def __init__(self, out):
        super().__init__(daemon=True)
        self.out, self.ended, self.curve = str(out), threading.Event(), []
        self.start()

    def resident(self):
        most = 0
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if words[0].endswith("hasten-worker") and self.out in words:
                    pages = int((process / "statm").read_text().split()[1])
                    most = max(most, pages * 4096)
            except (OSError, IndexError):
                continue  # it has ended
        return most

    def run(self):
        while not self.ended.wait(0.1):
            try:
                step = json.loads(pathlib.Path(self.out, "metrics.jsonl").read_text().splitlines()[-1])["step"]
            except (OSError, IndexError, KeyError, ValueError):
                continue
            if not self.curve or step > self.curve[-1][0]:
                self.curve.append((step, self.resident()))

    def end(self):
        self.ended.set()
        self.join()
        return [(step, bytes) for step, bytes in self.curve if bytes > 0]


def slope(curve):
    """By least squares, as a share of the mean for 1,000 steps."""
    x, y = [step / 1000 for step, _ in curve], [bytes for _, bytes in curve]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - middle_x) ** 2 for a in x)
    return sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y)) / spread / middle_y if spread else 0.0


class ResidentMemory(Bench):
    """Resident memory of the largest of two ranks over 2,000 steps of mixed lengths."""

    # bert-tiny, 4 samples a rank, 9 to 98 tokens. "…_bf16": at the end, compared with fp32's.

    name = "resident_memory"
    rounds = 1
    peer_name = "ours in fp32"
    cases = [
        case
        for kind in KINDS
        for case in (
            Case(f"{kind}_bf16", "bytes", 1.3, 0),
            Case(f"{kind}_bf16_slope", "share/1000 updates", float("inf"), 4, limit=0.01),
            Case(f"{kind}_fp32_slope", "share/1000 updates", float("inf"), 4, limit=0.01),
        )
    ]

    def __init__(self, options):
        self.options, self.work, self.curves = options, options.work, {}
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.train = self.work / "train.csv"
        rows = ["--rows", "256" if options.smoke else "4000", "--output", self.train]
        subprocess.run(list(map(str, [options.programs / "hasten", "synth", "reviews", *rows])), check=True)

    def curve(self, kind, precision):
        strategy, checkpointed = KINDS[kind]
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        command = [self.options.programs / "hasten", "train", "--model", "bert-tiny", "--train-file", self.train]
        command += ["--strategy", strategy, "--precision", precision, "--per-device-train-batch-size", "4"]
        command += ["--max-steps", "20" if self.options.smoke else "2000", "--logging-steps", "10", "--eval-strategy", "no"]
        command += ["--save-strategy", "no", "--nproc", str(RANKS), "--output-dir", out]
        command += ["--gradient-checkpointing"] if checkpointed else []
        sampler = Sampler(out)
        wait_all([(list(map(str, command)), environment())])
        return sampler.end()

    def round(self):
        for kind in KINDS:
            last = {}
            for precision in ("fp32", "bf16"):
                curve = self.curve(kind, precision)
                self.curves[kind, precision] = curve
                warm = [point for point in curve if point[0] >= WARM] or curve
                yield f"{kind}_{precision}_slope", slope(warm), None
                last[precision] = warm[-1][1]
            yield f"{kind}_bf16", last["bf16"], last["fp32"]

    def picture(self, root):
        charts = []
        for kind in KINDS:
            lines = {
                precision: [(step, bytes / 2**20) for step, bytes in self.curves[kind, precision][::10]]
                for precision in ("fp32", "bf16")
            }
            title = kind.replace("_", ", ")
            charts.append(svg.chart(title, "update", "MiB resident", lines, x_log=False, y_log=False, from_zero=True))
        svg.write(root / PICTURES / "resident_memory.svg", charts)
