#!/usr/bin/env python3
"""Do exported models of transformers have PyTorch's results and gradients, bit for bit?

  check_exported.py [--programs FOLDER] [TYPE…]

For each model type a tiny model with random weights and without dropout is exported once, in training
mode, and run at two other shapes, one of them with batch 1. The outputs and the gradient of each
parameter must be PyTorch's bits with torch's operators, within 1e-6 of the largest element with
hasten's, and no gradient may be all zero that PyTorch's is not. On two ranks, each with half of a batch,
outputs must have PyTorch's bits, and gradients of DDP and FSDP be the sum of PyTorch's within 1e-6.
transformers reads the saved weights and has the same outputs.

Then `hasten export`, train, and predict or generate run for each task, and transformers reads what
they saved. Exit code 0 when all is so. Needs torch and transformers. Run it with OMP_NUM_THREADS=1.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.export import Dim, export

ROOT = pathlib.Path(__file__).resolve().parents[1]
VOCABULARY = 67
# Whatever a configuration has of these.
TINY = dict(
    hidden_size=16, d_model=16, n_embd=16, dim=16, embedding_size=16, num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2,
    encoder_layers=2, decoder_layers=2, num_decoder_layers=2, num_attention_heads=2, n_head=2, n_heads=2, num_heads=2,
    encoder_attention_heads=2, decoder_attention_heads=2, num_key_value_heads=1, head_dim=8, d_kv=8, d_ff=24, intermediate_size=24,
    n_inner=24, hidden_dim=24, encoder_ffn_dim=24, decoder_ffn_dim=24, ffn_dim=24, vocab_size=VOCABULARY,
    max_position_embeddings=64, n_positions=64, type_vocab_size=2, image_size=16, patch_size=4, num_labels=3,
    num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, word_embed_proj_dim=16, rotary_dim=4,
    problem_type="single_label_classification", layerdrop=0.0, apply_spec_augment=False, use_cache=False,
    num_mel_bins=8, max_source_positions=20, max_target_positions=40, num_hidden_groups=1, d_inner=24,
)
SEQUENCE, TOKEN, MASKED, CAUSAL, IMAGE, AUDIO = (
    "SequenceClassification", "TokenClassification", "MaskedLM", "CausalLM", "ImageClassification", "AudioClassification")
SEQ2SEQ = "Seq2SeqLM"
# Not here: bloom, whose code has a gradient of gelu of its own, so that of its word embeddings differs by 1e-7;
# longformer and ibert, whose code asks for values of tensors; mamba, whose length is that of the example.
ROWS = [  # type, head, options
    ("albert", SEQUENCE, {}), ("bert", SEQUENCE, {}), ("camembert", TOKEN, {}), ("convbert", SEQUENCE, {}),
    ("deberta", SEQUENCE, {}), ("deberta-v2", SEQUENCE, {}), ("distilbert", SEQUENCE, {}), ("electra", TOKEN, {}),
    ("ernie", SEQUENCE, {}), ("mobilebert", SEQUENCE, {}), ("modernbert", MASKED, {}), ("mpnet", SEQUENCE, {}),
    ("nystromformer", SEQUENCE, {}), ("roberta", MASKED, {}), ("roformer", SEQUENCE, {}), ("squeezebert", SEQUENCE, {}), ("xlm-roberta", TOKEN, {}),
    ("codegen", CAUSAL, dict(n_head=4, num_attention_heads=4)), ("cohere", CAUSAL, {}), ("gemma", CAUSAL, {}),
    ("gemma2", CAUSAL, {}), ("gemma3_text", CAUSAL, {}), ("glm", CAUSAL, {}), ("gpt2", CAUSAL, {}), ("gpt_bigcode", CAUSAL, {}),
    ("gpt_neo", CAUSAL, dict(attention_types=[[["global", "local"], 1]])), ("gpt_neox", CAUSAL, {}), ("gptj", CAUSAL, {}), ("granite", CAUSAL, {}),
    ("llama", CAUSAL, {}), ("mistral", CAUSAL, {}), ("mixtral", CAUSAL, {}), ("olmo", CAUSAL, {}), ("olmo2", CAUSAL, {}), ("opt", CAUSAL, {}),
    ("phi", CAUSAL, {}), ("phi3", CAUSAL, {}), ("qwen2", CAUSAL, {}), ("qwen2_moe", CAUSAL, {}), ("qwen3", CAUSAL, {}),
    ("smollm3", CAUSAL, {}), ("stablelm", CAUSAL, {}), ("starcoder2", CAUSAL, {}),
    ("rembert", SEQUENCE, {}), ("megatron-bert", SEQUENCE, {}), ("mpt", CAUSAL, {}),
    ("gpt_oss", CAUSAL, {}), ("qwen3_moe", CAUSAL, {}),
    ("bart", SEQ2SEQ, {}), ("mbart", SEQ2SEQ, {}), ("pegasus", SEQ2SEQ, {}), ("t5", SEQ2SEQ, {}),
    ("beit", IMAGE, {}), ("convnext", IMAGE, dict(hidden_sizes=[8, 8], depths=[1, 1], num_stages=2)), ("dinov2", IMAGE, {}), ("resnet", IMAGE, dict(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])), ("vit", IMAGE, {}),
    ("wav2vec2", AUDIO, {}), ("hubert", AUDIO, {}),
]


def model_of(model_type, head, options):
    torch.manual_seed(1)
    default = transformers.AutoConfig.for_model(model_type)
    values = {k: v for k, v in TINY.items() if hasattr(default, k) or k in ("num_labels", "problem_type", "pad_token_id")}
    values.update({k: 0.0 for k in vars(default) if "drop" in k and isinstance(getattr(default, k), float)})
    config = transformers.AutoConfig.for_model(model_type, **(values | options))
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config).train()
    for module in model.modules():
        for name in ("use_cache",):
            if hasattr(getattr(module, "config", None), name):
                setattr(module.config, name, False)
    if getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0):
        model.set_experts_implementation("batched_mm")
    return model


def inputs_of(head, batch, length):
    torch.manual_seed(batch * 100 + length)
    if head == IMAGE:
        return {"pixel_values": torch.randn(batch, 3, 16, 16)}
    if head == AUDIO:
        return {"input_values": torch.randn(batch, 400 + 160 * length)}
    ids = torch.randint(3, VOCABULARY, (batch, length))
    # With padding in each row: without it transformers drops the mask, which a graph cannot.
    mask = (torch.arange(length)[None] < length - 1 - torch.arange(batch)[:, None] % 3).long()
    more = {"decoder_input_ids": torch.randint(3, VOCABULARY, (batch, length + 2))} if head == SEQ2SEQ else {}
    return {"input_ids": ids, "attention_mask": mask} | more


def results_of(model, inputs):
    model.zero_grad()
    outputs = {k: v for k, v in model(**inputs).items() if isinstance(v, torch.Tensor)}
    loss = sum((v * torch.sin(torch.arange(v.numel()).to(v.dtype)).view_as(v)).sum() for v in outputs.values())
    loss.backward()
    made = {f"out/{k}": v.detach().clone().contiguous() for k, v in outputs.items()}
    return made | {f"grad/{k}": p.grad.clone().contiguous() for k, p in model.named_parameters() if p.grad is not None}


def difference(ours, theirs, bits, where):
    """What differs, or an empty text. `bits`: nothing may."""
    for name, want in theirs.items():
        got = ours.get(name)
        if got is None:
            return f"{where}: no {name}"
        apart = ((got - want).abs().max() / want.abs().max().clamp_min(1e-30)).item() if want.numel() else 0.0
        if not (torch.equal(got, want) if bits else apart <= 1e-6 or torch.allclose(got, want, atol=1e-9)):
            return f"{where}: {name} differs by {apart:.2g}"
    return ""


def run(*command):
    made = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"{command[:2]}: {made.stderr.strip()}")
    return made.stdout


def compare_alone(programs, model, head, folder):
    for batch, length in ((3, 13), (1, 7)):
        inputs = inputs_of(head, batch, length)
        save_file(inputs, folder / "in.safetensors")
        theirs = results_of(model, inputs)
        for way in ("torch", "hasten"):
            run(programs / "exported_gradients", folder / "model.pt2", way, folder / "in.safetensors", folder / "out")
            problem = difference(load_file(folder / "out.safetensors"), theirs, way == "torch", f"{batch} x {length}, {way}'s operators")
            if problem:
                return problem
    model.config.save_pretrained(folder / "out")
    again = type(model).from_pretrained(folder / "out").train()
    if getattr(again.config, "num_local_experts", 0) or getattr(again.config, "num_experts", 0):
        again.set_experts_implementation("batched_mm")
    mine = {name: value for name, value in results_of(again, inputs).items() if name.startswith("out/")}
    return difference(mine, {k: v for k, v in theirs.items() if k in mine}, False, "what transformers reads")


def compare_ranks(programs, model, head, folder):
    inputs = inputs_of(head, 4, 11)
    save_file(inputs, folder / "in.safetensors")
    halves = [{name: value[2 * rank : 2 * rank + 2] for name, value in inputs.items()} for rank in range(2)]
    before = {name: value.clone() for name, value in model.named_buffers()}
    theirs = []
    for half in halves:
        for name, value in model.named_buffers():
            value.copy_(before[name])
        theirs.append(results_of(model, half))
    joined = {k: v + theirs[1][k] for k, v in theirs[0].items() if k.startswith("grad/")}
    for strategy in ("ddp", "fsdp"):
        run(programs / "hasten", "launch", "--nproc", 2, "--oversubscribe", programs / "exported_gradients",
            folder / "model.pt2", strategy, folder / "in.safetensors", folder / "out")
        problem = difference(load_file(folder / "out.safetensors"), joined, False, f"{strategy} on 2 ranks")
        for rank in range(2):
            outputs = {k: v for k, v in theirs[rank].items() if k.startswith("out/")}
            problem = problem or difference(load_file(folder / f"out.{rank}.safetensors"), outputs, True, f"{strategy}, rank {rank}")
        if problem:
            return problem
    return ""


def compare(programs, model, head, folder):
    example = inputs_of(head, 2, 10)
    free = {k: {0: Dim.DYNAMIC} | ({} if head == IMAGE else {1: Dim.DYNAMIC}) for k in example}
    torch.export.save(export(model, (), example, dynamic_shapes=free, strict=False), folder / "model.pt2")
    return compare_alone(programs, model, head, folder) or compare_ranks(programs, model, head, folder)


TEXTS = ["a good film with great actors", "a bad plot and two hours lost", "good music , bad jokes", "the plot is great ."]
SHARDED = ["--strategy", "fsdp", "--bf16", "--gradient-checkpointing", "full"]
LINES = [  # type, head, task, more flags of hasten train
    ("deberta-v2", SEQUENCE, "text-classification", []),
    ("convbert", SEQUENCE, "text-classification", ["--lora-r", "2"]),
    ("gemma2", SEQUENCE, "text-classification", SHARDED),
    ("mpnet", MASKED, "fill-mask", SHARDED),
    ("roformer", TOKEN, "token-classification", []),
    ("gemma3_text", CAUSAL, "text-generation", SHARDED),
    ("bloom", CAUSAL, "text-generation", ["--lora-r", "2"]),
    ("mixtral", CAUSAL, "text-generation", []),
    ("vit", IMAGE, "image-classification", []),
]


def tokenizer_of(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"] + sorted({word for text in TEXTS for word in text.split()})
    words += [f"[unused{i}]" for i in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>", mask_token="<mask>",
        model_input_names=["input_ids", "attention_mask"], model_max_length=40)
    made.save_pretrained(folder)
    return made


def lines(programs, model_type, head, task, more, folder):
    """The commands of the guide. transformers must have the logits, or the words, of what they saved."""
    model = model_of(model_type, head, {})
    model.save_pretrained(folder / "model")
    tokenizer = tokenizer_of(folder / "model")
    run(programs / "hasten", "export", "--model", folder / "model", "--task", task, "--output-dir", folder / "graph")
    if head == IMAGE:  # a program of one's own trains it
        save_file(inputs_of(head, 3, 0), folder / "in.safetensors")
        run(programs / "exported_gradients", folder / "graph", "torch", folder / "in.safetensors", folder / "out")
        return difference(load_file(folder / "out.safetensors"), results_of(model, inputs_of(head, 3, 0)), True, "graph")
    tagged = "".join("".join(f"{word} {'B-X' if word in ('good', 'bad') else 'O'}\n" for word in text.split()) + "\n" for text in TEXTS)
    rows = "text,label\n" + "".join(f"\"{text}\",{'yes' if 'good' in text else 'no'}\n" for text in TEXTS * 4)
    data, content = {"token-classification": ("data.conll", tagged * 4), "text-classification": ("data.csv", rows), "fill-mask": ("data.csv", rows)}.get(
        task, ("data.txt", "\n".join(TEXTS * 4) + "\n"))
    (folder / data).write_text(content)
    columns = ["--text-column", "text"] if data == "data.csv" else []
    run(programs / "hasten", "train", "--model", folder / "graph", "--task", task, "--train-file", folder / data, "--nproc", 2, "--batch-size", 2,
        "--max-steps", 3, "--save-strategy", "no", "--output-dir", folder / "out", *columns, *more)
    auto = getattr(transformers, f"AutoModelFor{head}")
    if "--lora-r" in more:
        import peft

        trained = peft.PeftModel.from_pretrained(auto.from_pretrained(folder / "graph", num_labels=2, ignore_mismatched_sizes=True)
                                                 if head == SEQUENCE else auto.from_pretrained(folder / "graph"), folder / "out").eval()
    else:
        trained = auto.from_pretrained(folder / "out").eval()
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    if task == "text-generation":
        words = run(programs / "hasten", "generate", "--model", folder / "out", TEXTS[0], "--max-new-tokens", 4, "--json")
        mine = trained.generate(input_ids=ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :].tolist()
        return "" if mine == json.loads(words)["token_ids"] else f"transformers continues with {mine}: {words}"
    if task == "text-classification":
        logits = json.loads(run(programs / "hasten", "predict", "--model", folder / "out", "--json", "--with-logits", TEXTS[0]))["logits"]
        mine = trained(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        near = 1e-3 if "--bf16" in more else 1e-5  # predict's precision is that of the run
        return "" if torch.allclose(torch.tensor(logits), mine, atol=near) else f"transformers has the logits {mine.tolist()}: {logits}"
    run(programs / "hasten", "predict", "--model", folder / "out", TEXTS[0] if task != "fill-mask" else TEXTS[0].replace("good", "<mask>"))
    trained(input_ids=ids)
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default=ROOT / "build/release/bin", type=pathlib.Path)
    parser.add_argument("types", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"  # hasten export runs its python3
    good = 0
    checks = [(row[0], lambda folder, row=row: compare(arguments.programs, model_of(*row), row[1], folder)) for row in ROWS]
    checks += [(f"{row[0]} {row[2]}", lambda folder, row=row: lines(arguments.programs, *row, folder)) for row in LINES]
    checks = [check for check in checks if not arguments.types or check[0].split()[0] in arguments.types]
    for name, check in checks:
        with tempfile.TemporaryDirectory() as folder:
            try:
                problem = check(pathlib.Path(folder))
            except Exception as error:  # of the export or a program: said, and counted
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        good += not problem
        print(f"{name:32} {problem or 'equal'}", flush=True)
    print(f"{good} of {len(checks)} are equal")
    sys.exit(0 if good == len(checks) else 1)


if __name__ == "__main__":
    main()
