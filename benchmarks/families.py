"""Fine-tuning of other families than BERT, compared with the Hugging Face Trainer."""

import csv

from sides import PRECISIONS, ROOT, Bench, Case, environment, wait_all

FAMILIES = ("distilbert", "roberta", "modernbert")


class Families(Bench):
    """DistilBERT, RoBERTa and ModernBERT in their published shapes on short reviews, two ranks of one thread."""

    # Both sides group texts by length. "…_peak": resident memory of the larger rank.

    name = "families"
    rounds = 3
    peer_name = "Hugging Face Trainer"
    cases = [
        case
        for family in FAMILIES
        for precision in PRECISIONS
        for case in (
            Case(f"{family}_{precision}", "s/1000 samples", 0.85, 1),
            Case(f"{family}_{precision}_peak", "bytes a rank", 0.70, 0),
        )
    ]

    def __init__(self, options):
        super().__init__(options)
        if not options.peer_python or options.smoke:
            self.skipped = "transformers makes the models"
            return
        texts = self.work / "texts.txt"
        rows = csv.DictReader(self.train.open(newline=""))
        texts.write_text("\n".join(" ".join(row["text"].split()) for row in rows) + "\n", encoding="utf-8")
        script = ROOT / "benchmarks/peers/families.py"
        wait_all([(list(map(str, [options.peer_python, script, texts, self.work, *FAMILIES])), environment())])

    def model_flags(self, model):
        return ["--model", self.work / model]

    def round(self):
        for family in FAMILIES:
            for precision in PRECISIONS:
                steps, batch = "8", "8"
                flags = ["--max-steps", steps, "--eval-strategy", "no", "--per-device-train-batch-size", batch]
                self.ours(family, *flags, "--precision", precision)
                record = next(r for r in reversed(self.records()) if "train_runtime" in r)
                case = f"{family}_{precision}"
                yield case, 1000 / record["train_samples_per_second"], None
                yield f"{case}_peak", self.peak(), None
                if not self.options.peers:
                    continue
                flags = ["--max-steps", steps, "--batch-size", batch, "--padding", "grouped"]
                flags += ["--bf16"] if precision == "bf16" else []
                self.options.pretrained = self.work / family  # the peer's tokenizer
                process, report = self.peer(self.work / family, *flags)
                yield case, None, 1000 * report["train_runtime"] / report["samples"]
                yield f"{case}_peak", None, process.peak_bytes
