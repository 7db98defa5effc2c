#!/usr/bin/env python3
"""The page for Python's users names only what hasten has.

A row of a table is `| Python | hasten | remark |`. Its second column has names in backquotes, or is
"the same", the names of the first column, or "the same, in `Class`", which has them as members, or is
"not there", and then the remark says why or what to do. Tables with other heads are not of names. A name is

- `Class::member` or `function`: declared in include/; a member in its class or in a base class
- `hasten command --flag`, or `--flag`: a command or flag of the program
- `hasten/part/name.h`: a public header
- `HASTEN_NAME`: a variable of the environment that the sources read
- `torch::name`: LibTorch's own, which is not checked

docs/arguments.csv (tools/arguments.py) follows from the page. With --packages it has the names of the
packages that this Python has: a release with a new argument is an error, until the page has it. --write
writes it with these names.
"""

import functools
import re

import arguments
import tree
from check_sizes import bare

PAGE = "docs/guides/coming-from-python.md"
NAME = re.compile(r"`([^`]+)`")
IDENTIFIER = re.compile(r"(?:hasten::)?(?:([A-Za-z_]\w*)::)?(~?[A-Za-z_]\w*)(?:\(\))?$")
CLASS = r"\b(?:class|struct|enum class|enum)\s+(?:\[\[\w+\]\]\s*)?{}\b(?:\s+final)?([^;{{}}()]*)\{{"
FLAG = re.compile(r"--[a-z][a-z0-9-]*")
SAME = re.compile(r"the same(?:, in `(\w+)`)?$")


class Tree:
    def __init__(self, root):
        self.root = root
        self.headers = "\n".join(bare((root / p).read_text()) for p in tree.files(root, ("include",), (".h",)))
        self.words = set(re.findall(r"\w+", self.headers))
        sources = [(root / p).read_text() for p in tree.files(root, ("src",), (".h", ".cpp"))]
        literals = " ".join(re.findall(r'"(?:[^"\\\n]|\\.)*"', "\n".join(sources)))
        self.flags = set(FLAG.findall(literals))
        self.literals = set(re.findall(r"[\w-]+", literals))

    @functools.cache
    def members(self, name):
        """Words in the bodies of a class and its bases; empty for an unknown class."""
        found = set()
        for start in re.finditer(CLASS.format(re.escape(name)), self.headers):
            depth, end = 1, start.end()
            while end < len(self.headers) and depth:
                depth += {"{": 1, "}": -1}.get(self.headers[end], 0)
                end += 1
            found |= set(re.findall(r"\w+", self.headers[start.end() : end])) | {name}
            for base in re.findall(r"\w+", start[1]):
                if base not in ("public", "private", "final", name):
                    found |= self.members(base)
        return found

    def has(self, name):
        if name.startswith("torch::"):
            return True
        if name.startswith("hasten/"):
            return (self.root / "include" / name).is_file()
        if name.startswith(("hasten ", "--")):
            words = name.removeprefix("hasten ").split()
            return all(w in (self.flags if w.startswith("--") else self.literals) for w in words)
        if name.startswith("HASTEN_"):
            return name in self.literals
        match = IDENTIFIER.match(name)
        if not match:
            return False
        # A holder is declared by TORCH_MODULE; its members are those of the Impl class.
        owner = match[1] and (self.members(match[1]) or self.members(match[1] + "Impl"))
        return match[2] in (owner if match[1] else self.words)


def check(root, packages=False, write=False):
    lines = (root / PAGE).read_text().splitlines()
    known, problems, rows, of_names = Tree(root), [], 0, False
    for number, line in enumerate(lines, 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if number < len(lines) and lines[number].startswith("|--"):
            of_names = cells[1:] == ["hasten", "remark"]
            continue
        if not line.startswith("|") or line.startswith("|--") or not of_names:
            continue
        rows += 1
        if len(cells) != 3:
            problems.append(tree.Problem(PAGE, number, f"has {len(cells)} columns, not 3"))
            continue
        names = NAME.findall(cells[1])
        if same := SAME.match(cells[1]):
            names = [f"{same[1]}::{name}" if same[1] else name for name in NAME.findall(cells[0])]
        if not names and (cells[1] != "not there" or not cells[2]):
            problems.append(tree.Problem(PAGE, number, 'needs a name, or "not there" and a remark'))
        for name in names:
            if not known.has(name):
                problems.append(tree.Problem(PAGE, number, f"{name} is not in include/ or in the flags"))
    if not rows:
        problems.append(tree.Problem(PAGE, 1, "has no table"))
    names = arguments.of_packages() if packages or write else arguments.of_file(root)
    text, missing = arguments.table(root, lines, names, known.flags)
    problems += [tree.Problem(PAGE, 1, f"has no {name}") for name in missing]
    file = root / arguments.FILE
    if write and not missing:
        file.write_text(text)
    if (file.is_file() or packages) and (not file.is_file() or file.read_text() != text):
        problems.append(tree.Problem(arguments.FILE, 1, "differs from the page: tools/check_mapping.py --write"))
    return problems


if __name__ == "__main__":
    yes = {"action": "store_true"}
    tree.main(check, packages=yes, write=yes)
