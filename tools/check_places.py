#!/usr/bin/env python3
"""The functions that a table of docs/architecture.md names are defined in the files that it names.

A row is `| what | [name.cpp](../src/part/name.cpp) | `Class::function` |`. A function that
moves to another file, or takes another name, fails here until its row follows.
"""

import re

import tree
from check_sizes import bare

PAGE = "docs/architecture.md"
ROW = re.compile(r"^\|[^|]*\|\s*\[[^\]]*\]\(\.\./(src/[^)\s]+)\)\s*\|([^|]*)\|\s*$")
NAME = re.compile(r"`([A-Za-z_]\w*(?:::~?\w+)*)`")


def defines(text, name):
    """Whether the text, without comments and literals, has the body of that function."""
    start = re.compile(rf"^(?:[A-Za-z][^\n;{{}}()]*[\s*&])?{re.escape(name)}\(", re.M)
    for match in start.finditer(text):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        after = re.search(r"[;{]", text[end:])
        if after and after[0] == "{":
            return True
    return False


def check(root):
    problems, rows = [], 0
    for number, line in enumerate((root / PAGE).read_text().splitlines(), 1):
        row = ROW.match(line)
        if not row:
            continue
        rows += 1
        path, names = root / row[1], NAME.findall(row[2])
        if not names:
            problems.append(tree.Problem(PAGE, number, f"names no function of {row[1]}"))
        text = bare(path.read_text()) if path.is_file() else None
        for name in names:
            if text is None:
                problems.append(tree.Problem(PAGE, number, f"{row[1]} is not there"))
            elif not defines(text, name):
                problems.append(tree.Problem(PAGE, number, f"{row[1]} does not define {name}"))
    if not rows:
        problems.append(tree.Problem(PAGE, 1, "has no table of functions and their files"))
    return problems


if __name__ == "__main__":
    tree.main(check)
