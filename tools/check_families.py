#!/usr/bin/env python3
"""Do hasten and transformers read each other's folders, with equal logits?

  check_families.py [--full] [--program PROGRAM]

For each case of tools/golden/families.py transformers saves a model, in several files.
hasten reads the folder, computes logits and saves the model. The logits must be within
1e-5, and transformers must read hasten's folder without a word about missing or
unexpected weights and compute the same logits as with its own. --full does the same
for one model of each family in its usual size, with random weights: logits within 1e-5
of the largest. Exit code 0 when all is equal, 1 when not. Needs torch and transformers.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "golden"))
import families  # noqa: E402

BASE = dict(max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)
# As SmolLM 135M: nine heads of queries, three of keys.
SMALL_LLAMA = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                   num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True, pad_token_id=0)
FULL = {
    "bert": ("bert", families.SEQUENCE, {}),
    "distilbert": ("distilbert", families.TOKEN, {}),
    "modernbert": ("modernbert", families.MASKED, {}),
    "gpt2": ("gpt2", families.CAUSAL, dict(pad_token_id=0)),
    "llama": ("llama", families.CAUSAL, SMALL_LLAMA),
    "mistral": ("mistral", families.CAUSAL, SMALL_LLAMA | dict(sliding_window=64)),
    "ministral3": ("ministral3", families.CAUSAL, SMALL_LLAMA | dict(head_dim=64)),
    "phi3": ("phi3", families.CAUSAL, SMALL_LLAMA | dict(sliding_window=64)),
    "gemma": ("gemma", families.CAUSAL, SMALL_LLAMA | dict(head_dim=64)),
    "gemma2": ("gemma2", families.CAUSAL, SMALL_LLAMA | dict(head_dim=64, sliding_window=64, query_pre_attn_scalar=64)),
    "gemma3_text": ("gemma3_text", families.CAUSAL, SMALL_LLAMA | dict(
        head_dim=64, sliding_window=64, query_pre_attn_scalar=64)),
    "camembert": ("camembert", families.SEQUENCE, BASE | dict(vocab_size=32005)),
    "ernie": ("ernie", families.SEQUENCE, dict(use_task_id=True)),
    "smollm3": ("smollm3", families.CAUSAL, SMALL_LLAMA),
    "qwen2": ("qwen2", families.CAUSAL, SMALL_LLAMA),
    "qwen3": ("qwen3", families.CAUSAL, SMALL_LLAMA),
    "roberta": ("roberta", families.MASKED, BASE),
    "xlm-roberta": ("xlm-roberta", families.TOKEN, BASE | dict(vocab_size=250002)),
}


def full_model(model_type, task, options):
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type, **options)
    return getattr(transformers, f"AutoModelFor{task}").from_config(config)


def full_batch(config):
    torch.manual_seed(2)
    lengths = torch.tensor([200, 37, 1])
    mask = (torch.arange(200) < lengths.unsqueeze(1)).long()
    ids = torch.where(mask == 1, torch.randint(10, 20000, mask.shape), config.pad_token_id)
    return dict(input_ids=ids, attention_mask=mask)


def compare(program, model, task, inputs, full):
    """The differences, as a list of lines."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model.eval().save_pretrained(folder / "theirs", max_shard_size="150MB" if full else "4KB")
        save_file(inputs, folder / "inputs.safetensors")
        run = subprocess.run(
            [program, folder / "theirs", task, folder / "inputs.safetensors", folder / "ours"],
            capture_output=True, text=True)
        if run.returncode != 0 or run.stderr:
            return [f"hasten: {run.stderr}"]
        saved, info = type(model).from_pretrained(folder / "ours", output_loading_info=True)
        with torch.no_grad():
            theirs = model(**inputs).logits
            again = saved.eval()(**inputs).logits
        ours = load_file(folder / "ours" / "logits.safetensors")["logits"]
        if theirs.dim() == 3:  # of tokens, not of padding
            real = inputs["attention_mask"].bool()
            ours, theirs, again = ours[real], theirs[real], again[real]
        limit = 1e-5 * (max(1.0, theirs.abs().max().item()) if full else 1.0)
        distance = (ours - theirs).abs().max().item()
        problems = [f"{kind}: {sorted(names)}" for kind, names in info.items() if names]
        if not distance <= limit:
            problems.append(f"logits differ by {distance:.3g}")
        if not torch.equal(again, theirs):
            problems.append("the folder that hasten wrote gives other logits")
        print(f"  {type(model).__name__}: logits within {distance:.2g}")
        return problems


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--program", default=str(ROOT / "build/release/bin/model_logits"))
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failed = 0
    for name, (model_type, task, settings) in (FULL if options.full else families.CASES).items():
        if options.full:
            model = full_model(model_type, task, settings)
            inputs = full_batch(model.config)
        else:
            model = families.make(model_type, task, settings)
            inputs = families.batch(0, families.BATCHES[0], model.config, task)
            del inputs["labels"]
        problems = compare(options.program, model, task, inputs, options.full)
        for problem in problems:
            print(f"{name}: {problem}")
        failed += bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
