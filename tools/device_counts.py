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
HEAD = [
    "| strategy | ranks | precision | accumulation | checkpointing | before: operators, syncs "
    "| operators | syncs | copies | bytes |",
    "|---|---|---|---|---|---|---|---|---|---|",
]
BEFORE = {("ddp", "1", "fp32", "1", "no"): "about 420, 45"}


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


def table(rows):
    lines = list(HEAD)
    for row in sorted(rows, key=lambda row: (row[0], row[1], row[2] == "bf16", row[3], row[4] == "full")):
        steps = rows[row]
        means = [
            f"{sum(step[key] for step in steps) / len(steps):.0f}" for key in ("operators", "syncs", "copies", "bytes")
        ]
        lines.append("| " + " | ".join([*row, BEFORE.get(row, "did not run"), *means]) + " |")
    return lines


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    rows = measured(pathlib.Path(sys.argv[1]))
    text = PAGE.read_text().split("| strategy |")[0]
    PAGE.write_text(text + "\n".join(table(rows)) + "\n")


if __name__ == "__main__":
    main()
