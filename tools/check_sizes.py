#!/usr/bin/env python3
"""No file and no function is longer than a reader can hold.

Public header 400 lines, source 600, test 500, example 120, README 150, root
CMakeLists.txt 200; the body of a function 80. Split by idea, not by alphabet.
"""

import re

import tree

FUNCTION_LIMIT = 80
# What may stand between a function's parameter list and its body.
HEAD = re.compile(r"\)\s*(const|noexcept(\(.*\))?|override|final|mutable|&&?|->[^;{}]*|\s)*(:[^;{}]*)?$")
CONTROL = re.compile(r"(^|\belse\s+)(if|for|while|switch|catch)\b[^;]*$")
NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S
)


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
    if path.parts[:2] == ("examples", "adopt"):
        return 600  # a program as people have them
    if path.parts[0] == "examples":
        return 120
    if path.parts[0] == "tests":
        return 500
    if path.parts[0] in ("src", "benchmarks"):
        return 600
    return None


def bare(text):
    """The text with comments and literals blanked, its lines kept."""
    # A digit separator (1'000) is no character literal.
    text = re.sub(r"(?<=\d)'(?=\d)", "_", text)
    return NOISE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def long_functions(text):
    """[(first line, lines)] of bodies that are too long, outermost functions only."""
    found, stack, head_start, line = [], [], 0, 1
    text = bare(text)
    for position, character in enumerate(text):
        if character == "\n":
            line += 1
        elif character == "{":
            head = " ".join(text[head_start:position].split())
            inside = any(is_function for is_function, _ in stack)
            is_function = not inside and HEAD.search(head) and not CONTROL.search(head)
            stack.append((bool(is_function), line))
            head_start = position + 1
        elif character == "}" and stack:
            is_function, first = stack.pop()
            if is_function and line - first - 1 > FUNCTION_LIMIT:
                found.append((first, line - first - 1))
            head_start = position + 1
        elif character == ";":
            head_start = position + 1
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
            for line, length in long_functions((root / path).read_text()):
                problems.append(
                    tree.Problem(
                        str(path), line, f"a function body of {length} lines, the limit is {FUNCTION_LIMIT}"
                    )
                )
    return problems


if __name__ == "__main__":
    tree.main(check)
