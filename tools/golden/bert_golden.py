"""Writes tests/golden/bert/: a small BERT classifier, its logits on a padded batch and
the losses of ten AdamW steps, by transformers.

Run: python tools/golden/bert_golden.py   (needs torch, transformers)
"""

import pathlib

import torch
import transformers
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "bert"


def padded_batch(lengths, generator, vocab):
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(1, vocab, (length,), generator=generator)
        mask[row, :length] = 1
    return ids, mask


def main():
    torch.manual_seed(20)
    torch.set_num_threads(1)
    config = BertConfig(
        vocab_size=101,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        id2label={0: "bad", 1: "fair", 2: "good"},
        label2id={"bad": 0, "fair": 1, "good": 2},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
        problem_type="single_label_classification",
        a_key_of_somebody_else={"kept": [1, 2]},
    )
    model = BertForSequenceClassification(config)
    with torch.no_grad():  # biases and norms that are not 0 and 1
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(FOLDER)

    generator = torch.Generator().manual_seed(21)
    ids, mask = padded_batch([17, 3, 40, 1, 9], generator, config.vocab_size)
    types = torch.randint(0, 2, ids.shape, generator=generator) * mask
    golden = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    model.eval()
    with torch.no_grad():
        golden["logits"] = model(ids, mask).logits
        golden["logits_with_types"] = model(ids, mask, types).logits
        golden["hidden"] = model.bert(ids, mask).last_hidden_state

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for step in range(10):
        ids, mask = padded_batch([5, 12, 8, 12], generator, config.vocab_size)
        labels = torch.randint(0, 3, (4,), generator=generator)
        golden[f"step{step}.input_ids"] = ids
        golden[f"step{step}.attention_mask"] = mask
        golden[f"step{step}.labels"] = labels
        loss = model(ids, mask, labels=labels).loss
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            for name in ("bert.embeddings.word_embeddings.weight",
                         "bert.embeddings.token_type_embeddings.weight",
                         "bert.encoder.layer.1.attention.self.query.weight"):
                golden["gradient." + name] = dict(model.named_parameters())[name].grad.clone()
        optimizer.step()
    golden["losses"] = torch.stack(losses)
    save_file(golden, FOLDER / "golden.safetensors", {
        "torch": torch.__version__, "transformers": transformers.__version__})
    print(golden["losses"], sum(f.stat().st_size for f in FOLDER.iterdir()), "bytes")


if __name__ == "__main__":
    main()
