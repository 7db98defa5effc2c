#!/usr/bin/env python3
"""Each public header compiles alone, warns of nothing and stays light.

No precompiled header, no unity file: what hides a missing include there does not hide
it here. A header must not bring in torch/torch.h or torch/nn.h (15 s a file) nor
Gloo's headers, and must not use at::parallel_for (serial without -fopenmp).

A header that was found good is remembered in the cache folder by the contents of all
it includes from this tree, so a second run takes a second. Headers that include the
same parts of LibTorch share one precompiled header of just those parts, which each of
them includes itself: it saves time and hides nothing but the order.

The file .headers names a commit in which all were good. A header is compiled if it, or one that
it includes, differs from that commit; with --all each is. --remember writes the file if nothing
in include/ is uncommitted.
"""

import collections
import concurrent.futures
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import tree

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.M)
HEAVY = re.compile(r"^(torch|ATen|c10|nlohmann)/")
FORBIDDEN = re.compile(r"/(torch/torch\.h|api/include/torch/nn\.h|gloo/.*)$")
PARALLEL_FOR = re.compile(r"\bat::parallel_for\b")


class Compiler:
    def __init__(self, root, torch):
        self.command = [
            os.environ.get("CXX", "c++"),
            "-std=c++20",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-DUSE_DISTRIBUTED",
            "-DUSE_C10D_GLOO",
            "-DUSE_RPC",
            "-DUSE_TENSORPIPE",
            f"-I{root / 'include'}",
        ]
        if torch:
            self.command += ["-isystem", str(torch / "include")]
            self.command += ["-isystem", str(torch / "include/torch/csrc/api/include")]
        version = subprocess.run([self.command[0], "--version"], capture_output=True)
        self.identity = version.stdout + " ".join(self.command[1:-4]).replace(str(root), "").encode()
        if torch and (torch / "include/torch/headeronly/version.h").exists():
            self.identity += (torch / "include/torch/headeronly/version.h").read_bytes()

    def run(self, arguments):
        result = subprocess.run(self.command + arguments, capture_output=True, text=True)
        return result.returncode, result.stderr


def closure(root, header):
    """Headers of this tree that `header` brings in, itself included, sorted; and the
    heavy ones from outside that these name."""
    seen, heavy, queue = set(), set(), [header]
    while queue:
        name = queue.pop()
        path = root / "include" / name
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        for included in INCLUDE.findall(path.read_text()):
            if included.startswith("hasten/"):
                queue.append(included)
            elif HEAVY.match(included):
                heavy.add(included)
    return sorted(seen), tuple(sorted(heavy))


def stamp_of(root, compiler, names):
    digest = hashlib.sha256(compiler.identity + pathlib.Path(__file__).read_bytes())
    for name in names:
        digest.update(name.encode() + b"\0" + (root / "include" / name).read_bytes())
    return digest.hexdigest()


def brought_in(dependencies):
    """The forbidden files among a make rule's prerequisites."""
    text = dependencies.read_text().replace("\\\n", " ")
    return [name for name in text.split()[1:] if FORBIDDEN.search(name)]


def compile_header(compiler, work, header, shared):
    """None if the header is good, else what is wrong with it."""
    name = header.replace("/", "_")
    unit = work / f"{name}.cpp"
    # Twice: a missing #pragma once is an error too.
    unit.write_text(f"#include <{header}>\n#include <{header}>\n")
    dependencies = work / f"{name}.d"
    arguments = ["-fsyntax-only", "-MD", "-MF", str(dependencies), "-MT", "x", str(unit)]
    if shared:
        arguments = ["-include", str(shared)] + arguments
    code, output = compiler.run(arguments)
    if code:
        return "does not compile alone:\n" + "\n".join(output.splitlines()[:20])
    found = brought_in(dependencies)
    if found:
        return f"brings in {found[0].split('/include/')[-1]}"
    return None


def precompile(compiler, work, heavy):
    """A precompiled header of `heavy`: (its name for -include, what is forbidden)."""
    name = work / (hashlib.sha256(repr(heavy).encode()).hexdigest()[:12] + ".h")
    name.write_text("".join(f"#include <{header}>\n" for header in heavy))
    dependencies = name.with_suffix(".d")
    code, _ = compiler.run(
        ["-x", "c++-header", "-MD", "-MF", str(dependencies), "-MT", "x", str(name), "-o", f"{name}.gch"]
    )
    return (None, []) if code else (name, brought_in(dependencies))


def check_group(compiler, work, heavy, headers):
    """[(header, what is wrong or None)] for headers of one set of outside includes."""
    shared, found = (None, [])
    if heavy and len(headers) > 1:
        shared, found = precompile(compiler, work, heavy)
    if found:
        return [(header, f"brings in {found[0].split('/include/')[-1]}") for header in headers]
    results = [(header, compile_header(compiler, work, header, shared)) for header in headers]
    if shared:
        pathlib.Path(f"{shared}.gch").unlink()
    return results


def cache_folder():
    if os.environ.get("HASTEN_CACHE"):
        return pathlib.Path(os.environ["HASTEN_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(base) / "hasten"


def changed_headers(root):
    """Names of headers that differ from the commit in .headers; None if that is not known."""
    changed = tree.changed(root, ".headers", "include", "tools/check_headers.py")
    if changed is None or "tools/check_headers.py" in changed:
        return None
    return {name.removeprefix("include/") for name in changed}


def check(root, jobs=2, all=False):
    changed = None if all else changed_headers(root)
    cache = cache_folder()
    torch = pathlib.Path(os.environ.get("HASTEN_TORCH") or cache / "libtorch")
    compiler = Compiler(root, torch)
    stamps = cache / "good-headers"
    stamps.mkdir(parents=True, exist_ok=True)
    problems = []
    groups = collections.defaultdict(list)
    stamp = {}
    for path in tree.files(root, ("include",), (".h",)):
        text = (root / path).read_text()
        for number, line in enumerate(text.splitlines(), 1):
            if PARALLEL_FOR.search(line.split("//")[0]):
                problems.append(tree.Problem(str(path), number, "uses at::parallel_for in a public header"))
        header = str(path.relative_to("include"))
        names, heavy = closure(root, header)
        if changed is not None and changed.isdisjoint(names):
            continue
        stamp[header] = stamps / stamp_of(root, compiler, names)
        if stamp[header].exists():
            stamp[header].touch()
        else:
            groups[heavy].append(header)
    work = pathlib.Path(tempfile.mkdtemp(prefix="hasten-headers-"))
    try:
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            # The dearest first, so that no core idles at the end.
            order = sorted(groups, key=lambda heavy: (-len(heavy), heavy))
            runs = [pool.submit(check_group, compiler, work, heavy, groups[heavy]) for heavy in order]
            for run in runs:
                for header, wrong in run.result():
                    if wrong:
                        problems.append(tree.Problem(f"include/{header}", 1, wrong))
                    else:
                        stamp[header].touch()
    finally:
        shutil.rmtree(work)
    return problems


def check_and_remember(root, remember=False, **options):
    changed = changed_headers(root)
    problems = check(root, **options)
    if remember and not problems and (changed is None or changed):
        tree.remember(root, ".headers", "include")
    return problems


if __name__ == "__main__":
    tree.main(
        check_and_remember,
        jobs={"type": int, "default": 2, "help": "compilers at a time"},
        all={"action": "store_true", "help": "each header, whatever .headers says"},
        remember={"action": "store_true", "help": "write .headers if all are good"},
    )
