"""Writes tests/golden/packing.json: by transformers, the loss of each token of rows in which several
texts share a row, distinguished by position_ids, with the small decoders of families.py.

Run: python tools/golden/packing.py   (needs torch, transformers)
"""

import json
import pathlib

import torch
import transformers

import families

FILE = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "packing.json"
CASES = [name for name, (_, task, _) in families.CASES.items() if task == families.CAUSAL
         and name not in ("llama_dynamic", "phi3_longrope")]  # there a text depends on its neighbours
ROWS = [[5, 7, 4], [2, 14]]  # tokens of the texts in each row


def main():
    torch.set_num_threads(1)
    golden = {"made_with": f"torch {torch.__version__}, transformers {transformers.__version__}",
              "rows": ROWS, "ids": [], "losses": {}}
    positions = torch.tensor([[place for text in row for place in range(text)] for row in ROWS])
    ids = torch.tensor((families.bits("packing", positions.numel()) % (families.VOCAB - 8) + 8)
                       .astype("int64")).view_as(positions)
    golden["ids"] = ids.tolist()
    for name in CASES:
        model = families.make(*families.CASES[name]).eval()
        with torch.no_grad():
            logits = model(ids, position_ids=positions, use_cache=False).logits
            at = 0
            for text in ROWS[0]:  # a text alone has the same logits
                alone = model(ids[:1, at:at + text]).logits
                assert (alone - logits[:1, at:at + text]).abs().max() < 1e-5, name
                at += text
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        losses = losses.view(len(ROWS), -1) * (positions[:, 1:] != 0)
        golden["losses"][name] = losses.tolist()
    FILE.write_text(json.dumps(golden) + "\n")
    print(FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
