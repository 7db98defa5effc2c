#!/usr/bin/env python3
"""Does `hasten generate` answer as transformers does?

  check_generation.py [--program PROGRAM]

For one model of each decoder family, of random weights, 20 prompts get 64 tokens each, greedily.
hasten's tokens, with and without its cache and in batches of 8, must be those of transformers'
generate(). Exit code 0 when all are equal, 1 when not. Needs torch, transformers and tokenizers.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import tokenizers
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[1]
VOCAB, NEW = 2000, 64
LLAMA = dict(vocab_size=VOCAB, hidden_size=192, intermediate_size=384, num_hidden_layers=4,
             num_attention_heads=6, num_key_value_heads=2, initializer_range=0.1)
MODELS = {
    "gpt2": dict(vocab_size=VOCAB, n_embd=192, n_layer=4, n_head=6, initializer_range=0.1),
    "llama": LLAMA | dict(rope_parameters=dict(
        rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=64)),
    "mistral": LLAMA | dict(sliding_window=16),
    "ministral3": LLAMA | dict(head_dim=32),
    "phi3": LLAMA | dict(pad_token_id=0, original_max_position_embeddings=40, rope_parameters=dict(
        rope_type="longrope", short_factor=[1.0 + i / 8 for i in range(8)],
        long_factor=[1.0 + i for i in range(8)], partial_rotary_factor=0.5)),
    "gemma2": LLAMA | dict(head_dim=32, sliding_window=16, tie_word_embeddings=False),
    "gemma3_text": LLAMA | dict(
        head_dim=32, sliding_window=16, sliding_window_pattern=2, tie_word_embeddings=False),
    "smollm3": LLAMA | dict(pad_token_id=0),
    "qwen2": LLAMA,
    "qwen3": LLAMA | dict(head_dim=48),
}


def texts():
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [line for page in pages for line in page.read_text().splitlines() if len(line) > 30]


def make_tokenizer(lines):
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(lines, vocab_size=VOCAB, special_tokens=["<|endoftext|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def ours(program, folder, prompts, more):
    run = subprocess.run([program, "generate", "--model", folder, "--file", folder / "prompts.jsonl",
                          "--max-new-tokens", str(NEW), "--json", *more],
                         capture_output=True, text=True, check=False)
    if run.returncode != 0:
        sys.exit(run.stderr)
    return [json.loads(line) for line in run.stdout.splitlines()]


def theirs(model, tokenizer, prompt):
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=NEW, do_sample=False,
                             pad_token_id=tokenizer.eos_token_id)
    return out[0, ids["input_ids"].size(1):].tolist()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "build/release/bin/hasten"))
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines = texts()
    tokenizer = make_tokenizer(lines)
    prompts = [line[:10 + 7 * i] for i, line in enumerate(lines[:20 * 37:37])]
    failed = 0
    for model_type, settings in MODELS.items():
        torch.manual_seed(1)
        end = tokenizer.eos_token_id
        config = transformers.AutoConfig.for_model(
            model_type, **settings, bos_token_id=end, eos_token_id=end)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            (folder / "prompts.jsonl").write_text(
                "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
            read = transformers.AutoTokenizer.from_pretrained(folder)  # by its class
            wanted = [theirs(model, read, prompt) for prompt in prompts]
            for way in ([], ["--no-cache"], ["--batch-size", "1"]):
                answers = ours(options.program, folder, prompts, way)
                wrong = [i for i, answer in enumerate(answers)
                         if answer["token_ids"] != wanted[i] or answer["generated_text"] !=
                         read.decode(wanted[i], skip_special_tokens=True)]
                print(f"  {model_type} {' '.join(way) or 'with cache'}: "
                      f"{len(answers) - len(wrong)} of {len(prompts)} prompts equal, "
                      f"{len(set(sum(wanted, [])))} tokens seen")
                if len(answers) != len(prompts) or wrong:
                    failed += 1
                    print(f"{model_type}: other answers to prompts {wrong}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
