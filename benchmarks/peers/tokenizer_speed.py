"""Python's tokenizers on one thread, and the tokenizers that both sides use.

    tokenizer_speed.py train TEXTS FOLDER    trains one of each KIND on the lines of TEXTS
    tokenizer_speed.py time TEXTS FOLDER     one line a case: {"case", "seconds"}
"""

import json
import os
import pathlib
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
sys.path.append(str(pathlib.Path(__file__).parents[2] / "tools/golden"))
import tokenizers_golden
from tokenizers import Tokenizer

KINDS = ("bert", "roberta", "llama3", "llama2", "xlm_roberta")
PIECES = 16000


def train(lines, folder):
    tokenizers_golden.LARGE = PIECES, lines
    for kind in KINDS:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        tokenizers_golden.KINDS[kind]().save(str(folder / kind / "tokenizer.json"))


def measure(lines, folder):
    for kind in KINDS:
        for case in (kind, f"{kind}_offsets"):
            tokenizer = Tokenizer.from_file(str(folder / kind / "tokenizer.json"))
            encode = tokenizer.encode_batch if case.endswith("_offsets") else tokenizer.encode_batch_fast
            encode(lines[:1000])
            start = time.perf_counter()
            tokens = sum(len(encoding) for at in range(0, len(lines), 1000) for encoding in encode(lines[at : at + 1000]))
            print(json.dumps({"case": case, "seconds": time.perf_counter() - start, "tokens": tokens}))


def main():
    lines = pathlib.Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()
    {"train": train, "time": measure}[sys.argv[1]](lines, pathlib.Path(sys.argv[3]))


if __name__ == "__main__":
    main()
