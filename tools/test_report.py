#!/usr/bin/env python3
"""Reads ctest's JUnit file: cases per label, every skip with its reason, the slowest cases.

Fails if a label that ctest knows ran no case: a guard that has gone quiet. Only the
demo may be left out, for want of a network. Usage: test_report.py <ctest.xml>
"""

import collections
import re
import sys
import xml.etree.ElementTree

# The one reason for which a whole label may be skipped; a separate label has one test
# of the same name.
NO_NETWORK = "pip could not fetch"
# GoogleTest's, the harness's of several ranks, and unittest's last lines.
RAN = (
    re.compile(r"^\[==========\] (\d+) tests? from .* ran\.", re.M),
    re.compile(r"^\[==========\] (\d+) cases ran on \d+ ranks:", re.M),
    re.compile(r"^Ran (\d+) tests? in ", re.M),
)
SKIPPED = re.compile(r"^\[  SKIPPED \] (\S+) \(", re.M)
# GoogleTest prints "file:line: Skipped" and the reason; the harness, both on a line.
REASON = re.compile(r"^\S+:\d+: Skipped\n(.*)$", re.M)
# GoogleTest's and the harness's line after a case.
TOOK = re.compile(r"^\[       OK \] (\S+) \((\d+) ms\)", re.M)
SLOWEST = 10
SKIPPED_FOR = re.compile(r"^\[  SKIPPED \] (\S+): (.*)$", re.M)


def cases_in(output):
    """(cases that ran, [(case, reason)]) of one test program's output. A program that
    counts no cases is one."""
    counts = [int(count) for pattern in RAN for count in pattern.findall(output)]
    names = SKIPPED.findall(output)
    skips = SKIPPED_FOR.findall(output)
    if not skips:
        reasons = REASON.findall(output)
        reasons += ["no reason given"] * (len(names) - len(reasons))
        skips = list(zip(names, reasons))
    return (sum(counts) if counts else 1) - len(skips), skips


def times_in(test, output):
    """[(seconds, test and case)] of one ctest entry. An entry that times no cases is one."""
    name = test.get("name")
    cases = [(int(milliseconds) / 1000, f"{name} {case}") for case, milliseconds in TOOK.findall(output)]
    return cases or [(float(test.get("time") or 0), name)]


def read(path):
    """({label: cases}, [(test, case, reason)], [(seconds, test and case)]) of a JUnit file."""
    labels, skips, times = collections.Counter(), [], []
    for test in xml.etree.ElementTree.parse(path).iter("testcase"):
        output = test.findtext("system-out") or ""
        own = ["none"]
        for entry in test.iter("property"):
            if entry.get("name") == "cmake_labels":
                own = entry.get("value").split(";")
        if test.get("status") in ("notrun", "disabled"):
            lines = [line for line in output.splitlines() if line.strip()]
            ran, skipped = 0, [("", lines[-1] if lines else "no reason given")]
        else:
            ran, skipped = cases_in(output)
            times += times_in(test, output)
        for label in own:
            labels[label] += ran
        skips += [(test.get("name"), case, reason) for case, reason in skipped]
    return labels, skips, times


def main(path):
    labels, skips, times = read(path)
    for label, count in sorted(labels.items()):
        print(f"{label}: {count} cases")
    for test, case, reason in skips:
        print(f"skipped: {test} {case}".rstrip() + f": {reason}")
    for seconds, name in sorted(times, reverse=True)[:SLOWEST]:
        print(f"slow: {seconds:.1f} s {name}")
    offline = {test for test, _, reason in skips if NO_NETWORK in reason}
    empty = sorted(label for label, count in labels.items() if count == 0 and label not in offline)
    for label in empty:
        print(f"error: the label {label} ran no case")
    return 1 if empty or not labels else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
