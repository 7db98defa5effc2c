"""docs/arguments.csv: each argument of three classes of Python, and what hasten makes of it.

The names are those of the installed packages. What hasten makes of a name follows from the page for
Python's users: from the row of a table that has it in its first column, or from a list "Not there",

    - Reason: `name`, `name` (its own reason), ...
    - `name`, `name`: reason

Fields of LoraConfig that the page lacks are those of the table of keys that hasten reads, ignores or refuses
in an adapter's file.

A state is "has" (the same name), "other name", "always so", "does not apply" or "refused".
"""

import csv
import dataclasses
import io
import re

FILE = "docs/arguments.csv"
HEAD = ("class", "name", "state", "hasten", "flag", "remark")
# Where the page has the names of a class: its part, and the sections of that part with tables of them, or "".
PLACES = {
    "TrainingArguments": ("## transformers", ("### TrainingArguments",)),
    "Accelerator": ("## Accelerate", ("### Accelerator: members", "### Accelerator: arguments", "### Plugins and keyword handlers")),
    "LoraConfig": ("## PEFT", ("",)),
}
NAME = re.compile(r"`([^`]+)`")


def of_packages():
    """{class: names} of the packages of this Python."""
    import accelerate
    import peft
    import transformers

    fields = {c.__name__: [f.name for f in dataclasses.fields(c)] for c in (transformers.TrainingArguments, peft.LoraConfig)}
    public = [name for name in dir(accelerate.Accelerator) if not name.startswith("_")]
    return {"TrainingArguments": fields["TrainingArguments"], "Accelerator": public, "LoraConfig": fields["LoraConfig"]}


def of_file(root):
    """{class: names} of the file."""
    names = {name: [] for name in PLACES}
    if (root / FILE).is_file():
        for row in csv.DictReader((root / FILE).open(encoding="utf-8", newline="")):
            names.setdefault(row["class"], []).append(row["name"])
    return names


def plain(text):
    """Without the marks of Markdown."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").strip()


def row_state(name, cells):
    names, remark = NAME.findall(cells[1]), plain(cells[2])
    if same := re.match(r"the same(?:, in `(\w+)`)?$", cells[1]):
        return "has", f"{same[1]}::{name}" if same[1] else name, remark
    if cells[1] == "not there":
        return "refused", "", remark
    shared = [n for n in names if n.split("::")[-1] == name]
    state = "has" if shared else "always so" if remark.startswith("always") else "other name"
    return state, ", ".join(shared or names), remark


def list_states(text):
    """{name: (state, "", reason)} of one entry of a list."""
    head, _, tail = text.partition(": ")
    names, reason, own = (head, tail, "") if head.startswith("`") else (tail, head, tail)
    state = {"Always so": "always so", "Does not apply": "does not apply"}.get(reason, "refused")
    found = {}
    for match in NAME.finditer(names):
        # A note in parentheses is that of the names just before it, back to a comma.
        note = re.match(r"(?: and `[^`]+`)? \(([^)]*)\)", own[match.end():] if own else "")
        found[match[1]] = state, "", plain(note[1] if note else "" if state != "refused" else reason)
    return found


def states(lines):
    """{(class, name): (state, hasten's name, remark)} of the page."""
    found, part, section, entry = {}, "", "", ""
    for line in [*lines, ""]:
        if entry and not line.startswith("  "):
            for name, state in list_states(entry).items():
                for kind in (kind for kind, place in PLACES.items() if place[0] == part):
                    found.setdefault((kind, name), state)
            entry = ""
        if line.startswith("#"):
            part, section = (line, "") if line.startswith("## ") else (part, line)
        elif line.startswith("- ") and section == "### Not there":
            entry = line[2:]
        elif entry:
            entry += " " + line.strip()
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        for kind, (_, sections) in PLACES.items():
            if line.startswith("| `") and section in sections and len(cells) == 3 and PLACES[kind][0] == part:
                for name in NAME.findall(cells[0]):
                    found.setdefault((kind, name), row_state(name, cells))
    return found


def adapter_keys(root):
    """{(class, name): (state, "", remark)} of the keys that hasten does not use."""
    file, found = root / "src/tables/known_keys.inc", {}
    key = re.compile(r'\{"adapter_config.json", "\*", "(\w+)", KeyUse::(\w+), "(.*)"\}')
    for name, use, values in key.findall(file.read_text() if file.is_file() else ""):
        only = values[1:-1].replace('\\"', "") or "null"
        if use == "refused":
            found["LoraConfig", name] = use, "", f"an adapter with another value than {only} computes something else"
        elif use == "neutral":
            found["LoraConfig", name] = "does not apply", "", "an adapter's weights do not depend on it"
    return found


def table(root, lines, names, flags):
    """The file's text, and the names that the page lacks."""
    known, missing, text = adapter_keys(root) | states(lines), [], io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(HEAD)
    for kind in PLACES:
        for name in names[kind]:
            if (kind, name) not in known:
                missing.append(f"{kind}.{name}")
                continue
            state, ours, remark = known[kind, name]
            flag = {"TrainingArguments": "--", "LoraConfig": "--lora-"}.get(kind, "") + name.replace("_", "-")
            flag = flag.replace("--lora-lora-", "--lora-") if state == "has" else ""
            rows.writerow((kind, name, state, ours, flag if flag in flags else "", remark))
    return text.getvalue(), missing
