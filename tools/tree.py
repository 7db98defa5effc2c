"""What the checks share: the files of the tree, and how to report.

A check is a script with `check(root) -> list of Problem`; `main(check)` prints them as
`file:line: what` and exits with 1 if there are any. checks_test.py breaks each rule on
purpose in a small tree and sees the check fail.
"""

import argparse
import dataclasses
import pathlib
import subprocess
import sys

SOURCES = (".h", ".cpp")
SCRIPTS = (".py", ".sh")


@dataclasses.dataclass(frozen=True)
class Problem:
    path: str
    line: int
    what: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.what}"


def git(root, *arguments):
    """The lines that git prints; None if it fails."""
    result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    return result.stdout.splitlines() if result.returncode == 0 else None


def changed(root, marker, *paths):
    """What differs from the commit that the file `marker` names; None if that is not known."""
    commit = root / marker
    if not commit.is_file():
        return None
    differing = git(root, "diff", "--name-only", commit.read_text().strip(), "--", *paths)
    added = git(root, "ls-files", "--others", "--exclude-standard", "--", *paths)
    return None if differing is None or added is None else {*differing, *added}


def remember(root, marker, folder):
    """Writes the commit into the file `marker` if nothing in the folder is uncommitted."""
    head = git(root, "rev-parse", "HEAD")
    if head and git(root, "status", "--porcelain", "--", folder) == []:
        (root / marker).write_text(head[0] + "\n")


def files(root, folders=(), suffixes=None):
    """Paths relative to root, sorted: what git tracks or would track, else all."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"],
        capture_output=True,
    )
    if listed.returncode == 0 and (root / ".git").exists():
        names = listed.stdout.decode().split("\0")
        paths = [pathlib.Path(name) for name in names if name]
    else:
        paths = [p.relative_to(root) for p in root.rglob("*") if p.is_file()]
    return sorted(
        path
        for path in set(paths)
        if (root / path).is_file()
        and (not folders or path.parts[0] in folders)
        and (suffixes is None or path.suffix in suffixes)
    )


def main(check, **options):
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument(
        "--root",
        type=pathlib.Path,
        default=pathlib.Path(__file__).resolve().parent.parent,
        help="the source tree (default: the one that holds this script)",
    )
    for name, settings in options.items():
        parser.add_argument("--" + name.replace("_", "-"), **settings)
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    problems = check(root, **{name: getattr(arguments, name) for name in options})
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)
