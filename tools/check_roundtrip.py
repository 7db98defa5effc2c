#!/usr/bin/env python3
"""Does transformers read what hasten wrote, and get the same numbers?

  check_roundtrip.py MODEL_DIR TEXTS [--column text] [--limit 200] [--hasten PROGRAM]

TEXTS is a CSV with a header, or a text file with one text a line. Every text goes
through `hasten predict --with-logits` and through AutoTokenizer and
AutoModelForSequenceClassification: token ids must be equal, logits within 1e-5, the
label the same. Exit code 0 when they are, 1 when not, 2 for bad input.
Needs torch and transformers in this Python.
"""

import argparse
import csv
import json
import pathlib
import subprocess
import sys
import tempfile

TOLERANCE = 1e-5


def read_texts(path, column, limit):
    if path.suffix != ".csv":
        texts = path.read_text(encoding="utf-8").splitlines()
    else:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            if column not in (rows.fieldnames or []):
                raise ValueError(f"{path} has no column {column}: {rows.fieldnames}")
            texts = [row[column] for row in rows]
    texts = [text for text in texts if text and text.strip()][:limit]
    if not texts:
        raise ValueError(f"{path}: no texts")
    return texts


def predict(program, model, texts):
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "texts.csv"
        output = pathlib.Path(folder) / "predictions.jsonl"
        with open(source, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text"])
            writer.writerows([text] for text in texts)
        subprocess.run(
            [program, "predict", "--model", str(model), "--file", str(source),
             "--text-column", "text", "--output", str(output), "--with-logits"],
            check=True)
        # Not splitlines(): it also splits at U+0085 and U+2028, which texts hold.
        lines = output.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def compare(model_folder, texts, predictions):
    """The differences, as lines; and the largest distance of two logits."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder).eval()
    problems, largest = [], 0.0
    for number, (text, ours) in enumerate(zip(texts, predictions), 1):
        ids = tokenizer(text, truncation=True)["input_ids"]
        if ours["text"] != text:
            problems.append(f"text {number}: rows are out of order")
        if ids != ours["input_ids"]:
            problems.append(f"text {number}: ids {ours['input_ids']}, transformers {ids}")
            continue
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        distance = (logits - torch.tensor(ours["logits"])).abs().max().item()
        largest = max(largest, distance)
        label = model.config.id2label[int(logits.argmax())]
        if not distance <= TOLERANCE:
            problems.append(f"text {number}: logits differ by {distance:.3g}")
        elif label != ours["label"]:
            problems.append(f"text {number}: label {ours['label']}, transformers {label}")
    return problems, largest


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("texts", type=pathlib.Path)
    parser.add_argument("--column", default="text")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--hasten", default=str(
        pathlib.Path(__file__).resolve().parents[1] / "build/release/bin/hasten"))
    options = parser.parse_args()
    try:
        texts = read_texts(options.texts, options.column, options.limit)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    predictions = predict(options.hasten, options.model, texts)
    if len(predictions) != len(texts):
        print(f"{len(predictions)} predictions for {len(texts)} texts")
        return 1
    problems, largest = compare(options.model, texts, predictions)
    for problem in problems[:20]:
        print(problem)
    print(f"{len(texts)} texts, {len(problems)} differ, "
          f"largest distance of two logits {largest:.3g}")
    return 1 if problems else 0


sys.exit(main())
