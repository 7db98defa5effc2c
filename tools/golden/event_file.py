#!/usr/bin/env python3
"""Writes tests/tracking/event_golden.h, or compares event files with the CSV tracker's file.

    event_file.py > tests/tracking/event_golden.h
    event_file.py --check FOLDER

Needs tensorboardX (the writer of torch.utils.tensorboard as a package of its own) and, for
--check, tensorboard. --check reads the event files in FOLDER with TensorBoard's own reader. Its
scalars must be those of metrics.csv in FOLDER, as fp32, in the same order.
"""

import argparse
import collections
import csv
import pathlib
import tempfile
import time

NOW = 1795451490.25
HISTOGRAMS = ([1.0, 1.0, 1.25, 3.0], [-0.5, -0.5, -0.375], [0.0])


def records():
    """{name: record} of an event file that tensorboardX writes at the time NOW."""
    import numpy
    import tensorboardX
    from tensorboardX.summary import hparams

    time.time = lambda: NOW
    with tempfile.TemporaryDirectory() as folder:
        writer = tensorboardX.SummaryWriter(folder)
        writer.add_scalar("train/loss", 0.625, 7, walltime=NOW)
        writer.add_scalar("zero", 0.0, 0, walltime=NOW)
        writer.add_scalar("nan", float("nan"), 300, walltime=NOW)
        writer.add_text("args", "two\nlines", 0, walltime=NOW)
        for values in HISTOGRAMS:
            writer.add_histogram("w", numpy.array(values), 7, bins="tensorflow", walltime=NOW)
        for number in (0.001, True, "adamw"):
            _, start, end = hparams({"x": number}, {})
            writer.file_writer.add_summary(start, 0, walltime=NOW)
        writer.file_writer.add_summary(end, 0, walltime=NOW)
        writer.close()
        (path,) = pathlib.Path(folder).iterdir()
        data = path.read_bytes()
    names = ("version", "scalar", "zero", "nan", "text", "positive", "negative", "nought")
    names += ("hparams_number", "hparams_bool", "hparams_text", "hparams_end")
    found = {}
    for name in names:
        size = 8 + 4 + int.from_bytes(data[:8], "little") + 4
        found[name], data = data[:size], data[size:]
    assert not data
    return found


def golden():
    import tensorboardX

    print(f"// Made by tools/golden/event_file.py with tensorboardX {tensorboardX.__version__}.")
    print("#pragma once\n\n#include <string>\n\nnamespace hasten::golden {\n")
    print(f"inline constexpr double kNow = {NOW};\n")
    print("// Records as hexadecimal digits.")
    for name, record in records().items():
        camel = "".join(part.capitalize() for part in name.split("_"))
        print(f"inline const std::string k{camel} =")
        text = record.hex()
        lines = [f'    "{text[i : i + 88]}"' for i in range(0, len(text), 88)]
        print("\n".join(lines) + ";")
    print("\n} // namespace hasten::golden")


def check(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    import numpy

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    read = {
        tag: [(event.step, numpy.float32(event.value)) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }
    expected = collections.defaultdict(list)
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                value = numpy.float32(row["value"])
            except ValueError:
                continue  # a text
            if row["step"]:
                expected[row["tag"]].append((int(row["step"]), value))
    assert read.keys() == expected.keys(), (sorted(read), sorted(expected))
    for tag, values in expected.items():
        assert numpy.array_equal(read[tag], values, equal_nan=True), (tag, read[tag], values)
    tensors = reader.Tags()["tensors"]
    print(f"{sum(map(len, read.values()))} scalars of {len(read)} tags are equal; other tags: {tensors}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", type=pathlib.Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.check)
    else:
        golden()
