"""Tokenizers of each kind compared with Python's, one thread on each side."""

import csv
import json
import sys

from sides import ROOT, Bench, Case, environment, wait_all

KINDS = ("bert", "roberta", "llama3", "llama2", "xlm_roberta")


class Tokenizers(Bench):
    """Ids of short reviews, with and without offsets, compared with encode_batch and encode_batch_fast."""

    # The vocabularies are trained on the same reviews, 16,000 pieces each.

    name = "tokenizers"
    rounds = 5
    peer_name = "Python's tokenizers"
    cases = [Case(kind + offsets, "s", 1.0, 3) for kind in KINDS for offsets in ("", "_offsets")]

    def __init__(self, options):
        super().__init__(options)
        self.texts, self.folder = self.work / "texts.txt", self.work / "tokenizers"
        rows = csv.DictReader(self.train.open(newline=""))
        self.texts.write_text("\n".join(" ".join(row["text"].split()) for row in rows) + "\n", encoding="utf-8")
        if options.peers:
            self.lines([options.peer_python, ROOT / "benchmarks/peers/tokenizer_speed.py", "train", self.texts, self.folder])

    def lines(self, command):
        output = wait_all([(list(map(str, command)), environment())]).output
        return {line["case"]: line for line in map(json.loads, output.splitlines())}

    def round(self):
        if not self.options.peers:  # nothing has made the tokenizers
            golden = ROOT / "tests/golden/tokenizers"
            for kind in KINDS:
                (self.folder / kind).mkdir(parents=True, exist_ok=True)
                (self.folder / kind / "tokenizer.json").write_bytes((golden / f"{kind}.json").read_bytes())
        ours = self.lines([self.options.programs / "tokenizer_speed", self.texts, self.folder, *KINDS])
        peer = {}
        if self.options.peers:
            peer = self.lines([self.options.peer_python, ROOT / "benchmarks/peers/tokenizer_speed.py", "time", self.texts, self.folder])
        for case in self.cases:
            mine, theirs = ours[case.name], peer.get(case.name, {})
            if theirs and mine["tokens"] != theirs["tokens"]:
                sys.exit(f"error: {case.name}: {mine['tokens']} tokens, and {theirs['tokens']} of the peer")
            yield case.name, mine["seconds"], theirs.get("seconds")
