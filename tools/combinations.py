#!/usr/bin/env python3
"""Writes docs/combinations.md: every pair of features on 1, 2 and 4 ranks, against its reference.

Through the Accelerator by the cases of tests/local_sgd/combinations_test.cpp, and where a feature
has a flag through `hasten train`, with an encoder and with a decoder: its last evaluation's loss
against that of whole copies (ddp) with the features that make other numbers, on as many processes.
Takes about half an hour: tools/combinations.py BIN_FOLDER
"""

import csv
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

WORLDS = (1, 2, 4)
MODELS = {  # the letter in the table: the model, its task
    "E": (["--model", "bert-tiny"], []),
    "D": (["--model", "gpt2-mini", "--tokenizer", "bytes"], ["--task", "text-generation", "--block-size", "32"]),
}
FLAGS = {
    "accumulation": ["--gradient-accumulation-steps", "3"],
    "checkpointing": ["--gradient-checkpointing"],
    "bf16": ["--bf16"],
    "fp16": ["--fp16"],
    "ddp": ["--strategy", "ddp"],
    "zero1": ["--strategy", "zero1"],
    "zero2": ["--strategy", "zero2"],
    "fsdp": ["--strategy", "fsdp"],
    "hsdp": ["--strategy", "hsdp"],
    "Local SGD": ["--local-sgd-steps", "3"],
    "SyncBatchNorm": None,
    "static graph": None,
    "channels last": None,
    "integer buffers": None,
    "torch's loader": None,
    "resume": [],
    "empty rank": None,
    "LoRA": ["--lora-r", "2"],
}
FEATURES = list(FLAGS)
NUMBERS = {"accumulation", "bf16", "fp16", "Local SGD", "LoRA"}
CHOICES = [{"bf16", "fp16"}, {"ddp", "zero1", "zero2", "fsdp", "hsdp"}]
REASONS = {
    frozenset({"Local SGD", s}): "all ranks hold shards of one replica, and Local SGD averages replicas: `hsdp`"
    for s in ("zero1", "zero2", "fsdp")
} | {
    frozenset({"Local SGD", "SyncBatchNorm"}): "each forward of the layers waits for all ranks, which train independently"
}


def reviews(path):
    words = {"pos": ["good", "fine", "fun"], "neg": ["bad", "dull", "poor"]}
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for i in range(80):
            label = ("pos", "neg")[i % 2]
            rows.writerow([f"film number {i} was {words[label][i // 2 % 3]} work", label])


def byte_tokenizer(folder):
    """GPT-2's alphabet without a merge: one token for a byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = [chr(byte) for byte in visible] + [chr(256 + i) for i in range(len(hidden))]
    end = {"id": 256, "content": "<|endoftext|>", "special": True, "single_word": False, "lstrip": False,
           "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {letter: i for i, letter in enumerate([*letters, end["content"]])}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [end], "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end["content"]}))


class Programs:
    def __init__(self, programs, folder, model):
        self.programs, self.folder, self.known = programs.resolve(), folder, {}
        self.model, self.task = model
        reviews(folder / "train.csv")

    def train(self, features, world):
        """The last evaluation's loss, or what the error says."""
        key = (frozenset(features), world)
        if key not in self.known:
            self.known[key] = self.run(features, world)
        return self.known[key]

    def run(self, features, world):
        model = self.model
        if "LoRA" in features:  # needs a trained base
            base = self.folder / f"base of {self.model[1]}"
            if not base.exists():
                self.run([], 1)
                (self.folder / "out").rename(base)
            model = ["--model", base]
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        command = [self.programs / "hasten", "train", *model, *self.task, "--train-file", self.folder / "train.csv"]
        command += ["--eval-split", "0.2", "--batch-size", "4", "--epochs", "2", "--seed", "3", "--learning-rate", "1e-3"]
        command += ["--nproc", str(world), "--output-dir", out, "--save-total-limit", "4"]
        for feature in features:
            command += FLAGS[feature]
        if "hsdp" in features and world > 1:
            command += ["--shard-size", str(world // 2)]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.folder)
        if ended.returncode == 0 and "resume" in features:
            last = max(out.glob("checkpoint-[0-9]*"), key=lambda path: int(path.name.split("-")[1]))
            for path in out.iterdir():  # as if it had been stopped in the second epoch
                if path.is_file() or path.is_symlink():
                    path.unlink()
                elif path == last:
                    shutil.rmtree(path)
            ended = subprocess.run([*command, "--resume-from-checkpoint", "auto"], capture_output=True, text=True,
                                   env=environment, cwd=self.folder)
        if ended.returncode != 0:
            return ended.stderr.strip().splitlines()[-1]
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return next(record["eval_loss"] for record in reversed(records) if "eval_loss" in record)

    def judge(self, features, world):
        found = self.train(features, world)
        if isinstance(found, str):
            refused = any(pair <= set(features) for pair in REASONS)
            return "refused" if refused else found
        if {"hsdp", "Local SGD"} <= set(features) and world > 1:
            return "runs"  # whole copies are other ranks, with other rows
        reference = self.train(sorted(NUMBERS & set(features)), world)
        most = 2e-2 if {"bf16", "fp16"} & set(features) else 1e-4
        return "equal" if abs(found - reference) <= most else f"{found} is not {reference}"


def possible(features):
    return all(len(choice & set(features)) <= 1 for choice in CHOICES)


def through_accelerator(programs, folder):
    environment = dict(os.environ, OMP_NUM_THREADS="1", HASTEN_COMBINATIONS=str(folder))
    for world in WORLDS:
        ended = subprocess.run(
            [programs / "hasten_dist_tests", "--world", str(world), "--gtest_filter=Combinations.*"],
            capture_output=True, text=True, env=environment)
        if ended.returncode != 0:
            sys.exit(ended.stdout + ended.stderr)
    found = {}
    for line in (folder / "accelerator.jsonl").read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record["features"], {})[record["world"]] = record["found"]
    return found


def page(accelerator, programs):
    notes, lines = [], []
    lines.append("| | " + " | ".join(FEATURES) + " |")
    lines.append("|---" * (len(FEATURES) + 1) + "|")
    for i, row in enumerate(FEATURES):
        cells = []
        for j, column in enumerate(FEATURES[: i + 1]):
            pair = [column, row][: 1 if i == j else 2]
            if not possible(pair):
                cells.append("–")
            elif frozenset(pair) in REASONS:
                reason = REASONS[frozenset(pair)]
                if reason not in notes:
                    notes.append(reason)
                cells.append(f"no ({notes.index(reason) + 1})")
            else:
                found = {"A": accelerator} | programs
                found = {letter: f[" + ".join(pair)].values() for letter, f in found.items() if " + ".join(pair) in f}
                bad = set().union(*found.values()) - {"equal", "runs"}
                cells.append(f"**{', '.join(bad)}**" if bad else "".join(found))
        cells += [""] * (len(FEATURES) - len(cells))  # each pair once
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    stacks = [name for name in accelerator if name.count(" + ") > 1]
    text = [
        "# What goes together", "",
        "`tools/combinations.py` makes this page. It trains with every pair of features on 1, 2 and 4 ranks.",
        "",
        "- **A**: with the `Accelerator`, the final parameters equal those of the reference (fp64 to 1e-10,",
        "  bf16 and fp16 to 0.02).",
        "- **E**: with `hasten train` and an encoder (bert-tiny, text-classification), the loss of the last",
        "  evaluation equals that of replicas that are not sharded (fp32 to 1e-4, 16 bits to 0.02).",
        "- **D**: the same with a decoder (gpt2-mini, text-generation).",
        "- **–**: the two features exclude each other.",
        "",
        "The reference runs on one rank and reads what all ranks read together. With Local SGD it has one rank for",
        "each replica. It has only the features that change the numbers: accumulation, 16 bits, Local SGD, batch",
        "norm, delay, empty ranks, LoRA, a convolution with channels-last weights, integer buffers that forward",
        "writes, and torch's `DataLoader` with its `RandomSampler`. `hsdp` has two replicas. driver and delay are",
        "options of Local SGD. With resume, the state is saved between the two parts of a round.",
        "",
        *lines, "",
        *[f"{i + 1}. Refused on several ranks: {note}." for i, note in enumerate(notes)], "",
        "All together, compared with their references, on 1, 2 and 4 ranks:", "",
        *[f"- {name}: {', '.join(sorted(set(accelerator[name].values())))}" for name in stacks],
    ]
    return "\n".join(text) + "\n"


def main():
    programs = pathlib.Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        byte_tokenizer(folder / "bytes")
        accelerator = through_accelerator(programs, folder)
        trained = {letter: {} for letter in MODELS}
        flagged = [feature for feature in FEATURES if FLAGS[feature] is not None]
        for letter, model in MODELS.items():
            runs = Programs(programs, folder, model)
            for pair in [(f,) for f in flagged] + list(itertools.combinations(flagged, 2)):
                for world in WORLDS if possible(pair) else ():
                    found = trained[letter].setdefault(" + ".join(pair), {})
                    found[world] = runs.judge(pair, world)
                    print(letter, " + ".join(pair), world, found[world], flush=True)
    pathlib.Path("docs/combinations.md").write_text(page(accelerator, trained))


main()
