#!/usr/bin/env python3
"""Do hasten and PEFT read each other's adapters, with equal logits?

  check_adapters.py [--program PROGRAM]

For each case of tools/golden/lora.py PEFT saves an adapter and transformers its base. hasten
reads both, computes logits and saves the adapter again. The logits must be within 1e-5, and
PEFT must read hasten's adapter and compute the same logits, bit for bit. Exit code 0 when all is
equal, 1 when not. Needs torch, transformers and peft.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import warnings

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "golden"))
import families  # noqa: E402
import lora  # noqa: E402


def compare(program, name):
    """The differences, as a list of lines."""
    model, task, _ = lora.make(name)
    model.eval()
    inputs = families.batch(0, families.BATCHES[0], model.config, task)
    del inputs["labels"]
    with torch.no_grad():
        theirs = model(**inputs).logits
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        model.peft_config["default"].base_model_name_or_path = str(folder / "base")
        model.save_pretrained(folder / "theirs")
        base = families.make(*(families.CASES[lora.CASES[name][0]]))  # PEFT's fill leaves it alone
        base.save_pretrained(folder / "base")
        save_file(inputs, folder / "inputs.safetensors")
        run = subprocess.run(
            [program, folder / "theirs", task, folder / "inputs.safetensors", folder / "ours"],
            capture_output=True, text=True)
        if run.returncode != 0 or run.stderr:
            return [f"hasten: {run.stderr}"]
        again = peft.PeftModel.from_pretrained(base, folder / "ours").eval()
        with torch.no_grad():
            read = again(**inputs).logits
        ours = load_file(folder / "ours" / "logits.safetensors")["logits"]
        names = set(load_file(folder / "ours" / "adapter_model.safetensors"))
        expected = {each for each in load_file(folder / "theirs" / "adapter_model.safetensors")
                    if ".original_module." not in each and ".modules_to_save." not in each}  # bias="all"
    if theirs.dim() == 3:  # of tokens, not of padding
        real = inputs["attention_mask"].bool()
        ours, theirs, read = ours[real], theirs[real], read[real]
    distance = (ours - theirs).abs().max().item()
    problems = [f"tensors differ: {sorted(names ^ expected)}"] if names != expected else []
    if not distance <= 1e-5:
        problems.append(f"logits differ by {distance:.3g}")
    if not torch.equal(read, theirs):
        problems.append("the adapter that hasten wrote gives other logits")
    print(f"  {name}: logits within {distance:.2g}")
    return problems


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "build/release/bin/model_logits"))
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    failed = 0
    for name in lora.CASES:
        problems = compare(options.program, name)
        for problem in problems:
            print(f"{name}: {problem}")
        failed += bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
