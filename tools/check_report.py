#!/usr/bin/env python3
"""Opens the page of `hasten report` in headless Chromium and compares it with metrics.jsonl.

    tools/check_report.py [FOLDER…] [--programs build/release/bin] [--pictures DIR]

Checks the values of each curve against the records, the tooltip, that the console has no error and
that the page makes no request. Takes screenshots at three widths, light and dark, into --pictures.
Without folders it trains two small models. Needs Debian's chromium.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

WIDTHS = (360, 768, 1280)
# Moves the pointer over the middle of the first chart, where no person does.
HOVER = """<script>
const plot = document.querySelector('figure svg'), box = plot.getBoundingClientRect();
plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width / 2, clientY: box.top + 50}));
document.body.dataset.requests = performance.getEntriesByType('resource').length;
</script>"""


def chromium(*arguments):
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               "--disable-background-networking", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND",
               "--enable-logging=stderr", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    if done.returncode or errors:
        sys.exit("\n".join(errors or [done.stderr[-2000:]]))
    return done.stdout


def train_two(hasten, work):
    """Output folders of two short runs of the smallest shape."""
    subprocess.run([hasten, "synth", "reviews", "--rows", "400", "--output", work / "reviews.csv"], check=True)
    folders = [work / "plain", work / "local"]
    for folder, steps in zip(folders, ("0", "4")):
        subprocess.run([hasten, "train", "--model", "bert-tiny", "--train-file", work / "reviews.csv",
                        "--eval-split", "0.1", "--num-train-epochs", "4", "--logging-steps", "1",
                        "--nproc", "2", "--eval-strategy", "epoch", "--local-sgd-steps", steps,
                        "--output-dir", folder], check=True)
    return folders


def series_of(folder, kind, key):
    """{step: value} of a recorded value or of a part of it; a resume gives later steps up."""
    values = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "resume":
            values = {step: value for step, value in values.items() if step <= record["step"]}
        member, _, part = key.partition("/")
        value = record.get(member, {}).get(part) if part else record.get(member)
        if record["type"] == kind and value is not None:
            values[record["step"]] = value
    return values


def check_values(dom, folder):
    data = json.loads(re.search(r'id="data">(.*?)</script>', dom, re.S)[1])
    known = {("Loss", "training"): ("train", "loss"), ("Loss", "evaluation"): ("eval", "eval_loss"),
             ("Learning rate", ""): ("train", "learning_rate"), ("Gradient norm", ""): ("train", "grad_norm"),
             ("Metrics", "accuracy"): ("eval", "eval_accuracy"),
             ("Samples per second", "by record"): ("train", "samples_per_second")}
    for part in ("compute", "recompute", "communication", "data", "save"):
        known["Time of a step", part] = ("train", f"step_seconds/{part}")
    compared = 0
    for chart in data:
        for curve in chart["s"]:
            if (chart["t"], curve["n"]) not in known:
                continue
            expected = series_of(folder, *known[chart["t"], curve["n"]])
            if len(expected) <= 2000:
                assert curve["x"] == sorted(expected), chart["t"]
            for step, value in zip(curve["x"], curve["y"]):
                assert abs(expected[step] - value) <= 1e-5 * abs(value) + 1e-12, (chart["t"], step)
                compared += 1
    shown = {(chart["t"], curve["n"]) for chart in data for curve in chart["s"]}
    missing = [name for name, series in known.items() if name not in shown and series_of(folder, *series)]
    assert not missing, f"no curve: {missing}"
    assert compared > 0 and dom.count("<figure") == len(data) and dom.count("<polyline") >= len(data)
    tip = re.search(r'class="tip"[^>]*>(.*?)</div></div>', dom, re.S)
    assert tip and "step " in tip[1] and "training" in tip[1], "no tooltip"
    return compared


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=pathlib.Path)
    parser.add_argument("--programs", type=pathlib.Path, default=pathlib.Path("build/release/bin"))
    parser.add_argument("--pictures", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = pathlib.Path(temporary)
        hasten = options.programs / "hasten"
        options.folders = options.folders or train_two(hasten, work)
        pictures = (options.pictures or work).resolve()
        pictures.mkdir(parents=True, exist_ok=True)
        page = work / "report.html"
        # The pictures of docs/pictures end below a row of charts.
        for name, folders, height in (("run", options.folders[:1], 872), ("runs", options.folders, 954)):
            subprocess.run([hasten, "report", *folders, "--output", page], check=True)
            hovered = work / "hovered.html"
            hovered.write_text(page.read_text().replace("</body>", HOVER + "</body>"))
            profile = f"--user-data-dir={work}/profile"
            dom = chromium(profile, "--dump-dom", hovered.as_uri())
            assert 'data-requests="0"' in dom, "the page makes requests"
            if name == "run":
                print(check_values(dom, folders[0]), "values are those of metrics.jsonl")
            for width in WIDTHS:
                for scheme, number in (("light", 1), ("dark", 0)):
                    chromium(profile, f"--blink-settings=preferredColorScheme={number}",
                             f"--window-size={width},1000",
                             f"--screenshot={pictures}/{name}_{width}_{scheme}.png", hovered.as_uri())
                if options.pictures and width == 768:
                    chromium(profile, f"--window-size=768,{height}", f"--screenshot={pictures}/report_{name}.png",
                             page.as_uri())
    print("no console error, no request")


if __name__ == "__main__":
    main()
