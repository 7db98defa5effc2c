"""Writes tests/golden/bert/local_sgd.safetensors: the classifier of that folder after
Local SGD over two replicas, by transformers and torch.optim.AdamW.

Run: python tools/golden/local_sgd_bert.py   (needs torch, transformers; first run
bert_golden.py)

fp64. Step s of epoch e: batch `step{s}` of golden.safetensors, replica r takes its rows
2r and 2r + 1; in the last step replica 1 has none. Weights are averaged after every 4
steps and at the end, each average over the replicas that have stepped since the last.
Written: eight elements of each parameter, spread evenly, in the order of the names.
"""

import torch
import transformers
from bert_golden import FOLDER
from safetensors.torch import load_file, save_file
from transformers import BertForSequenceClassification

STEPS, EPOCHS, H = 10, 2, 4


def average(replicas, stepped):
    with torch.no_grad():
        for values in zip(*[replica.parameters() for replica in replicas]):
            mean = sum(v for v, s in zip(values, stepped) if s) / sum(stepped)
            for value in values:
                value.copy_(mean)


def main():
    torch.set_num_threads(1)
    batches = load_file(FOLDER / "golden.safetensors")
    replicas = [BertForSequenceClassification.from_pretrained(FOLDER).double().train() for _ in range(2)]
    optimizers = [torch.optim.AdamW(r.parameters(), lr=1e-3, weight_decay=0.01) for r in replicas]
    stepped = [False, False]
    for clock in range(1, EPOCHS * STEPS + 1):
        step = (clock - 1) % STEPS
        for r in range(2 if step + 1 < STEPS else 1):
            rows = {key: batches[f"step{step}.{key}"][2 * r : 2 * r + 2]
                    for key in ("input_ids", "attention_mask", "labels")}
            optimizers[r].zero_grad()
            replicas[r](**rows).loss.backward()
            optimizers[r].step()
            stepped[r] = True
        if clock % H == 0 or clock == EPOCHS * STEPS:
            average(replicas, stepped)
            stepped = [False, False]
    values = []
    for _, parameter in sorted(replicas[0].named_parameters()):
        flat = parameter.detach().flatten()
        values.append(flat[torch.arange(8) * (flat.numel() - 1) // 7])
    save_file({"parameters": torch.cat(values)}, FOLDER / "local_sgd.safetensors",
              {"torch": torch.__version__, "transformers": transformers.__version__})


if __name__ == "__main__":
    main()
