#!/usr/bin/env python3
"""Every C++ and CMake block of the documentation is a piece of a file that is compiled.

A block stands under `<!-- examples/03_accelerator.cpp: loop -->` and must equal the
lines between `// [loop]` and `// [/loop]` of that file (`# [loop]` in CMake's), without
their common indentation and without the marks of pieces inside it. `--fix` writes them.
Relative links must lead to files that exist.
"""

import re
import textwrap

import tree

PIECE = re.compile(r"^\s*(?://|#) \[/?[\w-]+\]$")
BLOCKS = {"```cpp": "C++", "```c++": "C++", "```cmake": "CMake"}
MARK = re.compile(r"^<!-- ([\w./-]+): ([\w-]+) -->$")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")


def piece(root, file, name):
    path = root / file
    if not path.is_file():
        return None, f"{file} is not there"
    lines = path.read_text().splitlines()
    marks = [i for i, line in enumerate(lines) if line.strip().removeprefix("//").removeprefix("#") in (f" [{name}]", f" [/{name}]")]
    if len(marks) != 2:
        return None, f"{file} has no piece [{name}] … [/{name}]"
    body = "\n".join(line for line in lines[marks[0] + 1 : marks[1]] if not PIECE.match(line))
    return textwrap.dedent(body).strip("\n").splitlines(), None


def check_page(root, path, fix):
    problems = []
    lines = (root / path).read_text().splitlines()
    result = []
    number = 0
    while number < len(lines):
        line = lines[number]
        for link in LINK.findall(line):
            target = (root / path).parent / link[0]
            if not target.exists():
                problems.append(tree.Problem(str(path), number + 1, f"links to {link[0]}, which is not there"))
        result.append(line)
        number += 1
        if line.strip() not in BLOCKS:
            continue
        end = number
        while end < len(lines) and lines[end].strip() != "```":
            end += 1
        block = lines[number:end]
        mark = MARK.match(lines[number - 2]) if number >= 2 else None
        if not mark:
            problems.append(tree.Problem(str(path), number, f"a {BLOCKS[line.strip()]} block that names no compiled file above it"))
        else:
            expected, wrong = piece(root, mark[1], mark[2])
            if wrong:
                problems.append(tree.Problem(str(path), number, wrong))
            elif expected != block:
                if fix:
                    block = expected
                else:
                    problems.append(
                        tree.Problem(str(path), number, f"differs from {mark[1]} [{mark[2]}]; --fix writes it")
                    )
        result.extend(block)
        number = end
    if fix and result != lines:
        (root / path).write_text("\n".join(result) + "\n")
    return problems


def check(root, fix=False):
    problems = []
    for path in tree.files(root, suffixes=(".md",)):
        problems += check_page(root, path, fix)
    return problems


if __name__ == "__main__":
    tree.main(check, fix={"action": "store_true", "help": "write the pieces into the pages"})
