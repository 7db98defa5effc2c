"""The peer: Hugging Face's Trainer on the same files, started as one rank of a world.

Prints one JSON object: seconds of training, samples, the time of the first optimizer
step, the accuracy on the evaluation file. Run by bench.py, which sets RANK and the
rest of torchrun's variables.
"""

import argparse
import csv
import json
import os
import time

parser = argparse.ArgumentParser()
parser.add_argument("--train", required=True)
parser.add_argument("--eval", default="")
parser.add_argument("--model", required=True, help="a folder, or bert-mini")
parser.add_argument("--tokenizer", required=True)
parser.add_argument("--output", required=True)
parser.add_argument("--batch-size", type=int, required=True)
parser.add_argument("--max-steps", type=int, default=-1)
parser.add_argument("--epochs", type=float, default=1)
parser.add_argument("--learning-rate", type=float, default=5e-5)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--padding", choices=("grouped", "max_length"), required=True)
arguments = parser.parse_args()

# Imported after the flags: --help answers at once, a run pays for it like any user's.
import numpy
import torch
import transformers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


class Rows(torch.utils.data.Dataset):
    def __init__(self, path, tokenizer, names):
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        padding = "max_length" if arguments.padding == "max_length" else False
        encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=128, padding=padding)
        self.names = names or sorted({row["label"] for row in rows})
        self.rows = [
            {"input_ids": ids, "attention_mask": mask, "labels": self.names.index(row["label"])}
            for ids, mask, row in zip(encoded["input_ids"], encoded["attention_mask"], rows)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class FirstStep(TrainerCallback):
    time = None

    def on_step_end(self, args, state, control, **kwargs):
        FirstStep.time = FirstStep.time or time.time()


def make_model(labels):
    transformers.set_seed(arguments.seed)
    if arguments.model != "bert-mini":
        return AutoModelForSequenceClassification.from_pretrained(arguments.model, num_labels=labels)
    shape = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=labels,
    )
    return BertForSequenceClassification(shape)


tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
train = Rows(arguments.train, tokenizer, None)
evaluation = Rows(arguments.eval, tokenizer, train.names) if arguments.eval else None
trainer = Trainer(
    model=make_model(len(train.names)),
    args=TrainingArguments(
        output_dir=arguments.output,
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        per_device_train_batch_size=arguments.batch_size,
        max_steps=arguments.max_steps,
        num_train_epochs=arguments.epochs,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
        bf16=arguments.bf16,
        train_sampling_strategy="group_by_length" if arguments.padding == "grouped" else "random",
        eval_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=train,
    data_collator=DataCollatorWithPadding(tokenizer) if arguments.padding == "grouped" else None,
    callbacks=[FirstStep()],
)
result = trainer.train()
report = {
    "train_runtime": result.metrics["train_runtime"],
    "samples": result.global_step * arguments.batch_size * int(os.environ.get("WORLD_SIZE", "1")),
    "first_step_time": FirstStep.time,
}
if evaluation:
    output = trainer.predict(evaluation)
    report["accuracy"] = float(numpy.mean(output.predictions.argmax(-1) == output.label_ids))
if os.environ.get("RANK", "0") == "0":
    print(json.dumps(report), flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
# Some of its Gloo programs abort in static destructors even so.
os._exit(0)
