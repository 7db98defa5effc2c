#!/usr/bin/env python3
"""Every C++ and CMake block of the documentation is a piece of a file that is compiled.

A block stands under `<!-- examples/03_accelerator.cpp: loop -->` and must equal the
lines between `// [loop]` and `// [/loop]` of that file (`# [loop]` in CMake's), without
their common indentation and without the marks of pieces inside it. A diff block stands
under `<!-- examples/01_plain_loop.cpp to examples/03_accelerator.cpp: loop -->` and shows
what one file's pieces, without comments at the ends of lines, are in the other; a piece
that only the second file has is added as a whole. `--fix` writes the blocks. Relative links must lead to files that
exist, and to headings of pages.
"""

import difflib
import functools
import re
import textwrap

import tree

PIECE = re.compile(r"^\s*(?://|#) \[/?[\w-]+\]$")
BLOCKS = {"```cpp": "C++", "```c++": "C++", "```cmake": "CMake", "```diff": "diff"}
MARK = re.compile(r"^<!-- ([\w./-]+): ([\w-]+) -->$")
DIFF_MARK = re.compile(r"^<!-- ([\w./-]+) to ([\w./-]+): ([\w -]+) -->$")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)]*))?\)")
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
HEADING = re.compile(r"^#+ (.*)$", re.M)


@functools.cache
def anchors(page):
    """The names by which links reach a page's headings, as GitHub makes them."""
    found = HEADING.findall(FENCED.sub("", page.read_text()))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in found)
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in plain}


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


def difference(root, before, after, names):
    sides = [], []
    for name in names.split():
        old, missing = piece(root, before, name)
        new, wrong = piece(root, after, name)
        if wrong or (missing and not (root / before).is_file()):
            return None, wrong or missing
        for side, lines in zip(sides, (old or [], new)):
            side += [re.sub(r"\s*// .*", "", line) for line in lines]
    if not sides[0]:
        return None, f"{before} has none of [{names}]"
    return list(difflib.unified_diff(*sides, n=len(sides[0]), lineterm=""))[3:], None


def expected_block(root, kind, line):
    """(file, piece, its lines, what is wrong), or None where the line is no mark."""
    if kind == "diff":
        mark = DIFF_MARK.match(line)
        return mark and (f"{mark[1]} to {mark[2]}", mark[3], *difference(root, *mark.groups()))
    mark = MARK.match(line)
    return mark and (*mark.groups(), *piece(root, *mark.groups()))


def check_page(root, path, fix):
    problems = []
    lines = (root / path).read_text().splitlines()
    result = []
    number = 0
    while number < len(lines):
        line = lines[number]
        for link, anchor in LINK.findall(line):
            target = (root / path).parent / link if link else root / path
            if not target.exists():
                problems.append(tree.Problem(str(path), number + 1, f"links to {link}, which is not there"))
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                problems.append(tree.Problem(str(path), number + 1, f"links to {link}#{anchor}, a heading that is not there"))
        result.append(line)
        number += 1
        if line.strip() not in BLOCKS:
            continue
        end = number
        while end < len(lines) and lines[end].strip() != "```":
            end += 1
        block = lines[number:end]
        found = expected_block(root, BLOCKS[line.strip()], lines[number - 2]) if number >= 2 else None
        if not found:
            problems.append(tree.Problem(str(path), number, f"a {BLOCKS[line.strip()]} block that names no compiled file above it"))
        else:
            file, name, expected, wrong = found
            if wrong:
                problems.append(tree.Problem(str(path), number, wrong))
            elif expected != block:
                if fix:
                    block = expected
                else:
                    problems.append(
                        tree.Problem(str(path), number, f"differs from {file} [{name}]; --fix writes it")
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
