"""bf16 and fp16 compared with fp32, and bf16 compared with the peer's."""

import json

import svg
from sides import PICTURES, RANKS, ROOT, Bench, Case, environment, wait_all


class Precision(Bench):
    """Training steps in bf16 compared with fp32 and with Hugging Face's in bf16, one thread."""

    # "…_over_fp32", "…_peak" and "…_batches" have our own fp32 as the other side;
    # "…_batches": batches for 1000 samples, each as large as fits into 512 MiB.

    name = "precision"
    rounds = 3
    peer_name = "Hugging Face bf16; …_over_fp32, …_peak, …_batches: ours in fp32"
    cases = [
        Case("bert_base", "s/step", 1.0, 4),
        Case("bert_base_over_fp32", "s/step", 1 / 1.5, 4),
        Case("bert_base_peak", "bytes", 0.6, 0),
        Case("bert_mini_batches", "batches/1000 rows", 1.0),
        Case("minilm_reviews", "s/1000 samples", 1.0),
        Case("minilm_reviews_over_fp32", "s/1000 samples", 1 / 1.5),
    ]

    def values(self, command):
        command = list(map(str, [*command] + ["--smoke"] * self.options.smoke))
        output = wait_all([(command, environment())]).output
        return {line["case"]: line["value"] for line in map(json.loads, output.splitlines())}

    def reviews(self, precision, steps, rows=32, rate="5e-5", ranks=1):
        flags = ["--max-steps", str(steps), "--eval-strategy", "no", "--logging-steps", "1"]
        flags += ["--per-device-train-batch-size", str(rows), "--precision", precision, "--learning-rate", rate]
        self.ours("minilm", *flags, ranks=ranks)
        return self.records()

    def round(self):
        ours = self.values([self.options.programs / "precision_step"])
        yield "bert_base", ours["step_bf16"], None
        yield "bert_base_over_fp32", ours["step_bf16"], ours["step_fp32"]
        yield "bert_base_peak", ours["peak_bf16"], ours["peak_fp32"]
        yield "bert_mini_batches", 1000 / ours["largest_batch_bf16"], 1000 / ours["largest_batch_fp32"]
        steps = 4 if self.options.smoke else 40
        seconds = {}
        for precision in ("fp32", "bf16"):
            record = next(r for r in reversed(self.reviews(precision, steps)) if "train_runtime" in r)
            seconds[precision] = 1000 / record["train_samples_per_second"]
        yield "minilm_reviews", seconds["bf16"], None
        yield "minilm_reviews_over_fp32", seconds["bf16"], seconds["fp32"]
        if not self.options.peers:
            return
        peer = self.values([self.options.peer_python, ROOT / "benchmarks/peers/precision_step.py"])
        yield "bert_base", None, peer["step_bf16"]
        same = ["--max-steps", str(steps), "--batch-size", "32", "--padding", "grouped", "--bf16"]
        _, report = self.peer("minilm", *same, ranks=1)
        yield "minilm_reviews", None, 1000 * report["train_runtime"] / report["samples"]

    def picture(self, root):
        """Loss on reviews, mean of ten steps. fp16 on a CPU takes minutes."""
        curves = {}
        for precision in ("fp32", "bf16", "fp16"):
            losses = [r["loss"] for r in self.reviews(precision, 80, 8, "1e-4", RANKS) if "loss" in r]
            curves[precision] = [
                (10 * (i + 1), sum(losses[10 * i : 10 * i + 10]) / 10) for i in range(len(losses) // 10)
            ]
        title = "MiniLM on reviews"
        chart = svg.chart(title, "update", "training loss", curves, x_log=False, y_log=False)
        svg.write(root / PICTURES / "precision.svg", [chart])
