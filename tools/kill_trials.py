#!/usr/bin/env python3
"""Kills training runs at random moments and sees that they end as if nothing had been.

A trial starts `hasten train` on two processes, a small BERT on made-up reviews that saves
every second update. At a random moment it kills a random rank or the launcher with SIGKILL,
starts the same command line again, and so on, up to three times; then it lets the run end.
The weights must be those of an undisturbed run, bit for bit. It ends with 1 where they are
not, where something hangs or is left running, or where files are left that no later start
has removed or named.

  tools/kill_trials.py --trials 100 --seed 1 --strategies ddp,fsdp,zero1,local_sgd
"""

import argparse
import collections
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARK = "HASTEN_KILL_TRIAL"  # in the environment of all processes of a trial
MOST_KILLS = 3
STRATEGIES = {
    "ddp": [],
    "fsdp": ["--strategy", "fsdp"],
    "zero1": ["--strategy", "zero1"],
    "zero2": ["--strategy", "zero2"],
    "local_sgd": ["--local-sgd-steps", "3"],
}


@dataclasses.dataclass
class Run:
    """One command line that is started, killed and started again in its own folder."""

    options: argparse.Namespace
    folder: pathlib.Path
    strategy: str
    starts: int = 0
    said: str = ""

    def start(self):
        """Returns the launcher's process."""
        temporary = self.folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        command = [self.options.programs / "hasten", "train", "--model", "bert-tiny", "--train-file", self.options.rows]
        command += ["--vocab-size", "300", "--max-length", "32", "--batch-size", "4", "--max-steps", self.options.steps]
        command += ["--save-strategy", "steps", "--save-steps", "2", "--eval-strategy", "no", "--nproc", "2"]
        command += ["--output-dir", self.folder / "out", "--cache-dir", self.folder / "cache"]
        command += ["--resume-from-checkpoint", "auto", *STRATEGIES[self.strategy]]
        variables = dict(os.environ, OMP_NUM_THREADS="1", TMPDIR=str(temporary))
        variables[MARK] = str(self.folder)
        with open(self.folder / f"start_{self.starts}.log", "w") as log:
            return subprocess.Popen(
                list(map(str, command)), env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, process):
        """Its exit code; None where it had to be killed after the time that a start may take."""
        try:
            code = process.wait(self.options.timeout)
        except subprocess.TimeoutExpired:
            code = None
            for pid in processes_of(self.folder):
                kill(pid)
            process.wait()
        self.said += (self.folder / f"start_{self.starts}.log").read_text(errors="replace")
        return code

    def weights(self):
        path = self.folder / "out/model.safetensors"
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "no weights"

    def orphans(self):
        """Processes that are still there when all had ten seconds to end."""
        for _ in range(100):
            left = processes_of(self.folder)
            if not left:
                break
            time.sleep(0.1)
        return left

    def leftovers(self):
        """Temporary files that the last start has neither removed nor named."""
        found = [path for path in self.folder.rglob("*") if ".tmp-" in path.name or path.parent == self.folder / "tmp"]
        return [str(path.relative_to(self.folder)) for path in found if path.name not in self.said]


def processes_of(folder):
    """{pid: its rank, None of the launcher} of what was started with this folder as mark."""
    mark = f"{MARK}={folder}".encode()
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # has ended, or is another user's
            continue
        if mark in variables:
            ranks = [value[5:].decode() for value in variables if value.startswith(b"RANK=")]
            found[int(entry.name)] = ranks[0] if ranks else None
    return found


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False


def one_trial(options, draw, folder, strategy, whole, counts):
    """Returns what is wrong with it, a list of sentences. `whole`: (weights, seconds)."""
    folder.mkdir()
    run, wrong, story = Run(options, folder, strategy), [], []
    for _ in range(draw.randint(1, MOST_KILLS)):
        process = run.start()
        victim, moment = draw.choice(["launcher", "0", "1"]), draw.uniform(0, 0.8) * whole[1]
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            pass
        pids = {None: process.pid} if victim == "launcher" else {}
        pids |= {rank: pid for pid, rank in processes_of(folder).items() if rank is not None}
        pid = pids.get(None if victim == "launcher" else victim)
        if process.poll() is None and pid and kill(pid):
            counts["kills"] += 1
            story.append(f"{victim} at {moment:.1f} s")
        if run.wait(process) is None:
            counts["hangs"] += 1
            wrong.append(f"start {run.starts} did not end within {options.timeout} s")
        left = run.orphans()
        if left:
            counts["orphans"] += len(left)
            wrong.append(f"left running after start {run.starts}: {left}")
            for pid in left:
                kill(pid)
    code = run.wait(run.start())
    if code != 0:
        counts["hangs" if code is None else "failures"] += 1
        wrong.append(f"the last start ended with {code}")
    elif run.weights() != whole[0]:
        counts["different"] += 1
        wrong.append("the weights differ from those of the undisturbed run")
    left = run.leftovers()
    if left:
        counts["leftovers"] += len(left)
        wrong.append(f"left over: {', '.join(left)}")
    print(f"{folder.name} {strategy}: killed {'; '.join(story) or 'nothing'}: {'; '.join(wrong) or 'equal'}", flush=True)
    return wrong


def undisturbed(options, folder, strategy):
    """(its weights, seconds)"""
    folder.mkdir()
    run, begin = Run(options, folder, strategy), time.time()
    code = run.wait(run.start())
    if code != 0:
        sys.exit(f"error: the undisturbed run of {strategy} ended with {code}\n{run.said[-4000:]}")
    return run.weights(), time.time() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "build/release/bin", help="folder with hasten")
    parser.add_argument("--trials", type=int, default=20, help="in all, distributed over the strategies [20]")
    parser.add_argument("--seed", type=int, default=1, help="of moments and victims [1]")
    parser.add_argument("--strategies", default="ddp,fsdp,zero1,local_sgd", help=f"some of {','.join(STRATEGIES)}")
    parser.add_argument("--steps", type=int, default=20, help="updates of a run [20]")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a start may take before it counts as hung [300]")
    options = parser.parse_args()
    strategies = options.strategies.split(",")
    for strategy in strategies:
        if strategy not in STRATEGIES:
            parser.error(f"--strategies: {strategy} is none of {','.join(STRATEGIES)}")
    options.programs = options.programs.resolve()
    work = pathlib.Path(tempfile.mkdtemp(prefix="hasten-kills-"))
    options.rows = work / "rows.csv"
    synth = [options.programs / "hasten", "synth", "reviews", "--rows", "120", "--output", options.rows]
    subprocess.run(list(map(str, synth)), check=True, capture_output=True)

    whole = {strategy: undisturbed(options, work / f"whole_{strategy}", strategy) for strategy in strategies}
    counts, failed = collections.Counter(), 0
    for trial in range(options.trials):
        strategy, folder = strategies[trial % len(strategies)], work / f"trial_{trial + 1}"
        draw = random.Random(f"{options.seed} {trial}")
        if one_trial(options, draw, folder, strategy, whole[strategy], counts):
            failed += 1
        else:
            shutil.rmtree(folder)
    names = ("kills", "different", "failures", "hangs", "orphans", "leftovers")
    print(json.dumps({"trials": options.trials, "failed": failed} | {name: counts[name] for name in names}))
    if failed:
        sys.exit(f"error: {failed} of {options.trials} trials failed; their folders are in {work}")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
