#!/usr/bin/env python3
"""Takes the same 20 optimizer steps in several ways and prints what each costs; Python's
standard library alone.

  demo_ways.py HASTEN MODEL TRAIN.csv FOLDER
      HASTEN: the program. FOLDER: for the runs; removed at the end.

The steps train MODEL further, without dropout, whose random numbers depend on the
processes. So all ways but Local SGD compute the same gradients, up to rounding. The figures
are those of the runs' own metrics.jsonl: the mean loss of the steps, and the maximum over
processes of the bytes in tensors and of the bytes sent. Ends with 1 if ways that compute the
same gradients have different losses, or if a killed and resumed run has other weights.
"""

import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import time

STEPS = 20
KILLED_AFTER = 12  # steps
KILLS = 5  # attempts, because a run may end before the signal reaches it
ROUNDING = 1e-4  # relative difference of losses
ACCUMULATION = "2, ddp, accumulation 2"
FSDP = "2, fsdp + checkpointing"
WAYS = {
    "1 process": ["--nproc", "1", "--batch-size", "8"],
    ACCUMULATION: ["--nproc", "2", "--batch-size", "2", "--gradient-accumulation-steps", "2"],
    FSDP: ["--nproc", "2", "--batch-size", "4", "--strategy", "fsdp", "--gradient-checkpointing"],
    "2, bf16 + Local SGD every 8": ["--nproc", "2", "--batch-size", "4", "--bf16", "--local-sgd-steps", "8"],
}


def without_dropout(model, folder):
    """Makes a folder with the model's files and a configuration without dropout."""
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        if (model / name).exists():
            (folder / name).symlink_to((model / name).resolve())
    config = json.loads((model / "config.json").read_text())
    config.update({name: 0.0 for name, value in config.items() if "dropout" in name and value is not None})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Run:
    """A command line and its output folder."""

    def __init__(self, program, model, rows, folder, flags):
        self.output, self.log = folder / "out", folder / "log"
        self.command = [program, "train", "--model", model, "--train-file", rows, "--max-steps", STEPS]
        self.command += ["--text-column", "text", "--label-column", "label", "--disable-tqdm"]
        self.command += ["--output-dir", self.output, *flags]

    def start(self):
        with open(self.log, "w") as log:
            return subprocess.Popen(list(map(str, self.command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def finish(self):
        """Runs it to its end. Returns {type: the last record of that type in metrics.jsonl}."""
        if self.start().wait() != 0:
            sys.stderr.write(self.log.read_text())
            raise SystemExit("error: a run of the demo has failed")
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        return {record["type"]: record for record in map(json.loads, lines)}

    def kill(self):
        """Runs it until its first checkpoint is complete, then kills it with SIGKILL."""
        process = self.start()
        while process.poll() is None and not (self.output / f"checkpoint-{KILLED_AFTER}").exists():
            time.sleep(0.001)
        process.kill()
        process.wait()

    def weights(self):
        return hashlib.sha256((self.output / "model.safetensors").read_bytes()).hexdigest()


def show(way, loss, memory, sent):
    print(f"  {way:46}{loss:>8}{memory:>11}{sent:>14}", flush=True)


def megabytes(count):
    return f"{count / 1e6:.1f} MB" if count else "0"


def run_ways(run_of):
    """Returns the loss and the weights of each way."""
    results = {}
    for way, flags in WAYS.items():
        run = run_of(["--save-strategy", "no", *flags])
        records = run.finish()
        spent = records["epoch"]
        loss = records["end"]["train_loss"]
        show(way, f"{loss:.6f}", megabytes(spent["peak_tensor_bytes"]), megabytes(spent["bytes_sent"] / STEPS))
        results[way] = loss, run.weights()
        shutil.rmtree(run.output)
    return results


def kill_and_resume(run_of):
    """Returns the loss and the weights of a run that was killed and resumed."""
    saves = ["--save-strategy", "steps", "--save-steps", KILLED_AFTER, "--resume-from-checkpoint", "auto"]
    for _ in range(KILLS):
        run = run_of([*saves, *WAYS[ACCUMULATION]])
        run.kill()
        records = run.finish()
        if records.get("resume", {}).get("step") == KILLED_AFTER:
            return records["end"]["train_loss"], run.weights()
        shutil.rmtree(run.output)
    raise SystemExit(f"error: the run ended before it could be killed, {KILLS} times")


def main():
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    program, model, rows, folder = map(pathlib.Path, sys.argv[1:])
    shutil.rmtree(folder, ignore_errors=True)
    try:
        start = without_dropout(model, folder / "model")

        def run_of(flags):
            return Run(program, start, rows, folder, flags)

        show(f"processes and options ({STEPS} steps of 8 samples)", "loss", "memory", "sent a step")
        results = run_ways(run_of)
        loss = results["1 process"][0]
        if any(abs(results[way][0] - loss) > ROUNDING * abs(loss) for way in (ACCUMULATION, FSDP)):
            raise SystemExit("error: ways that compute the same gradients have different losses")
        resumed = kill_and_resume(run_of)
        if resumed != results[ACCUMULATION]:
            raise SystemExit("error: the killed and resumed run has another loss or other weights")
        show(f"{ACCUMULATION}, kill -9 at step {KILLED_AFTER}", f"{resumed[0]:.6f}", "weights", "bit-identical")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
