#!/usr/bin/env python3
"""Counts the texts whose WordPiece ids differ from those of Python's transformers.

Run: python tools/compare_wordpiece.py --programs build/release/bin --vocab FOLDER FILE...

with a Python that has transformers (scripts/bench.sh makes one in build/peers). FOLDER
has vocab.txt or tokenizer.json. A FILE that ends in .tsv has the text in its first
column and no header; of a .csv the column --text-column is taken; any other has one text
a line. Each file is compared with the folder's vocabulary, lower-cased and as it is, and
with one that `hasten tokenizer train` learns from it, whole and cut to 32 tokens. Prints
one line a comparison, and ends with 1 where any row differs.
"""

import argparse
import csv
import json
import pathlib
import subprocess
import sys
import tempfile

from transformers import BertTokenizer

SHOWN = 3  # rows that differ, of each comparison


def texts_of(path, column):
    with open(path, encoding="utf-8", newline="") as file:
        if path.suffix == ".tsv":
            return [row[0] for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if row]
        if path.suffix == ".csv":
            return [row[column] for row in csv.DictReader(file) if row[column].strip()]
        return [line for line in file.read().split("\n") if line.strip()]


def ours(programs, tokenizer, rows, max_length):
    command = [programs / "hasten", "tokenizer", "encode", rows, "--tokenizer", tokenizer]
    command += ["--max-length", str(max_length)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line)["input_ids"] for line in output.splitlines()]


def folder_with(work, name, vocab, lower_case):
    folder = work / name
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def compare(name, programs, tokenizer, reference, rows, texts):
    different = 0
    for max_length in (0, 32):
        mine = ours(programs, tokenizer, rows, max_length)
        cut = {"truncation": True, "max_length": max_length} if max_length else {}
        theirs = reference(texts, **cut)["input_ids"]
        wrong = [i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b]
        count = len(wrong) + abs(len(mine) - len(theirs))
        for i in wrong[:SHOWN]:
            print(f"  {texts[i]!r}\n    ours   {mine[i]}\n    theirs {theirs[i]}")
        length = f"cut to {max_length}" if max_length else "whole"
        print(f"{name}, {length}: {count} of {len(texts)} rows differ")
        different += count
    return different


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=pathlib.Path, required=True)
    parser.add_argument("--vocab", type=pathlib.Path, required=True)
    parser.add_argument("--text-column", default="text")
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    options = parser.parse_args()
    vocab = BertTokenizer.from_pretrained(options.vocab).get_vocab()
    pieces = sorted(vocab, key=vocab.get)
    different = rows = 0
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        given = {case: folder_with(work, name, pieces, case) for name, case in (("lower", True), ("cased", False))}
        for number, path in enumerate(options.files):
            texts = texts_of(path, options.text_column)
            table = work / f"{number}.jsonl"
            table.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
            learned = work / f"learned{number}"
            train = [options.programs / "hasten", "tokenizer", "train", table, "--output", learned]
            subprocess.run(train + ["--vocab-size", "8000"], check=True, capture_output=True)
            for name, tokenizer, lower in (
                ("lower-cased", given[True], True),
                ("cased", given[False], False),
                ("learned", learned, True),
            ):
                reference = BertTokenizer(vocab=str(tokenizer / "vocab.txt"), do_lower_case=lower)
                different += compare(f"{path.name}, {name}", options.programs, tokenizer, reference, table, texts)
            rows += len(texts)
    print(f"{rows} rows: {different} differences")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
