#!/usr/bin/env python3
"""No file, function or class is larger than a reader can hold.

Public header 400 lines, source 600, test 500, example 120, README 150, root
CMakeLists.txt 200; the body of a function 80. A class has at most 30 public names,
inherited ones counted and a struct's fields not (60 for the Accelerator, a facade, and what it inherits), 40 member
functions, and definitions in 3 source files. Split by idea, not by alphabet.

include/ and src/ together have a sum for each library, without the generated tables. The sums in
LIBRARIES only fall. A change that needs more lines says so in CHANGELOG.md, where this check adds
up lines like "- Lines: +120 in hasten_text, for a family of models."

A chain of includes in the project, from a source file on, has at most CHAIN files, and at most
PART_CHAIN of one folder.
"""

import functools
import re

import tree

FUNCTION_LIMIT = 80
PUBLIC_LIMIT, FACADE, FACADE_LIMIT = 30, "Accelerator", 60
MEMBER_LIMIT = 40
SOURCE_LIMIT = 3
# Lines of include/ and src/: what is linked together, its folders, and its limit. Folders that
# are named nowhere belong to the first.
LIBRARIES = (
    ("hasten", (), 58479),
    ("hasten_text", ("text", "models", "tasks", "hub"), 16710),
    ("the programs", ("cli",), 6921),
)
MORE = re.compile(r"^- Lines: \+([\d,]+) in (hasten|hasten_text|the programs)\b", re.M)
# Lines of src/tables: generated data, one line a key.
TABLES = 1200
CHAIN, PART_CHAIN = 12, 8
INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.M)
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


CLASS_HEAD = re.compile(r"\b(class|struct)\s+([\w:]+)(?:\s+final)?(\s*:[^;{]*)?$")
BASE = re.compile(r"(?:public\s+)?(?:\w+::)*(\w+)(?:<.*?>)?\s*(?:,|$)")
# A declaration that brings a type, or that says nothing about the class's own names.
NO_MEMBER = re.compile(r"(class|struct|enum|using|static constexpr|static_assert|typedef|friend)\b")
FUNCTION = re.compile(r"(~?\w+|operator\s*[^\s(]+)\s*\(")
DEFINITION = re.compile(r"^(?!\s)(?:[\w:<>,&*\[\] ]+[\s&*])?((?:\w+::)+)~?\w+\(", re.M)


def declarations(body):
    """The declarations of a class body, and "public:", "protected:", "private:"."""
    start, braces, parentheses = 0, 0, 0
    for i, character in enumerate(body):
        if character in "{}":
            braces += 1 if character == "{" else -1
            ends = character == "}" and not braces and not parentheses
            if ends and not body[i + 1 :].lstrip().startswith((";", ",", ")")):
                yield body[start : i + 1]  # a function with its body
                start = i + 1
        elif character in "()":
            parentheses += 1 if character == "(" else -1
        elif character == ";" and not braces and not parentheses:
            yield body[start:i]
            start = i + 1
        elif character == ":" and not braces and not parentheses:
            if access := re.search(r"(public|protected|private)\s*$", body[start:i]):
                yield access[1] + ":"
                start = i + 1


def member_names(kind, own, body):
    """(public names, names of member functions)"""
    access, public, functions = ("public:" if kind == "struct" else "private:"), set(), set()
    for declaration in declarations(body):
        text = " ".join(re.sub(r"\[\[.*?\]\]", "", declaration).split())
        if text in ("public:", "protected:", "private:"):
            access = text
            continue
        text = re.sub(r"^template\s*<.*?>\s*(?=\w)", "", text)
        if not text or NO_MEMBER.match(text) or "= delete" in text or "= default" in text:
            continue
        head = text.split("{")[0]
        function = FUNCTION.search(head)
        if function and not re.search(r"=\s*$|std::function", head[: function.start()]):
            name = function[1]
            if name.lstrip("~") == own.split("::")[-1]:
                continue
            functions.add(name)
        else:
            field = re.search(r"(\w+)\s*(=.*|\[.*)?$", head)
            name = field[1] if field else ""
        # A struct's fields are data; its functions count.
        if access == "public:" and (kind == "class" or name in functions):
            public.add(name)
    return public - {""}, functions


def classes(text):
    """(kind, name, names of bases, body, line) of each class in the bare text."""
    for opening in re.finditer(r"\{", text):
        begin = max(text.rfind(mark, 0, opening.start()) for mark in ";{}")
        head = " ".join(re.sub(r"#.*|\[\[\w+\]\]", "", text[begin + 1 : opening.start()]).split())
        found = CLASS_HEAD.search(head)
        if not found or "(" in head or "enum" in head:
            continue
        depth, end = 1, opening.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        line = text.count("\n", 0, opening.start()) + 1
        bases = BASE.findall((found[3] or "").strip(" :"))
        yield found[1], found[2], bases, text[opening.end() : end - 1], line


def large_classes(root):
    known, sources = {}, {}
    for path in tree.files(root, ("include", "src"), tree.SOURCES):
        text = bare((root / path).read_text())
        for kind, name, bases, body, line in classes(text):
            public, functions = member_names(kind, name, body)
            known[name] = (bases, public, functions, str(path), line)
        if path.suffix == ".cpp":
            for definition in DEFINITION.finditer(text):
                owner = definition[1].rstrip(":").split("::")
                for name in {owner[-1], "::".join(owner[-2:])}:
                    sources.setdefault(name, set()).add(path.name)

    def inherited(name, below=()):
        if name not in known or name in below:
            return set()
        return {name}.union(*(inherited(base, (*below, name)) for base in known[name][0]))

    facade = inherited(FACADE)
    for name, (_, _, functions, path, line) in known.items():
        public = set().union(*(known[base][1] for base in inherited(name)))
        for what, count, limit in (
            ("public names", len(public), FACADE_LIMIT if name in facade else PUBLIC_LIMIT),
            ("member functions", len(functions), MEMBER_LIMIT),
            ("source files", len(sources.get(name, ())), SOURCE_LIMIT),
        ):
            if count > limit:
                yield tree.Problem(path, line, f"{name} has {count} {what}, the limit is {limit}")


def include_chains(root):
    """(the longest chain that starts at a source file, the longest of files in one folder)"""
    paths = {str(path) for path in tree.files(root, ("include", "src"), tree.SOURCES)}

    def included(name):
        folder = name.rsplit("/", 1)[0]
        for include in INCLUDE.findall((root / name).read_text()):
            places = (folder, "include", "src", f"src/{part(name)}")
            found = {f"{place}/{include}" for place in places} & paths
            yield from found

    def part(name):
        return re.sub(r"^(include/hasten|src)/(\w+)/.*", r"\2", name)

    @functools.cache
    def chain(name, folder=None):
        below = (chain(other, folder) for other in included(name) if folder in (None, part(other)))
        return (name, *max(below, key=len, default=()))

    sources = sorted(name for name in paths if name.endswith(".cpp"))
    longest = max((chain(name) for name in sources), key=len, default=())
    inside = max((chain(name, part(name)) for name in sources), key=len, default=())
    return longest, inside


def long_chains(root):
    for what, chain, limit in zip(("", " of one folder"), include_chains(root), (CHAIN, PART_CHAIN)):
        if len(chain) > limit:
            yield tree.Problem(
                chain[0], 1, f"a chain of {len(chain)} files{what}, the limit is {limit}: {' > '.join(chain)}"
            )


def raised_limits(root):
    """The limits that are above those of the last commits that changed this file."""
    commits = tree.git(root, "log", "-n", "5", "--format=%H", "--", "tools/check_sizes.py") or ()
    texts = ["\n".join(tree.git(root, "show", f"{commit}:tools/check_sizes.py") or ()) for commit in commits]
    for name, _, limit in LIBRARIES:
        lower = [int(n) for text in texts for n in re.findall(rf'\("{name}", .*, (\d+)\)', text) if int(n) < limit]
        if lower:
            yield tree.Problem("tools/check_sizes.py", 1, f"the limit of {name} rose from {min(lower)} to {limit}")


def library_sums(root):
    named = {folder: name for name, folders, _ in LIBRARIES for folder in folders}
    sums = dict.fromkeys((name for name, _, _ in LIBRARIES), 0)
    for path in tree.files(root, ("include", "src")):
        if path.parts[1] == "tables":
            continue
        folder = path.parts[2] if path.parts[0] == "include" else path.parts[1]
        sums[named.get(folder, LIBRARIES[0][0])] += len((root / path).read_text().splitlines())
    lines = sum(len((root / path).read_text().splitlines()) for path in tree.files(root, ("src",)) if path.parts[1] == "tables")
    if lines > TABLES:
        yield tree.Problem("src/tables", 1, f"{lines} lines of generated tables, the limit is {TABLES}")
    log = root / "CHANGELOG.md"
    more = MORE.findall(log.read_text()) if log.exists() else []
    for name, _, limit in LIBRARIES:
        limit += sum(int(lines.replace(",", "")) for lines, library in more if library == name)
        if sums[name] > limit:
            yield tree.Problem("include, src", 1, f"{sums[name]} lines of {name}, the limit is {limit}")


def check(root):
    problems = [*large_classes(root), *library_sums(root), *long_chains(root), *raised_limits(root)]
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


def check_and_print(root, chains=False):
    if chains:
        longest, inside = include_chains(root)
        print(f"chains of includes: {len(longest)} files, {len(inside)} of one folder")
    return check(root)


if __name__ == "__main__":
    tree.main(check_and_print, chains={"action": "store_true", "help": "print the longest chains"})
