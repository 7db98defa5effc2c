#!/usr/bin/env python3
"""Writes docs/differences.md: every default that differs from transformers' and Accelerate's.

    python3 tools/golden/defaults.py SITE_PACKAGES

Reads the defaults of TrainingArguments, DataLoaderConfiguration and Accelerator from the
sources of the installed transformers and accelerate (neither is imported, torch is not
needed), and ours from the public headers. Behaviour that no default shows is listed by hand
below.
"""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/differences.md"
# The same default, spelled in another way.
SAME = {
    ("", "None"), ("-1", "-1"), ("no", "False"), ("linear", "SchedulerType.LINEAR"),
    ("std::nullopt", "None"), ("0", "None"), ("l2", "None"), ("loss", "None"), ("none", "False"),
    ("False", "None"),
}
# None stands for the same value there.
SAME_NAMES = {"dataloader_prefetch_factor", "ddp_backend"}
# Where a default stands in a header, and in which class there.
OURS = {
    "TrainingArguments": ("include/hasten/config/training_arguments.h", "TrainingArguments"),
    "DataLoaderConfiguration": (
        "include/hasten/loader/loader_state.h", "DataLoaderConfiguration",
    ),
}
BEHAVIOUR = [
    ("Local SGD's interval", "counts optimizer steps", "Accelerate counts calls of `step()`: with "
     "accumulation 2 and `local_sgd_steps` 8 it averages twice as often"),
    ("`AcceleratorOptions::seed`", "42: generators are seeded, equally for weights and differently "
     "for dropout", "Accelerate seeds nothing; call `set_seed`"),
    ("the loss of an accumulation window", "the mean over all samples of the window, on all ranks",
     "Accelerate: the mean of the batches' means"),
    ("the gradient under DDP with batches of unequal size", "that of the joined batch",
     "each rank counts equally"),
    ("a training loader whose samples do not divide by the ranks", "each sample counts once; a "
     "rank without a sample gets a batch of weight 0", "samples are repeated (`even_batches`)"),
    ("a learning-rate schedule", "steps once for each optimizer step, on any number of ranks",
     "Accelerate steps it once for each process"),
    ("buffers, for example running statistics", "equal on all ranks when a window opens and when it is complete",
     "DDP broadcasts them before each forward"),
    ("the evaluation loss of a language model", "the mean over the tokens that are predicted",
     "the Trainer's divisor also counts the first token of each row, so its loss is too small: by a "
     "factor of 127 / 128 for rows of 128"),
    ("fp16", "an overflow is found in the reduced gradients", "GradScaler looks at each rank's"),
    ("`generate()` without a length", "256 tokens, or what the model has positions for",
     "20 tokens"),
    ("a token that a tokenizer's class has by default and the vocabulary lacks",
     "there is no such token", "it becomes a new token"),
    ("an added token whose id is neither that of the vocabulary nor the first free one", "an error",
     "it gets that id"),
]


def plain(node):
    """The default that a dataclass field has, as text; None: it has none."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "field":
        for keyword in node.keywords:
            if keyword.arg in ("default", "default_factory"):
                return plain(keyword.value)
        return None
    return ast.unparse(node)


def theirs(site, file, name):
    tree = ast.parse((site / file).read_text())
    found = {}
    for cls in ast.walk(tree):
        if isinstance(cls, ast.ClassDef) and cls.name == name:
            for item in cls.body:
                if isinstance(item, ast.AnnAssign) and item.value is not None:
                    found[item.target.id] = (plain(item.value) or "").strip("'\"")
    return found


def ours(file, struct):
    text = (ROOT / file).read_text()
    body = text[text.index(f"struct {struct} {{"):]
    body = body[: body.index("\n};")]
    field = re.compile(r"^  [\w:<>]+ (\w+)(?: = (.*)|\{\});$", re.M)
    return {name: (value or "") for name, value in field.findall(body)}


def spelled(value):
    value = re.sub(r"^\w+::", "", value).strip('"')
    seconds = re.match(r"double\(default_(ddp|heartbeat)_timeout\(\)\.count\(\)\) / 1000", value)
    if seconds:
        source = (ROOT / "src/base/timeouts.cpp").read_text()
        return re.search(rf"_{seconds[1]}_timeout\(\).*?\b(\d+)\)", source, re.S)[1]
    return {"true": "True", "false": "False"}.get(value, value)


def number(text):
    try:
        return float(text)
    except ValueError:
        return None


def same(here, there):
    if (here, there) in SAME or here == there:
        return True
    return number(here) is not None and number(here) == number(there)


def rows(mine, other):
    for name, value in mine.items():
        here = spelled(value)
        if name not in other or name in SAME_NAMES:
            continue
        there = re.sub(r"^\w+\.", "", other[name])
        there = there.replace("default_optim", "adamw_torch_fused")
        if not same(here, other[name]) and not same(here, there):
            yield name, here or "empty", there or "empty"


def main():
    site = pathlib.Path(sys.argv[1])
    versions = {
        name: re.search(r'__version__ = "(.*?)"', (site / name / "__init__.py").read_text())[1]
        for name in ("transformers", "accelerate")
    }
    lines = [
        "# Defaults and behaviour that differ",
        "",
        f"Compared with transformers {versions['transformers']} and Accelerate "
        f"{versions['accelerate']}. `tools/golden/defaults.py`",
        "writes this page from their sources and from the public headers. Options that only one",
        "side has are not listed.",
        "",
        "## Defaults",
        "",
        "| option | hasten | there |",
        "|---|---|---|",
    ]
    there = {
        "TrainingArguments": theirs(site, "transformers/training_args.py", "TrainingArguments"),
        "DataLoaderConfiguration": theirs(
            site, "accelerate/utils/dataclasses.py", "DataLoaderConfiguration"
        ),
    }
    for struct, place in OURS.items():
        for name, here, other in rows(ours(*place), there[struct]):
            lines.append(f"| `{struct}::{name}` | {here} | {other} |")
    lines += ["", "## Behaviour", "", "| what | hasten | there |", "|---|---|---|"]
    lines += [f"| {what} | {here} | {other} |" for what, here, other in BEHAVIOUR]
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
