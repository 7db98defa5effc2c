#!/usr/bin/env python3
"""Is each key of the files of a model's folder used as in transformers and PEFT, refused, or named?

  check_keys.py [--program PROGRAM] [--cases TEXT] [--files TEXT] [--limit N] [--seed N] [--report FILE]
  check_keys.py --golden FILE

Takes the folders of tools/golden/reference.py and changes keys of their JSON files, one at a time and
random ones in pairs: a key is deleted, set to null, to another legal value and to a wrong type, and
keys are added, those of src/tables/known_keys.inc and unknown ones. It changes tensors, too, and draws
which files of a tokenizer are there, with values that contradict each other. hasten's result must be
the reference's, or an error that names the key or tensor, or the log must name it as ignored. Where
the reference raises, hasten must refuse, or the table must say that the key is neutral. A folder that
hasten writes from it must give the same, with the keys that hasten does not use. hasten may be lenient:
null counts as no key, a whole number as a number, a key that tokenizers requires may be absent where
hasten has its value as a default, and what a tokenizer's class replaces is not read.

Prints each failure, and for each kind of file for how many changes the reference's own output changed
or it raised; below 30 % a kind fails, because such changes prove nothing. --golden writes a sample
with the reference's results for the C++ tests. Exit code 0 when all is right. Needs torch,
transformers and peft, and benchmarks' program model_logits.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "golden"))
import key_changes  # noqa: E402
import reference  # noqa: E402
from key_changes import DELETE, Tensors, changes_of  # noqa: E402
from reference import equal, load_file, read_json  # noqa: E402

LEAST = 0.3  # of a kind's changes must change the reference's output
WORKERS = 2
SAVED = 4  # of one in so many folders hasten's own copy is compared, too


class Hasten:
    """The program that answers jobs. It logs a line once, so the lines of earlier jobs count."""

    def __init__(self, program):
        self.program, self.process, self.lines = program, None, []

    def ask(self, job):
        if self.process is None:
            self.process = subprocess.Popen([self.program, "--jobs"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, text=True, env={**reference.os.environ, "OMP_NUM_THREADS": "1"})
            self.lines = []
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        except (OSError, json.JSONDecodeError):
            code = self.process.poll()
            self.process.kill()
            self.process = None
            return {"error": f"CRASH: the program ended, exit code {code}"}
        self.lines += answer.get("log", [])
        return answer

    def result(self, case, folder, saved):
        answers = []
        for job in case.jobs(folder, saved):
            answers.append(self.ask(job(answers) if callable(job) else job))
            if "error" in answers[-1]:
                return {"error": answers[-1]["error"], "log": self.lines}
        return case.result(answers) | {"log": self.lines}


def is_documented(change):
    """Differences of docs/guides/coming-from-python.md, and files that Python's tokenizers refuses for a null."""
    case, text = change.case, change.text
    # A class of the change has a token by default that the vocabulary lacks, or works on bytes that it lacks.
    classed = case.kind == "encode" and any(name in text for name in ("model_type=qwen2", "tokenizer_class=\"GPT2TokenizerFast\""))
    vocabulary = (reference.TOKENIZERS / f"{case.source}.json").read_text(encoding="utf-8") if classed else ""
    lacks = classed and not ("<|endoftext|>" in vocabulary and "\u0120" in vocabulary)
    without_json = case.kind == "encode" and case.style == "files" and "model_type=modernbert" in text
    return (lacks or without_json or "max_length=20" in text or change.file == "which file wins"
            or change.file == "tokenizer.json" and text.endswith("=null"))


def verdict(change, theirs, ours):
    """Empty if hasten does as it must."""
    found = undocumented_verdict(change, theirs, ours)
    if change.file == "which file wins" and found != "the error does not name it":
        return found  # which token of a file is named may differ
    return "" if is_documented(change) else found


def undocumented_verdict(change, theirs, ours):
    names = change.names
    mentions = lambda text: any(name.split(".")[-1] in text or name in text for name in names)  # noqa: E731
    log = "" if change.strict else "\n".join([*(line for line in ours.get("log", []) if "ignored" in line), *ours.get("report", [])])
    if "CRASH" in ours.get("error", ""):
        return "crash"
    if "error" in ours:
        # A change of a size makes other names of tensors wrong, which both say in their words.
        tensors = re.search(r"do(es)? not fit|larger than the folder's weights|occurs twice", ours["error"])
        if "error" in theirs or "random" in theirs or mentions(ours["error"]) or tensors:
            return ""
        return "the error does not name it"
    if "error" in theirs:
        without_padding = "Cannot handle batch sizes > 1 if no padding token" in theirs["error"]  # hasten takes the mask
        return "" if change.neutral or without_padding or mentions(log) else "accepted what the reference refuses"
    if "random" in theirs:
        return "" if change.case.kind == "generate" or "random weights" in log or mentions(log) else "new weights without a word"
    different = equal(theirs, ours)
    return "" if not different or mentions(log) else f"other {different}"


# Keys of config.json that hasten writes itself.
OWN_KEYS = ["transformers_version", "dtype", "torch_dtype", "label2id", "architectures"]


def saved_wrongly(change, theirs, folder, saved):
    """What is wrong with the folder that hasten wrote; its keys must be those that it read."""
    case = change.case
    if case.kind == "adapter" and "modules_to_save" in change.names:
        return ""  # PEFT adds the classifier's names when it reads, and model_logits writes those that it has read
    again = case.reference(saved)
    if "logits" not in again or equal(theirs, again):
        return f"the folder that hasten wrote gives {summary(again)}"
    if case.kind == "logits":
        read, written = read_json(folder / "config.json"), read_json(saved / "config.json")
        for key, value in read.items():
            unknown = key_changes.use_of(case, "config.json", read, (key,)) in ("unknown", "neutral")
            if unknown and key not in OWN_KEYS and written.get(key, "(none)") != value:
                return f"hasten wrote {key}={written.get(key)} into config.json"
    return ""


def summary(result):
    if "error" in result or "random" in result:
        return result.get("error") or "random: " + result["random"]
    if "logits" in result:
        return "logits " + str([round(float(each), 5) for each in result["logits"].flatten()[:4]])
    return json.dumps({key: result[key] for key in ("ids", "texts") if key in result}, ensure_ascii=False)[:300]


def drawn_changes(options, pristine, draw):
    """All changes of the cases that the options name, in random order."""
    changes, seen = [], {}
    pristine.mkdir()
    for case in reference.cases():
        if options.cases in case.name:
            case.build(pristine / case.name)
            changes += changes_of(case, pristine / case.name, draw, seen, options.files)
    draw.shuffle(changes)
    return changes[: options.limit] if options.limit else changes


def run(task):
    """The rows of one worker's changes: (kind of file, changed the reference, verdict, text)."""
    number, workers, options = task
    reference.quiet()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust writes each panic there, too
    hasten = Hasten(options.program)
    rows, plain = [], {}
    with tempfile.TemporaryDirectory() as work:
        pristine, copy_of = pathlib.Path(work) / "pristine", pathlib.Path(work) / "copy"
        for change in drawn_changes(options, pristine, random.Random(options.seed))[number::workers]:
            case = change.case
            folder = pristine / case.name
            if case.name not in plain:
                plain[case.name] = case.reference(folder)
            shutil.rmtree(copy_of, ignore_errors=True)
            shutil.copytree(folder, copy_of)
            change.apply(copy_of)
            theirs = case.reference(copy_of)
            bites = "error" in theirs or "random" in theirs or bool(equal(plain[case.name], theirs))
            saved = pathlib.Path(work) / "saved" if len(rows) % SAVED == 0 and case.kind in ("logits", "adapter") else None
            shutil.rmtree(pathlib.Path(work) / "saved", ignore_errors=True)
            ours = hasten.result(case, copy_of, saved)
            wrong = verdict(change, theirs, ours)
            if not wrong and saved and "logits" in theirs and "logits" in ours and not equal(theirs, ours):
                wrong = saved_wrongly(change, theirs, copy_of, saved)
            if wrong and "error" in theirs and change.lenient:
                change.apply(copy_of, change.lenient)
                wrong = verdict(change, case.reference(copy_of), ours) and wrong
            text = ""
            if wrong:
                text = f"{wrong} | {case.name} | {change.file} | {change.text}\n    reference: {summary(theirs)}\n    hasten: {summary(ours)}"
            rows.append((change.file, bites, wrong, text))
    return rows


GOLDEN = {"config.json": 45, "generation_config.json": 20, "adapter_config.json": 18, "tokenizer_config.json": 24, "tokenizer.json": 14,
          "special_tokens_map.json": 4, "added_tokens.json": 2, "which file wins": 12, "model.safetensors": 24}
SHOWN_TEXTS = 3
REFUSED = "adapter_masked"  # hasten has no such adapter


def golden(file):
    """Writes a sample of single changes, most of which change the outcome. "cases" has the JSON files of each
    folder. Weights follow from families.py's formula and from the name of the case of families.py; those of
    an adapter from "adapter." + lora.plain(name), but a base_layer's are the base's. A tokenizer.json is that
    of tests/golden/tokenizers. A change sets the value at "path" of "file", or deletes it; or sets the tensors
    name = from * scale + shift (scale null: there is no such tensor); or writes "files" (null: there is no such file).
    "expected" is "error", the ids of "texts" or of the answers to "prompts", or the first eight logits of tokens
    that are no padding. Where hasten refuses instead, the error has one of "names"."""
    reference.quiet()
    made, cases, counts = [], {}, {}
    with tempfile.TemporaryDirectory() as work:
        pristine, copy_of = pathlib.Path(work) / "pristine", pathlib.Path(work) / "copy"
        options = argparse.Namespace(cases="", files="", limit=0)
        for change in drawn_changes(options, pristine, random.Random(3)):
            case, folder = change.case, pristine / change.case.name
            tensors = [value for value in change.files.values() if isinstance(value, Tensors)]
            large = change.step and change.step[0][-1] in ("vocab", "merges", "precompiled_charsmap")
            if not (change.step or tensors or change.file == "which file wins") or large or getattr(case, "sharded", False) or len(change.files) > 1 and tensors:
                continue
            count = counts.setdefault(change.file, [0, 0])
            dull = tensors and not change.strict and all(name == source or scale is None for name, source, scale, _ in tensors[0].steps)
            if sum(count) >= GOLDEN.get(change.file, 0) or dull or (case.kind == "adapter" and tensors) or case.name == REFUSED:
                continue
            shutil.rmtree(copy_of, ignore_errors=True)
            shutil.copytree(folder, copy_of)
            change.apply(copy_of)
            theirs, plain = case.reference(copy_of), case.reference(folder)
            same = "error" not in theirs and not equal(plain, theirs)
            if "error" in theirs and change.lenient:
                change.apply(copy_of, change.lenient)
                if "error" not in case.reference(copy_of):
                    continue
            if "random" in theirs or (count[same] + 1 > GOLDEN[change.file] * (0.2 if same else 0.8) + 1):
                continue
            count[same] += 1
            if case.name not in cases:
                cases[case.name] = golden_case(case, folder)
            entry = {"case": case.name, "file": change.file, "names": [*change.names, *["not fit"] * hasattr(case, "task")]}
            if change.step:
                path, value = change.step
                entry |= {"path": list(path)} | ({"delete": True} if value is DELETE else {"value": value})
            elif tensors:
                entry["tensors"] = [{"name": name, "from": source, "scale": scale, "shift": shift} for name, source, scale, shift in tensors[0].steps]
            else:
                entry["files"] = change.files
            entry["expected"] = ("error" if "error" in theirs else theirs["ids"][:SHOWN_TEXTS] if "ids" in theirs
                                 else [round(float(each), 6) for each in theirs["logits"].flatten()[:8]])
            made.append(entry)
    content = {"made_with": f"transformers {reference.transformers.__version__}, peft {reference.peft.__version__}",
               "texts": reference.TEXTS[:SHOWN_TEXTS], "prompts": reference.PROMPTS, "cases": cases}
    text = json.dumps(content, ensure_ascii=False)[:-1] + ', "changes": [\n' + ",\n".join(json.dumps(each, ensure_ascii=False) for each in made) + "\n]}\n"
    file.write_text(text, encoding="utf-8")
    print(len(made), "changes of", len(cases), "cases,", len(text.encode()), "bytes", counts)


def golden_case(case, folder):
    files = {path.name: read_json(path) for path in sorted(folder.iterdir()) if path.suffix == ".json" and path.name not in ("tokenizer.json", "vocab.json")}
    made = {"kind": case.kind, "files": files}
    if case.kind == "encode":
        made |= {"tokenizer": case.source, "style": case.style}
    elif case.kind == "generate":
        made |= {"model": case.case, "max_new_tokens": case.new_tokens(folder), "tokenizer": case.tokenizer}
    else:
        made |= {"model": case.model, "task": case.task}
    if case.kind == "adapter":
        files["adapter_config.json"]["base_model_name_or_path"] = "base"
        made["tensors"] = {name: list(tensor.shape) for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "build/release/bin/model_logits"))
    parser.add_argument("--cases", default="", help="part of a case's name")
    parser.add_argument("--files", default="", help="part of a file's name")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=pathlib.Path)
    parser.add_argument("--golden", type=pathlib.Path)
    options = parser.parse_args()
    if options.golden:
        golden(options.golden)
        return 0
    with concurrent.futures.ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        rows = [row for part in pool.map(run, [(number, WORKERS, options) for number in range(WORKERS)]) for row in part]
    failures = sorted(row for row in rows if row[2])
    lines = [f"{file}: {text}" for file, _, _, text in failures]
    failed = bool(failures)
    for file in sorted({row[0] for row in rows}):
        of_file = [row for row in rows if row[0] == file]
        bitten = sum(row[1] for row in of_file)
        wrong = sum(bool(row[2]) for row in of_file)
        lines.append(f"{file}: {len(of_file)} changes, {wrong} wrong; the reference's output changed for {bitten} ({bitten / len(of_file):.0%})")
        if bitten < LEAST * len(of_file) and not (options.limit or options.files or options.cases):
            lines.append(f"{file}: fewer than {LEAST:.0%} of the changes change anything")
            failed = True
    (options.report.write_text("\n".join(lines) + "\n") if options.report else None)
    print("\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
