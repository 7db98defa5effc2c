#!/usr/bin/env python3
"""Reads ctest's JUnit file: cases per label, every skip with its reason.

Fails if a label that ctest knows ran no case: a guard that has gone quiet. Usage:
test_report.py <ctest.xml>
"""

import collections
import re
import sys
import xml.etree.ElementTree

RUNNING = re.compile(r"^\[==========\] (\d+) tests? from .* ran\.", re.M)
SKIPPED = re.compile(r"^\[  SKIPPED \] (\S+) \(", re.M)
REASON = re.compile(r"^\S+:\d+: Skipped\n(.*)$", re.M)
UNITTEST = re.compile(r"^Ran (\d+) tests? in ", re.M)


def cases_in(output):
    """(cases that ran, [(case, reason)]) of one test program's output. A program that
    is no GoogleTest binary is one case."""
    ran = sum(int(count) for count in RUNNING.findall(output) + UNITTEST.findall(output))
    names = SKIPPED.findall(output)
    reasons = REASON.findall(output)
    reasons += ["no reason given"] * (len(names) - len(reasons))
    return (ran or 1) - len(names), list(zip(names, reasons))


def read(path):
    """({label: cases}, [(test, case, reason)]) of a JUnit file."""
    labels, skips = collections.Counter(), []
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
        for label in own:
            labels[label] += ran
        skips += [(test.get("name"), case, reason) for case, reason in skipped]
    return labels, skips


def main(path):
    labels, skips = read(path)
    for label, count in sorted(labels.items()):
        print(f"{label}: {count} cases")
    for test, case, reason in skips:
        print(f"skipped: {test} {case}".rstrip() + f": {reason}")
    empty = sorted(label for label, count in labels.items() if count == 0)
    for label in empty:
        print(f"error: the label {label} ran no case")
    return 1 if empty or not labels else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
