#!/usr/bin/env python3
"""CPU minutes (user and system) of the parts of scripts/test.sh, each with a limit.

    cpu_minutes.py run FILE NAME COMMAND…   runs a test; adds "NAME seconds" to FILE
    cpu_minutes.py report FILE [--append CSV]
        prints the parts in FILE and fails if one is above its limit

Limits hold for a machine that compiles a sample in REFERENCE seconds. test.sh compiles it, too, as
the part "sample": on a slower machine limits grow by that factor. Objects from ccache make a
build shorter, so only a build without it comes near its limit.
"""

import argparse
import csv
import ctypes
import datetime
import pathlib
import resource
import signal
import subprocess
import sys

SAMPLE, REFERENCE = "sample", 5.0
# Minutes. A part that is missing here has the limit OTHER.
LIMITS = {
    "set-up": 5.0,  # on a machine that has nothing yet
    "checks": 10.0,  # each header alone, if all have changed
    "build of the programs": 10.0,
    "build of the tests": 10.0,
    "tests": 25.0,
    "sanitizers": 30.0,
}
OTHER = 6.0


def die_with_parent():
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def run(path, name, command):
    code = subprocess.Popen(command, preexec_fn=die_with_parent).wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(path, "a") as file:
        file.write(f"{name} {used.ru_utime + used.ru_stime:.1f}\n")
    return code if code >= 0 else 128 - code


def read(path):
    """{part: seconds}, in the file's order."""
    parts = {}
    for line in pathlib.Path(path).read_text().splitlines():
        name, seconds = line.rsplit(" ", 1)
        parts[name] = parts.get(name, 0) + float(seconds)
    return parts


def report(path, append):
    parts = read(path)
    slower = max(1.0, parts.pop(SAMPLE, REFERENCE) / REFERENCE)
    above = []
    for name, seconds in parts.items():
        minutes, limit = seconds / 60, LIMITS.get(name, OTHER) * slower
        print(f"CPU minutes: {name} {minutes:.2f} of {limit:.1f}")
        if minutes > limit:
            above.append(name)
    if append:
        commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
        row = [datetime.date.today().isoformat(), commit.stdout.strip(), f"{slower:.2f}"]
        with open(append, "a", newline="") as file:
            csv.writer(file).writerows(row + [name, f"{seconds / 60:.2f}"] for name, seconds in parts.items())
    for name in above:
        print(f"error: {name} takes more CPU minutes than its limit in tools/cpu_minutes.py")
    return 1 if above else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("file")
    runs.add_argument("name")
    runs.add_argument("command", nargs=argparse.REMAINDER)
    reports = commands.add_parser("report")
    reports.add_argument("file")
    reports.add_argument("--append", metavar="CSV")
    given = parser.parse_args()
    if given.what == "run":
        return run(given.file, given.name, given.command)
    return report(given.file, given.append)


if __name__ == "__main__":
    sys.exit(main())
