#!/usr/bin/env python3
"""Writes the table of docs/design/devices.md: what a training step costs on the test device.

The cases DeviceStep.*WaitForNothing and *WaitsForNothing of hasten_device_tests record the
counters of each step. Takes half a minute: tools/device_counts.py BIN_FOLDER
"""

import json
import pathlib
import subprocess
import sys
import tempfile

PAGE = pathlib.Path(__file__).parent.parent / "docs/design/devices.md"
SHAPES = [("1", "no"), ("1", "full"), ("4", "no"), ("4", "full")]  # accumulation, checkpointing
HEAD = [
    "| strategy | ranks | precision | operators | checkpointed | 4 batches | both | syncs | copies of a batch |",
    "|---|---|---|---|---|---|---|---|---|",
]


def measured(programs):
    """{row: steps} of all cases."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "counts.json"
        subprocess.run(
            [programs / "hasten_device_tests", "--gtest_filter=DeviceStep.*ForNothing", f"--gtest_output=json:{file}"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        suites = json.loads(file.read_text())["testsuites"]
    return {
        tuple(name.split(" | ")): json.loads(value)
        for suite in suites
        for case in suite["testsuite"]
        for name, value in case.items()
        if " | " in name
    }


def mean(steps, key):
    return f"{sum(step[key] for step in steps) / len(steps):.0f}"


def table(rows):
    lines = list(HEAD)
    for case in sorted({row[:3] for row in rows}, key=lambda case: (*case[:2], case[2] == "bf16")):
        operators = [mean(rows[*case, *shape], "operators") for shape in SHAPES]
        steps = [step for shape in SHAPES for step in rows[*case, *shape]]
        syncs = str(max(step["syncs"] for step in steps))
        copies = mean(rows[*case, *SHAPES[0]], "copies")
        lines.append("| " + " | ".join([*case, *operators, syncs, copies]) + " |")
    return lines


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    rows = measured(pathlib.Path(sys.argv[1]))
    text = PAGE.read_text().split("| strategy |")[0]
    PAGE.write_text(text + "\n".join(table(rows)) + "\n")


if __name__ == "__main__":
    main()
