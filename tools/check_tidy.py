#!/usr/bin/env python3
"""clang-tidy has nothing to say about sources of src/ that have changed.

The file .tidy names a commit. A source is read if it differs from that commit: 20 CPU seconds
each. Headers are read with the sources that include them. --remember writes the file if nothing
in src/ is uncommitted. The checks are in .clang-tidy.
"""

import concurrent.futures
import re
import subprocess
import tempfile

import check_headers
import tree

FOUND = re.compile(r"^(?P<path>[^:\n]+):(?P<line>\d+):\d+: (?:warning|error): (?P<what>.*)$", re.M)


def problems_in(root, program, build, source):
    run = subprocess.run(
        [program, "-p", build, "--quiet", "--extra-arg=-fno-openmp", str(root / source)], capture_output=True, text=True
    )
    problems = [
        tree.Problem(found["path"].removeprefix(f"{root}/"), int(found["line"]), found["what"])
        for found in FOUND.finditer(run.stdout)
    ]
    if run.returncode and not problems:  # it could not read the source
        problems.append(tree.Problem(source, 1, run.stderr.strip()[-500:]))
    return problems


def check(root, jobs=2, remember=False):
    changed = tree.changed(root, ".tidy", "src")
    sources = [str(path) for path in tree.files(root, ("src",), (".cpp",))]
    if changed is not None:
        sources = [name for name in sources if name in changed]
    if not sources:
        return []
    program = max(check_headers.cache_folder().glob("clang-tidy-[0-9]*"), default=None)
    if program is None:
        return [tree.Problem("tools/check_tidy.py", 1, "there is no clang-tidy: run scripts/setup.sh")]
    with tempfile.TemporaryDirectory(prefix="hasten-tidy-") as build:
        # One command for each source, which a unity build has not.
        made = subprocess.run(
            ["cmake", "--preset", "dev", "-B", build], cwd=root, capture_output=True, text=True
        )
        if made.returncode:
            return [tree.Problem("CMakeLists.txt", 1, made.stderr.strip())]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            runs = [
                pool.submit(problems_in, root, program / "bin/clang-tidy", build, source)
                for source in sources
            ]
        problems = sorted({problem for run in runs for problem in run.result()}, key=str)
    if remember and not problems:
        tree.remember(root, ".tidy", "src")
    return problems


if __name__ == "__main__":
    tree.main(
        check,
        jobs={"type": int, "default": 2, "help": "sources at a time"},
        remember={"action": "store_true", "help": "write .tidy if all are good"},
    )
