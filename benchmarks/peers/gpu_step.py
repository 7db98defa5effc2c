"""The peer of gpu_step.cpp: Hugging Face's Trainer fine-tunes the same BERT-base on a GPU.

python gpu_step.py [--device cuda|cpu] [--tokens N] [--batch N] [--steps N] [--smoke]

bf16 by autocast, adamw_torch_fused, random weights, synthetic tokens. Prints the object of
gpu_step.cpp's `trainer`.
"""

import argparse
import json
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--smoke", action="store_true")
arguments = parser.parse_args()

# Imported after the flags: a run pays for it like any user's.
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

WARMUP = 5  # steps before the measured ones, as in gpu_step.cpp
ALL = WARMUP + arguments.steps + 1
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
cuda = arguments.device == "cuda"


def synchronize():
    if cuda:
        torch.cuda.synchronize()


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        rows = arguments.batch * ALL
        self.ids = torch.randint(1, 30000, (rows, arguments.tokens))
        self.labels = torch.randint(0, 2, (rows,))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self.labels[index]}


class Measure(TrainerCallback):
    report, start, profiler = {}, 0, None

    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        if step not in (1, WARMUP, WARMUP + arguments.steps, ALL):
            return
        synchronize()
        if step == 1:
            self.report["first_step"] = time.time()
        elif step == WARMUP:
            self.start = time.time()
        elif step == WARMUP + arguments.steps:
            self.report["step"] = (time.time() - self.start) / arguments.steps
            self.report["peak_bytes"] = torch.cuda.max_memory_allocated() if cuda else 0
            self.profiler = torch.profiler.profile(acc_events=True)
            self.profiler.start()
        else:
            self.profiler.stop()
            kinds = (torch.autograd.DeviceType.CUDA,) if cuda else (torch.autograd.DeviceType.CPU,)
            self.report["launches"] = sum(
                event.device_type in kinds and (cuda or event.name.startswith("aten::"))
                for event in self.profiler.events()
            )


transformers.set_seed(1)
shape = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512) if arguments.smoke else {}
measure = Measure()
with tempfile.TemporaryDirectory() as output:
    trainer = Trainer(
        model=BertForSequenceClassification(BertConfig(**shape)),
        args=TrainingArguments(
            output_dir=output,
            use_cpu=not cuda,
            per_device_train_batch_size=arguments.batch,
            max_steps=ALL,
            learning_rate=5e-5,
            bf16=True,
            optim="adamw_torch_fused",
            eval_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Rows(),
        callbacks=[measure],
    )
    trainer.train()
print(json.dumps(measure.report), flush=True)
