#!/usr/bin/env python3
"""Do hasten and huggingface_hub read each other's cache, offline?

  check_hub.py [--programs FOLDER]

A server on this machine has a repository with a model in two shards. Each side fetches it into a cache
of its own, and the other side finds it there without asking for anything. Exit code 0 when all is well,
1 when not. Needs transformers.
"""

import argparse
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAME, COMMIT = "org/tiny", "c" * 40  # of hub_server

# In a process of its own, because huggingface_hub reads the environment once.
FETCH = "import huggingface_hub as h; print(h.snapshot_download('org/tiny'))"
READ = """
import huggingface_hub as h, transformers
print(h.snapshot_download('org/tiny', local_files_only=True))
assert h.try_to_load_from_cache('org/tiny', 'added_tokens.json') is h.file_download._CACHED_NO_EXIST
model, info = transformers.AutoModel.from_pretrained('org/tiny', output_loading_info=True)
assert not info['missing_keys'], info
transformers.AutoTokenizer.from_pretrained('org/tiny')
"""


def make_repository(folder):
    """A model and a tokenizer; [FILE=ETAG] as the hub has them."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(words), **sizes)
    transformers.BertModel(config).save_pretrained(folder, max_shard_size="20KB")
    served = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        served.append(f"{path.name}={hashlib.sha256(data).hexdigest() if path.suffix == '.safetensors' else git}")
    assert sum(".safetensors=" in name for name in served) > 1, served
    return served


def run(command, **variables):
    """What it printed last; empty if it failed."""
    environment = dict(os.environ, HF_HUB_DISABLE_PROGRESS_BARS="1", no_proxy="127.0.0.1", HF_HUB_CACHE="", **variables)
    if not environment["HF_HUB_CACHE"]:
        del environment["HF_HUB_CACHE"]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        return ""
    return done.stdout.strip().split("\n")[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "build/release/bin")
    programs = parser.parse_args().programs.resolve()
    python, ours = [sys.executable, "-c"], [programs / "hasten", "download", NAME]
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        (place / "served").mkdir()
        served = make_repository(place / "served")
        server = subprocess.Popen(
            [programs / "hub_server", *served], cwd=place / "served", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        url = server.stdout.readline().strip()
        results = {}
        for name, fetch, read in (
            ("huggingface_hub reads what hasten fetched", ours, [*python, READ]),
            ("hasten reads what huggingface_hub fetched", [*python, FETCH], ours),
        ):
            home = str(place / name.split()[0])
            folder = str(pathlib.Path(home, "hub/models--org--tiny/snapshots", COMMIT))
            got = run(fetch, HF_ENDPOINT=url, HF_HOME=home, HF_HUB_OFFLINE="0")
            found = run(read, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=home, HF_HUB_OFFLINE="1")
            results[name] = got == found == folder
            if not results[name]:
                print(f"fetched into {got}, found in {found}, not {folder}", file=sys.stderr)
        server.communicate("\n")
    for name, well in results.items():
        print(f"{'ok' if well else 'NO'}  {name}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
