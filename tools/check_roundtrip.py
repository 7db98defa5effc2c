#!/usr/bin/env python3
"""Does transformers read what hasten wrote, and get the same numbers?

  check_roundtrip.py MODEL_DIR TEXTS [--column text] [--limit 200] [--hasten PROGRAM]

TEXTS is a CSV with a header, or a text file with one text a line. Every text goes
through `hasten predict` and through transformers. A classifier's token ids must be
equal, its logits within 1e-5, the label the same. A model for token classification gets
the words of each text, and a masked language model each text with a mask for one of its
words: labels and tokens must be equal, probabilities within 1e-5. Exit code 0 when they are, 1 when not, 2 for bad input.
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


def predict(program, model, rows, *flags):
    """The lines that hasten predict writes for the rows: JSON objects."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "rows.jsonl"
        output = pathlib.Path(folder) / "predictions.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        subprocess.run(
            [program, "predict", "--model", str(model), "--file", str(source),
             "--output", str(output), *flags], check=True)
        # Not splitlines(): it also splits at U+0085 and U+2028, which texts hold.
        lines = output.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def words_of(text, mask=None):
    words = text.split()[:60]
    if mask:
        words[len(words) // 2] = mask
    return words


def compare_words(model_folder, texts, program):
    """The same for the labels of words; the largest distance of two probabilities."""
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    # Byte-level BPE needs add_prefix_space=True for words. Not every class of transformers uses it.
    space = " " if "ByteLevel" in json.dumps(json.loads((model_folder / "tokenizer.json").read_text())["pre_tokenizer"]) else ""
    model = AutoModelForTokenClassification.from_pretrained(model_folder).eval()
    predictions = predict(program, model_folder, [{"tokens": words_of(text)} for text in texts])
    problems, largest = [], 0.0
    for number, (text, ours) in enumerate(zip(texts, predictions), 1):
        encoded = tokenizer([space + word for word in words_of(text)], is_split_into_words=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            probabilities = model(**encoded).logits[0].softmax(1)
        expected = [None] * len(words_of(text))
        for token, word in reversed(list(enumerate(encoded.word_ids()))):
            if word is not None:
                expected[word] = probabilities[token]
        for word, (label, score, row) in enumerate(zip(ours["ner_tags"], ours["scores"], expected)):
            theirs = None if row is None else model.config.id2label[int(row.argmax())]
            largest = max(largest, 0 if row is None or score is None else abs(score - row.max().item()))
            if label != theirs:
                problems.append(f"text {number}, word {word}: {label}, transformers {theirs}")
    return problems + ["probabilities differ"] * (not largest <= TOLERANCE), largest


def compare_masks(model_folder, texts, program):
    """The same for the tokens of a mask."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForMaskedLM.from_pretrained(model_folder).eval()
    masked = [" ".join(words_of(text, tokenizer.mask_token)) for text in texts]
    predictions = predict(program, model_folder, [{"text": text} for text in masked], "--top-k", "3")
    problems, largest = [], 0.0
    for number, (text, ours) in enumerate(zip(masked, predictions), 1):
        encoded = tokenizer(text, truncation=True, return_tensors="pt")
        at = encoded["input_ids"][0].tolist().index(tokenizer.mask_token_id)
        with torch.no_grad():
            probabilities = model(**encoded).logits[0, at].softmax(0)
        for answer in ours["masks"][0]:
            largest = max(largest, abs(answer["score"] - probabilities[answer["token"]].item()))
        best = probabilities.topk(3).indices.tolist()
        if [answer["token"] for answer in ours["masks"][0]] != best:
            problems.append(f"text {number}: {ours['masks'][0]}, transformers {best}")
    return problems + ["probabilities differ"] * (not largest <= TOLERANCE), largest


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
    architecture = json.loads((options.model / "config.json").read_text())["architectures"][0]
    if architecture.endswith("ForTokenClassification"):
        problems, largest = compare_words(options.model, texts, options.hasten)
    elif architecture.endswith("ForMaskedLM"):
        problems, largest = compare_masks(options.model, texts, options.hasten)
    else:
        predictions = predict(options.hasten, options.model, [{"text": text} for text in texts], "--with-logits")
        if len(predictions) != len(texts):
            print(f"{len(predictions)} predictions for {len(texts)} texts")
            return 1
        problems, largest = compare(options.model, texts, predictions)
    for problem in problems[:20]:
        print(problem)
    print(f"{len(texts)} texts, {len(problems)} differ, "
          f"largest distance of two values {largest:.3g}")
    return 1 if problems else 0


sys.exit(main())
