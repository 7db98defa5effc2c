"""Language models, compared with the Hugging Face Trainer, PEFT and generate()."""

import csv
import itertools
import json
import math
import pathlib
import shutil
import time

from sides import PRECISIONS, RANKS, ROOT, Bench, Case, environment, run_peer, wait_all

# Tokens of a row, rows of a batch of one rank.
SHAPES = {"gpt2_10m": (256, 8), "gpt2": (512, 1), "llama": (512, 1), "mistral": (512, 1), "gemma": (512, 1)}
STEPS, NEW = 4, 96
LORA = ("gpt2", "llama")
GENERATE = [(kind, batch) for kind in SHAPES for batch in (1, 8)]


def both(name, time_most, memory_most):
    return Case(name, "s/1000 tokens", time_most, 2), Case(f"{name}_peak", "bytes a rank", memory_most, 0)


class TextTraining(Bench):
    """One run of either side, two ranks of one thread. self.texts has a text in each line."""

    def make_models(self, *kinds):
        script = ROOT / "benchmarks/peers/decoders.py"
        make = [self.options.peer_python, script, "make", self.texts, self.work, *kinds]
        wait_all([(list(map(str, make)), environment())])

    def train_ours(self, kind, size, batch, steps, *flags):
        """Seconds for 1000 tokens, and the larger rank's memory. The model is in self.work / "out"."""
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        command = [self.options.programs / "hasten", "train", "--task", "text-generation", "--model", self.work / kind]
        command += ["--train-file", self.texts, "--packing-strategy", "wrapped", "--block-size", size]
        command += ["--per-device-train-batch-size", batch, "--max-steps", steps, "--nproc", RANKS]
        command += ["--output-dir", out, "--save-strategy", "no", "--eval-strategy", "no", *flags]
        wait_all([(list(map(str, command)), environment())])
        record = next(r for r in reversed(self.records()) if "train_runtime" in r)
        return 1000 * record["train_runtime"] / (steps * batch * size * RANKS), self.peak()

    def train_peer(self, kind, size, batch, steps, *flags):
        """The same, and the loss of --eval-file."""
        shape = ["--block-size", size, "--batch-size", batch, "--max-steps", steps, "--output", self.work / "peer"]
        process, report = run_peer(
            self.options, "decoders.py", "train", self.texts, self.work / kind, *map(str, shape + list(flags)))
        return 1000 * report["train_runtime"] / report["tokens"], process.peak_bytes, report["eval_loss"]


class Tinyshakespeare(TextTraining):
    """GPT-2 with 10 M parameters from random weights, 500 steps on the text that --data names."""

    # The order of the samples moves the loss by about a hundredth. So each round has another seed.

    name = "tinyshakespeare"
    rounds = 3
    peer_name = "Hugging Face Trainer"
    cases = [
        Case("training", "s/1000 tokens", 1.00, 2),
        Case("perplexity", "of a tenth of the text", math.exp(0.02), 2),  # a loss 0.02 higher
    ]
    size, batch, steps, rate = 128, 4, 500, "5e-4"

    def __init__(self, options):
        if not options.peer_python or not str(options.data).endswith(".txt"):
            self.skipped = "transformers makes the model, and --data names a text (.txt)"
            return
        self.empty_work(options)
        lines = [line for line in options.data.read_text(encoding="utf-8").splitlines() if line.strip()]
        self.texts, self.eval = self.work / "train.txt", self.work / "eval.txt"
        cut = len(lines) * 9 // 10
        self.texts.write_text("\n".join(lines[:cut]) + "\n", encoding="utf-8")
        self.eval.write_text("\n".join(lines[cut:]) + "\n", encoding="utf-8")
        self.make_models("gpt2_10m")
        self.seeds = itertools.count(42)

    def round(self):
        shape = ["gpt2_10m", self.size, self.batch, self.steps, "--learning-rate", self.rate, "--seed", next(self.seeds)]
        seconds, _ = self.train_ours(*shape)
        command = [self.options.programs / "hasten", "eval", "--model", self.work / "out", "--file", self.eval, "--json"]
        report = json.loads(wait_all([(list(map(str, command)), environment())]).output)
        yield "training", seconds, None
        yield "perplexity", math.exp(report["eval_loss"]), None
        if self.options.peers:
            seconds, _, loss = self.train_peer(*shape, "--eval-texts", self.eval)
            yield "training", None, seconds
            yield "perplexity", None, math.exp(loss)


class Decoders(TextTraining):
    """GPT-2, Llama, Mistral and Gemma: a training step, LoRA, and generation, two ranks of one thread."""

    # "…_peak": resident memory of the larger rank. "generate_…": greedy, with the cache, two threads.

    name = "decoders"
    rounds = 3
    peer_name = "Hugging Face Trainer, PEFT, generate()"
    cases = [
        *(case for kind in SHAPES for precision in PRECISIONS for case in both(f"{kind}_{precision}", 0.95, 0.80)),
        *(case for kind in LORA for case in both(f"{kind}_lora_fp32", 0.95, 0.95)),
        *(Case(f"generate_{kind}_{batch}", "s/1000 tokens", 0.83, 2) for kind, batch in GENERATE),
    ]

    def __init__(self, options):
        super().__init__(options)
        if not options.peer_python or options.smoke:
            self.skipped = "transformers makes the models"
            return
        self.texts, self.prompts = self.work / "texts.txt", self.work / "prompts.jsonl"
        rows = [" ".join(row["text"].split()) for row in csv.DictReader(self.train.open(newline=""))]
        self.texts.write_text("\n".join(rows) + "\n", encoding="utf-8")
        self.prompts.write_text("".join(json.dumps({"prompt": row[:80]}) + "\n" for row in rows[:8]))
        self.make_models(*SHAPES)

    def generate_ours(self, kind, batch, tokens):
        command = [self.options.programs / "hasten", "generate", "--model", self.work / kind, "--file", self.prompts]
        command += ["--max-rows", batch, "--batch-size", batch, "--max-new-tokens", tokens, "--json"]
        start = time.time()
        wait_all([(list(map(str, command)), dict(environment(), OMP_NUM_THREADS="2"))])
        return time.time() - start

    def forget_end(self, kind):
        """Nothing ends a text before its last token."""
        for name in ("config.json", "generation_config.json"):
            file = pathlib.Path(self.work / kind / name)
            options = json.loads(file.read_text())
            options.pop("eos_token_id", None)
            file.write_text(json.dumps(options))

    def round(self):
        runs = [(kind, f"{kind}_{p}", ["--precision", p], ["--bf16"] * (p == "bf16")) for kind in SHAPES for p in PRECISIONS]
        lora = ["--lora-r", "8", "--lora-alpha", "16", "--lora-dropout", "0.05", "--lora-target-modules", "all-linear"]
        runs += [(kind, f"{kind}_lora_fp32", lora, ["--lora-r", "8"]) for kind in LORA]
        for kind, case, ours, theirs in runs:
            seconds, peak = self.train_ours(kind, *SHAPES[kind], STEPS, *ours)
            yield case, seconds, None
            yield f"{case}_peak", peak, None
            if self.options.peers:
                seconds, peak, _ = self.train_peer(kind, *SHAPES[kind], STEPS, *theirs)
                yield case, None, seconds
                yield f"{case}_peak", None, peak
        for kind, batch in GENERATE:
            self.forget_end(kind)
            seconds = self.generate_ours(kind, batch, NEW + 1) - self.generate_ours(kind, batch, 1)
            yield f"generate_{kind}_{batch}", 1000 * seconds / (NEW * batch), None
            if self.options.peers:
                command = [self.options.peer_python, ROOT / "benchmarks/peers/decoders.py", "generate", self.work / kind]
                command += [self.prompts, NEW, batch]
                process = wait_all([(list(map(str, command)), dict(environment(), OMP_NUM_THREADS="2"))])
                report = json.loads(process.output.splitlines()[-1])
                yield f"generate_{kind}_{batch}", None, 1000 * report["seconds"] / report["tokens"]
