#!/usr/bin/env python3
"""No file and no function is longer than a reader can hold.

Public header 400 lines, source 600, test 500, example 120, README 150, root
CMakeLists.txt 200; the body of a function 80. Split by idea, not by alphabet.
"""

import re

import tree

FUNCTION_LIMIT = 80
# A definition's last line as clang-format leaves it; control flow is excluded.
OPENING = re.compile(r"^(?P<indent> *)(?P<head>.*\)(?:[\w\s&:<>*,()-]*)?) \{$")
CONTROL = re.compile(r"^\s*(\} )?(if|for|while|switch|else|catch|do|try|return)\b")


def limit_of(path):
    name = str(path)
    if name == "README.md":
        return 150
    if name == "CMakeLists.txt":
        return 200
    if path.suffix not in tree.SOURCES:
        return None
    if path.parts[0] == "include":
        return 400
    if path.parts[0] == "examples":
        return 120
    if path.parts[0] == "tests":
        return 500
    if path.parts[0] in ("src", "benchmarks"):
        return 600
    return None


def long_functions(lines):
    """(first line, length) of bodies that are too long; nested ones count once."""
    found = []
    number = 0
    while number < len(lines):
        match = OPENING.match(lines[number])
        if match and not CONTROL.match(lines[number]):
            closing = match["indent"] + "}"
            end = number + 1
            while end < len(lines) and not (
                lines[end] == closing or lines[end].startswith((closing + ";", closing + ")", closing + " "))
            ):
                end += 1
            length = end - number - 1
            if length > FUNCTION_LIMIT:
                found.append((number + 1, length))
                number = end
        number += 1
    return found


def check(root):
    problems = []
    for path in tree.files(root):
        limit = limit_of(path)
        if limit is None:
            continue
        lines = (root / path).read_text().splitlines()
        if len(lines) > limit:
            problems.append(tree.Problem(str(path), len(lines), f"{len(lines)} lines, the limit is {limit}"))
        if path.suffix in tree.SOURCES:
            for line, length in long_functions(lines):
                problems.append(
                    tree.Problem(
                        str(path), line, f"a function body of {length} lines, the limit is {FUNCTION_LIMIT}"
                    )
                )
    return problems


if __name__ == "__main__":
    tree.main(check)
