#!/usr/bin/env python3
"""Do exported models of transformers have PyTorch's results and gradients, bit for bit?

  check_exported.py [--program PROGRAM] [TYPE…]

For each model type a tiny model with random weights and without dropout is exported once, in training
mode, and run at two other shapes, one of them with batch 1. The outputs and the gradient of each
parameter must be PyTorch's bits with torch's operators, within 1e-6 of the largest element with
hasten's, and no gradient may be all zero that PyTorch's is not. Exit code 0 when all is so. Needs torch
and transformers. Run it with OMP_NUM_THREADS=1.
"""

import argparse
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
ROWS = [  # type, head, options
    ("albert", SEQUENCE, {}), ("bert", SEQUENCE, {}), ("camembert", TOKEN, {}), ("convbert", SEQUENCE, {}),
    ("deberta", SEQUENCE, {}), ("deberta-v2", SEQUENCE, {}), ("distilbert", SEQUENCE, {}), ("electra", TOKEN, {}),
    ("ernie", SEQUENCE, {}), ("mobilebert", SEQUENCE, {}), ("modernbert", MASKED, {}), ("mpnet", SEQUENCE, {}),
    ("nystromformer", SEQUENCE, {}), ("roberta", MASKED, {}), ("roformer", SEQUENCE, {}), ("squeezebert", SEQUENCE, {}), ("xlm-roberta", TOKEN, {}),
    ("bloom", CAUSAL, {}), ("codegen", CAUSAL, dict(n_head=4)), ("cohere", CAUSAL, {}), ("gemma", CAUSAL, {}),
    ("gemma2", CAUSAL, {}), ("gemma3_text", CAUSAL, {}), ("glm", CAUSAL, {}), ("gpt2", CAUSAL, {}), ("gpt_bigcode", CAUSAL, {}),
    ("gpt_neo", CAUSAL, dict(attention_types=[[["global", "local"], 1]])), ("gpt_neox", CAUSAL, {}), ("gptj", CAUSAL, {}), ("granite", CAUSAL, {}),
    ("llama", CAUSAL, {}), ("mistral", CAUSAL, {}), ("mixtral", CAUSAL, {}), ("olmo", CAUSAL, {}), ("olmo2", CAUSAL, {}), ("opt", CAUSAL, {}),
    ("phi", CAUSAL, {}), ("phi3", CAUSAL, {}), ("qwen2", CAUSAL, {}), ("qwen2_moe", CAUSAL, {}), ("qwen3", CAUSAL, {}),
    ("smollm3", CAUSAL, {}), ("stablelm", CAUSAL, {}), ("starcoder2", CAUSAL, {}),
    ("bart", SEQ2SEQ, {}), ("mbart", SEQ2SEQ, {}), ("pegasus", SEQ2SEQ, {}), ("t5", SEQ2SEQ, {}),
    ("beit", IMAGE, {}), ("convnext", IMAGE, dict(hidden_sizes=[8, 8], depths=[1, 1], num_stages=2)), ("dinov2", IMAGE, {}), ("resnet", IMAGE, dict(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])), ("swin", IMAGE, dict(depths=[1, 1], num_heads=[2, 2], window_size=2)), ("vit", IMAGE, {}),
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


def compare(program, model, head, folder):
    example = inputs_of(head, 2, 10)
    free = {k: {0: Dim.DYNAMIC} | ({} if head == IMAGE else {1: Dim.DYNAMIC}) for k in example}
    torch.export.save(export(model, (), example, dynamic_shapes=free, strict=False), folder / "model.pt2")
    for batch, length in ((3, 13), (1, 7)):
        inputs = inputs_of(head, batch, length)
        save_file(inputs, folder / "in.safetensors")
        theirs = results_of(model, inputs)
        for way in ("torch", "hasten"):
            run = subprocess.run([program, folder / "model.pt2", way, folder / "in.safetensors", folder / "out.safetensors"],
                                 capture_output=True, text=True)
            if run.returncode:
                return f"{batch} x {length}: {run.stderr.strip()}"
            ours = load_file(folder / "out.safetensors")
            for name, want in theirs.items():
                got = ours.get(name)
                if got is None:
                    return f"{batch} x {length}, {way}'s operators: no {name}"
                apart = ((got - want).abs().max() / want.abs().max().clamp_min(1e-30)).item() if want.numel() else 0.0
                if not (torch.equal(got, want) if way == "torch" else apart <= 1e-6 or torch.allclose(got, want, atol=1e-9)):
                    return f"{batch} x {length}, {way}'s operators: {name} differs by {apart:.2g}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default=str(ROOT / "build/release/bin/exported_gradients"))
    parser.add_argument("types", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    good = 0
    rows = [row for row in ROWS if not arguments.types or row[0] in arguments.types]
    for model_type, head, options in rows:
        with tempfile.TemporaryDirectory() as name:
            try:
                problem = compare(arguments.program, model_of(model_type, head, options), head, pathlib.Path(name))
            except Exception as error:  # of the export: said, and counted
                problem = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        good += not problem
        print(f"{model_type:22} {problem or 'equal'}", flush=True)
    print(f"{good} of {len(rows)} model types are equal")
    sys.exit(0 if good == len(rows) else 1)


if __name__ == "__main__":
    main()
