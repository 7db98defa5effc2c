#!/usr/bin/env python3
"""Writes the defaults that differ from transformers' and Accelerate's into the page for Python's users.

    python3 tools/golden/defaults.py SITE_PACKAGES

Reads the defaults of TrainingArguments and DataLoaderConfiguration from the sources of the
installed transformers and accelerate (neither is imported, torch is not needed), and ours
from the public headers. The rows go into the table below "## Other defaults".
"""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guides/coming-from-python.md"
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
    there = {
        "TrainingArguments": theirs(site, "transformers/training_args.py", "TrainingArguments"),
        "DataLoaderConfiguration": theirs(
            site, "accelerate/utils/dataclasses.py", "DataLoaderConfiguration"
        ),
    }
    table = "| option | hasten | there |\n|---|---|---|\n"
    for struct, place in OURS.items():
        for name, here, other in rows(ours(*place), there[struct]):
            table += f"| `{struct}::{name}` | {here} | {other} |\n"
    before, heading, rest = PAGE.read_text().partition("## Other defaults\n")
    text = rest[: rest.index("| option |")]
    after = rest[rest.index("\n## ") :]
    PAGE.write_text(before + heading + text + table + after)


if __name__ == "__main__":
    main()
