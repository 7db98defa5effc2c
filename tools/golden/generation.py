"""Writes tests/golden/generation.json: what transformers' generate() answers with the small decoders
of families.py, greedily and with a repetition penalty, and the probabilities that its samplers leave.

Run: python tools/golden/generation.py   (needs torch, transformers)
"""

import json
import pathlib

import torch
import transformers
from transformers.generation import logits_process

import families

FILE = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "generation.json"
CASES = [name for name, (_, task, _) in families.CASES.items() if task == families.CAUSAL]
LENGTHS = [5, 1, 3, 6]
NEW = 14  # tokens


def prompts(name):
    return [(families.bits(f"{name}.prompt{i}", n) % (families.VOCAB - 8) + 8).tolist()
            for i, n in enumerate(LENGTHS)]


def answer(model, prompt, **options):
    out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, **options)
    return out[0, len(prompt):].tolist()


def probabilities(scores, temperature, top_k, top_p):
    steps = [logits_process.TemperatureLogitsWarper(temperature)]
    if top_k:
        steps.append(logits_process.TopKLogitsWarper(top_k))
    if top_p < 1:
        steps.append(logits_process.TopPLogitsWarper(top_p))
    for step in steps:
        scores = step(None, scores)
    return scores.softmax(-1)


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    golden = {"made_with": f"torch {torch.__version__}, transformers {transformers.__version__}",
              "answers": {}, "samplers": []}
    for name in CASES:
        model = families.make(*families.CASES[name]).eval()
        model.generation_config.eos_token_id = 2
        golden["answers"][name] = {
            "prompts": prompts(name),
            "greedy": [answer(model, prompt) for prompt in prompts(name)],
            "repetition_penalty": [answer(model, prompt, repetition_penalty=1.3)
                                   for prompt in prompts(name)]}
    scores = torch.tensor(families.bits("scores", 2 * 12) / 2**32 * 6 - 3).float().view(2, 12)
    golden["scores"] = scores.tolist()
    for options in [(0.7, 0, 1.0), (1.0, 4, 1.0), (1.3, 0, 0.8), (0.6, 5, 0.5), (1.0, 50, 1e-6)]:
        golden["samplers"].append({
            "temperature": options[0], "top_k": options[1], "top_p": options[2],
            "probabilities": probabilities(scores, *options).tolist()})
    FILE.write_text(json.dumps(golden, indent=None) + "\n")
    print(FILE.stat().st_size, "bytes", golden["answers"]["gpt2"])


if __name__ == "__main__":
    main()
