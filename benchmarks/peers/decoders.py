"""The peers of language models: transformers' Trainer, PEFT and generate(), and the models of both sides.

    decoders.py make TEXTS FOLDER KIND…       folders of KIND (below); random weights
    decoders.py train TEXTS FOLDER …          one rank of a world; prints one JSON object
    decoders.py generate FOLDER PROMPTS TOKENS BATCH

`train` concatenates the lines of TEXTS, each with an end token, and cuts them into blocks, as
transformers' run_clm does.
"""

import argparse
import json
import os
import pathlib
import time

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

PIECES = 8000
END = "<|endoftext|>"
KINDS = {
    "gpt2_10m": ("gpt2", dict(n_layer=6, n_embd=384, n_head=6, n_positions=1024), None),
    "gpt2": ("gpt2", {}, 50257),
    "llama": ("llama", dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                            num_key_value_heads=4, max_position_embeddings=2048), 32000),
    "mistral": ("mistral", dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                                num_key_value_heads=4, sliding_window=256), 32000),
    # Gemma 3 of 270 M parameters, with fewer words and blocks. The padding's zero row must not begin a text.
    "gemma": ("gemma3_text", dict(hidden_size=640, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=4,
                                  num_key_value_heads=1, head_dim=256, sliding_window=256, pad_token_id=1), 32000),
}


def make(texts, folder, *kinds):
    lines = pathlib.Path(texts).read_text(encoding="utf-8").splitlines()
    pieces = tokenizers.ByteLevelBPETokenizer()
    pieces.train_from_iterator(lines, vocab_size=PIECES, special_tokens=[END])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer, bos_token=END, eos_token=END, pad_token=END)
    for kind in kinds:
        family, shape, rows = KINDS[kind]
        end = tokenizer.eos_token_id
        transformers.set_seed(1)
        config = transformers.AutoConfig.for_model(
            family, **shape, vocab_size=rows or len(tokenizer), bos_token_id=end, eos_token_id=end)
        AutoModelForCausalLM.from_config(config).save_pretrained(pathlib.Path(folder) / kind)
        tokenizer.save_pretrained(pathlib.Path(folder) / kind)


class Blocks(torch.utils.data.Dataset):
    def __init__(self, texts, tokenizer, size):
        lines = pathlib.Path(texts).read_text(encoding="utf-8").splitlines()
        ids = [id for line in tokenizer(lines)["input_ids"] for id in line + [tokenizer.eos_token_id]]
        self.blocks = torch.tensor(ids[: len(ids) // size * size]).view(-1, size)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def mean_loss(model, blocks, batch):
    """Of each token that follows another. Trainer.evaluate() also counts the first token of each block, which nothing
    predicts, so its loss is too small: by a factor of 127 / 128 for blocks of 128."""
    model.eval()
    with torch.no_grad():
        sums = [model(input_ids=rows, labels=rows).loss.item() * len(rows) for rows in blocks.blocks.split(batch)]
    return sum(sums) / len(blocks)


class Losses(TrainerCallback):
    values = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.values.append(logs["loss"])


def train(texts, folder, *flags):
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--lora-r", type=int, default=0)
    parser.add_argument("--eval-texts")
    options = parser.parse_args(flags)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    transformers.set_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if options.lora_r:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(
            r=options.lora_r, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = Blocks(texts, tokenizer, options.block_size)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output, use_cpu=True, ddp_backend="gloo" if "RANK" in os.environ else None,
            per_device_train_batch_size=options.batch_size, max_steps=options.max_steps,
            learning_rate=options.learning_rate, seed=options.seed, bf16=options.bf16, eval_strategy="no", save_strategy="no",
            report_to=[], disable_tqdm=True, logging_steps=50),
        train_dataset=data,
        data_collator=transformers.default_data_collator,
        callbacks=[Losses()],
    )
    result = trainer.train()
    eval_loss = None
    if options.eval_texts:
        eval_loss = mean_loss(model, Blocks(options.eval_texts, tokenizer, options.block_size), options.batch_size)
    tokens = options.max_steps * options.batch_size * options.block_size * int(os.environ.get("WORLD_SIZE", "1"))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"train_runtime": result.metrics["train_runtime"], "tokens": tokens,
                          "loss": Losses.values[-1] if Losses.values else None,
                          "eval_loss": eval_loss}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os._exit(0)  # some of its Gloo programs abort in static destructors


def generate(folder, prompts, tokens, batch):
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    texts = [json.loads(line)["prompt"] for line in pathlib.Path(prompts).read_text().splitlines()][: int(batch)]
    ids = tokenizer(texts, return_tensors="pt", padding=True)
    times = []
    for new in (1, 1 + int(tokens)):  # the difference has no start-up and no prompt
        start = time.time()
        with torch.no_grad():
            model.generate(**ids, max_new_tokens=new, min_new_tokens=new, do_sample=False,
                           pad_token_id=tokenizer.pad_token_id)
        times.append(time.time() - start)
    print(json.dumps({"seconds": times[1] - times[0], "tokens": int(tokens) * len(texts)}))


if __name__ == "__main__":
    import sys

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    {"make": make, "train": train, "generate": generate}[sys.argv[1]](*sys.argv[2:])
