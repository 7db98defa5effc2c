#!/usr/bin/env python3
"""The demo's data and its yardstick; Python's standard library alone.

  demo_data.py select REVIEWS.csv TRAIN.csv TEST.csv --train-rows N --test-rows N
      takes the short reviews, drops repeated texts, and cuts them into two files
      without a text in common. The order is that of a hash of the text, so the
      choice is the same everywhere and has nothing to do with the file's order.
  demo_data.py split REVIEWS.csv TRAIN.csv TEST.csv --test-rows N
      takes N rows from the end for TEST.csv, without the texts that TRAIN.csv has.
  demo_data.py baseline TRAIN.csv TEST.csv
      prints as JSON the test accuracy of always naming TEST's larger class, and of a
      bag of words: multinomial naive Bayes on words and pairs of words.
"""

import argparse
import collections
import csv
import hashlib
import json
import math
import re

SHORT_SOURCE = "rotten_tomatoes"  # single sentences; the rest are long reviews
WORD = re.compile(r"[a-z0-9']+|[!?]")


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path, rows):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ("text", "label"), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def select(arguments):
    rows = {}
    for row in read(arguments.reviews):
        if row["source"] == SHORT_SOURCE:
            rows.setdefault(" ".join(row["text"].split()), row)
    order = sorted(rows.values(), key=lambda row: hashlib.sha256(row["text"].encode()).digest())
    wanted = arguments.train_rows + arguments.test_rows
    if len(order) < wanted:
        raise SystemExit(f"error: {arguments.reviews} has {len(order)} short reviews, {wanted} are needed")
    names = {"0": "negative", "1": "positive"}
    for row in order:
        row["label"] = names[row["label"]]
    write(arguments.test, order[: arguments.test_rows])
    write(arguments.train, order[arguments.test_rows : wanted])


def split(arguments):
    rows = read(arguments.reviews)
    train = rows[: -arguments.test_rows]
    known = {row["text"] for row in train}
    write(arguments.train, train)
    write(arguments.test, [row for row in rows[-arguments.test_rows :] if row["text"] not in known])


def features(text):
    words = WORD.findall(text.lower())
    return words + [f"{a} {b}" for a, b in zip(words, words[1:])]


def naive_bayes(train, test):
    """Share of `test` that multinomial naive Bayes with add-one smoothing gets right."""
    counts = collections.defaultdict(collections.Counter)
    rows = collections.Counter(row["label"] for row in train)
    for row in train:
        counts[row["label"]].update(features(row["text"]))
    known = set().union(*counts.values())
    total = {label: sum(counts[label].values()) + len(known) for label in rows}
    right = 0
    for row in test:
        words = [word for word in features(row["text"]) if word in known]
        score = {
            label: math.log(rows[label])
            + sum(math.log((counts[label][word] + 1) / total[label]) for word in words)
            for label in rows
        }
        right += max(score, key=score.get) == row["label"]
    return right / len(test)


def baseline(arguments):
    train, test = read(arguments.train), read(arguments.test)
    majority = max(collections.Counter(row["label"] for row in test).values()) / len(test)
    print(json.dumps({"majority": majority, "bag_of_words": naive_bayes(train, test)}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("select")
    command.set_defaults(run=select)
    command.add_argument("reviews")
    command.add_argument("train")
    command.add_argument("test")
    command.add_argument("--train-rows", type=int, required=True)
    command.add_argument("--test-rows", type=int, required=True)
    command = commands.add_parser("split")
    command.set_defaults(run=split)
    for name in ("reviews", "train", "test"):
        command.add_argument(name)
    command.add_argument("--test-rows", type=int, required=True)
    command = commands.add_parser("baseline")
    command.set_defaults(run=baseline)
    command.add_argument("train")
    command.add_argument("test")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
