"""Writes tests/golden/families.safetensors: logits and the losses of ten AdamW steps of small
models, by transformers. The weights follow from a formula, which tests/models/golden_family.h
has too, so they are not stored. The metadata has each case's config.json.

Run: python tools/golden/families.py   (needs torch, transformers)
"""

import json
import pathlib

import numpy
import torch
import transformers
from safetensors.torch import save_file

FILE = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "families.safetensors"
SEQUENCE, TOKEN, MASKED = "SequenceClassification", "TokenClassification", "MaskedLM"
CAUSAL = "CausalLM"
VOCAB, LABELS = 48, ["bad", "fair", "good"]
BATCHES = [[13, 3, 16, 1]] + [[5, 12, 8, 12], [16, 2, 9, 4]] * 5  # tokens of the samples
SIZES = dict(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
             intermediate_size=24, max_position_embeddings=20, initializer_range=0.3)
QUIET = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
DISTILBERT = dict(vocab_size=VOCAB, dim=16, n_layers=2, n_heads=2, hidden_dim=24,
                  max_position_embeddings=20, dropout=0.0, attention_dropout=0.0,
                  seq_classif_dropout=0.0)
MODERNBERT = SIZES | dict(num_hidden_layers=4, local_attention=6, pad_token_id=3,
                          bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
GPT2 = dict(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=20, initializer_range=0.3,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA = SIZES | dict(num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0,
                   high_freq_factor=4.0, original_max_position_embeddings=8)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=8)
LONGROPE = dict(rope_type="longrope", rope_theta=100.0, short_factor=[1.0, 1.5], long_factor=[2.0, 3.0])
GEMMA = LLAMA | dict(head_dim=12, sliding_window=4, num_hidden_layers=3, query_pre_attn_scalar=9)
TOKENS = dict(classifier_dropout=0.0)
# name: model_type, task, options
CASES = {
    "bert_tokens": ("bert", TOKEN, SIZES | QUIET | dict(hidden_act="relu")),
    "bert_masked": ("bert", MASKED, SIZES | QUIET | dict(hidden_act="gelu_new")),
    "distilbert": ("distilbert", SEQUENCE, DISTILBERT),
    "distilbert_tokens": ("distilbert", TOKEN, DISTILBERT | dict(sinusoidal_pos_embds=True)),
    "distilbert_masked": ("distilbert", MASKED, DISTILBERT | dict(activation="relu")),
    "roberta": ("roberta", SEQUENCE, SIZES | QUIET | dict(type_vocab_size=1, layer_norm_eps=1e-5)),
    "roberta_tokens": ("roberta", TOKEN, SIZES | QUIET),
    "roberta_masked": ("roberta", MASKED, SIZES | QUIET | dict(hidden_act="relu")),
    "ernie": ("ernie", SEQUENCE, SIZES | QUIET | dict(use_task_id=True)),
    "ernie_tokens": ("ernie", TOKEN, SIZES | QUIET),
    "ernie_masked": ("ernie", MASKED, SIZES | QUIET),
    "camembert_masked": ("camembert", MASKED, SIZES | QUIET | dict(type_vocab_size=1)),
    "xlm_roberta": ("xlm-roberta", SEQUENCE, SIZES | QUIET | dict(
        problem_type="regression", num_labels=1)),
    "xlm_roberta_masked": ("xlm-roberta", MASKED, SIZES | QUIET),
    "modernbert": ("modernbert", SEQUENCE, MODERNBERT),
    "modernbert_mean": ("modernbert", SEQUENCE, MODERNBERT | dict(
        classifier_pooling="mean", classifier_bias=True, norm_bias=True, attention_bias=True,
        mlp_bias=True, classifier_activation="relu", hidden_activation="relu",
        global_attn_every_n_layers=2, problem_type="multi_label_classification")),
    "modernbert_tokens": ("modernbert", TOKEN, MODERNBERT | dict(local_rope_theta=100.0)),
    "modernbert_masked": ("modernbert", MASKED, MODERNBERT | dict(
        layer_types=["sliding_attention", "full_attention"] * 2)),
    "gpt2": ("gpt2", CAUSAL, GPT2),
    "gpt2_classes": ("gpt2", SEQUENCE, GPT2 | dict(n_inner=40, activation_function="gelu")),
    "gpt2_tokens": ("gpt2", TOKEN, GPT2 | TOKENS),
    "llama": ("llama", CAUSAL, LLAMA),
    "llama_tokens": ("llama", TOKEN, LLAMA | TOKENS),
    "llama_yarn": ("llama", CAUSAL, LLAMA | dict(rope_parameters=YARN)),
    "llama_dynamic": ("llama", CAUSAL, LLAMA | dict(
        rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, factor=3.0), max_position_embeddings=10)),
    "llama3": ("llama", CAUSAL, LLAMA | dict(
        rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
        head_dim=6, hidden_act="gelu", num_key_value_heads=2)),
    "llama_classes": ("llama", SEQUENCE, LLAMA | dict(problem_type="multi_label_classification")),
    "mistral": ("mistral", CAUSAL, LLAMA | dict(sliding_window=4)),
    "mistral_classes": ("mistral", SEQUENCE, LLAMA | dict(head_dim=12, sliding_window=None)),
    "ministral": ("ministral", CAUSAL, LLAMA | dict(
        head_dim=8, sliding_window=3, layer_types=["full_attention", "sliding_attention"])),
    "ministral_classes": ("ministral", SEQUENCE, LLAMA | dict(head_dim=8, sliding_window=20)),
    "ministral3": ("ministral3", CAUSAL, LLAMA | dict(head_dim=8, rope_parameters=YARN | dict(
        mscale=1.0, mscale_all_dim=0.5, beta_fast=8.0, truncate=False, llama_4_scaling_beta=0.3))),
    "ministral3_classes": ("ministral3", SEQUENCE, LLAMA | dict(head_dim=8, rope_parameters=YARN | dict(
        llama_4_scaling_beta=0.1, attention_factor=0.9))),
    "phi3": ("phi3", CAUSAL, LLAMA | dict(sliding_window=5)),
    "phi3_longrope": ("phi3", CAUSAL, LLAMA | dict(
        rope_parameters=LONGROPE | dict(partial_rotary_factor=0.5), original_max_position_embeddings=10)),
    "phi3_classes": ("phi3", SEQUENCE, LLAMA | dict(tie_word_embeddings=True, rope_parameters=LONGROPE | dict(
        partial_rotary_factor=0.5, attention_factor=1.2), original_max_position_embeddings=40)),
    "gemma": ("gemma", CAUSAL, LLAMA | dict(head_dim=12)),
    "gemma_classes": ("gemma", SEQUENCE, LLAMA | dict(head_dim=8, attention_bias=True)),
    "gemma2": ("gemma2", CAUSAL, GEMMA | dict(attn_logit_softcapping=0.5, final_logit_softcapping=1.5)),
    "gemma2_classes": ("gemma2", SEQUENCE, GEMMA | dict(
        attn_logit_softcapping=None, attention_bias=True, layer_types=["full_attention"] * 3)),
    "gemma3": ("gemma3_text", CAUSAL, GEMMA | dict(sliding_window_pattern=2, rope_parameters=dict(
        full_attention=dict(rope_type="linear", factor=4.0, rope_theta=500.0),
        sliding_attention=dict(rope_type="default", rope_theta=50.0)))),
    "gemma3_classes": ("gemma3_text", SEQUENCE, GEMMA | dict(sliding_window=20, tie_word_embeddings=False, hidden_activation="silu")),
    "smollm3": ("smollm3", CAUSAL, LLAMA | dict(no_rope_layer_interval=2)),
    "smollm3_windows": ("smollm3", CAUSAL, LLAMA | dict(
        no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=3, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=False)),
    "smollm3_classes": ("smollm3", SEQUENCE, LLAMA | dict(no_rope_layers=[1, 0])),
    "qwen2": ("qwen2", CAUSAL, LLAMA | dict(tie_word_embeddings=True)),
    "qwen2_classes": ("qwen2", SEQUENCE, LLAMA),
    "qwen3": ("qwen3", CAUSAL, LLAMA | dict(head_dim=12)),
    "qwen2_windows": ("qwen2", CAUSAL, LLAMA | dict(
        use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    "qwen3_windows": ("qwen3", CAUSAL, LLAMA | dict(
        head_dim=12, use_sliding_window=True, sliding_window=3,
        layer_types=["sliding_attention", "full_attention"])),
    "qwen3_classes": ("qwen3", SEQUENCE, LLAMA | dict(
        head_dim=12, attention_bias=True, problem_type="regression", num_labels=1,
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0))),
    "modernbert_no_decoder_bias": ("modernbert", MASKED, MODERNBERT | dict(decoder_bias=False)),
}


def bits(name, count):
    """`count` 32-bit numbers that follow from a name: FNV-1a, then a mix of seed and index."""
    seed = 2166136261
    for byte in name.encode():
        seed = (seed ^ byte) * 16777619 % 2**32
    x = (seed + numpy.arange(count, dtype=numpy.uint64) * 0x9E3779B9) % 2**32
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x ^ (x >> numpy.uint64(16))


def fill(model):
    tied = getattr(model, "_tied_weights_keys", None) or {}
    tied = tied if getattr(model.config, "tie_word_embeddings", True) else {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = tied.get(name, name)
            values = bits(name, parameter.numel()) / 2**32 - 0.5
            if parameter.dim() == 1:
                values = values * 0.2 + (1 if name.endswith("weight") else 0)
            parameter.copy_(torch.tensor(values.astype(numpy.float32)).view_as(parameter))


def batch(number, lengths, config, task):
    width = max(lengths)
    name = f"batch{number}."
    shape = (len(lengths), width)

    def draw(what, high, size=shape):
        count = int(numpy.prod(size))
        return torch.tensor((bits(name + what, count) % high).astype(numpy.int64)).view(size)

    mask = (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).long()
    ids = torch.where(mask == 1, draw("ids", VOCAB - 8) + 8, config.pad_token_id)
    if task == TOKEN:
        labels = torch.where(mask == 1, draw("tokens", len(LABELS)), -100)
    elif task == CAUSAL:
        labels = torch.where(mask == 1, ids, -100)
    elif task == MASKED:
        chosen = (mask == 1) & (draw("chosen", 3) == 0)
        chosen[:, 0] = True
        labels = torch.where(chosen, draw("words", VOCAB), -100)
    elif config.problem_type == "regression":
        labels = draw("numbers", 100, shape[:1]) / 32.0
    elif config.problem_type == "multi_label_classification":
        labels = draw("sets", 2, (shape[0], len(LABELS))).float()
    else:
        labels = draw("classes", len(LABELS), shape[:1])
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def make(model_type, task, options):
    options = dict(options)
    if options.get("num_labels") != 1:
        options["id2label"] = dict(enumerate(LABELS))
        options["label2id"] = {name: i for i, name in enumerate(LABELS)}
    config = transformers.AutoConfig.for_model(model_type, **options)
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
    fill(model)
    return model


def renew(model):
    """transformers keeps the angles of the longest text so far for shorter ones."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) == "dynamic":
        rotary.max_seq_len_cached = rotary.original_max_seq_len
        rotary.inv_freq = rotary.original_inv_freq


def main():
    torch.set_num_threads(1)
    golden, metadata = {}, {}
    for case, (model_type, task, options) in CASES.items():
        model = make(model_type, task, options)
        config = model.config
        metadata[case] = json.dumps(config.to_diff_dict() | {
            "model_type": model_type, "architectures": [type(model).__name__]})
        model.eval()
        first = batch(0, BATCHES[0], config, task)
        with torch.no_grad():
            golden[case + ".logits"] = model(
                first["input_ids"], attention_mask=first["attention_mask"]).logits
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        losses = []
        for number, lengths in enumerate(BATCHES[1:], 1):
            renew(model)
            loss = model(**batch(number, lengths, config, task)).loss
            losses.append(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        golden[case + ".losses"] = torch.stack(losses)
        print(case, [round(float(loss), 4) for loss in losses])
    metadata["made_with"] = f"torch {torch.__version__}, transformers {transformers.__version__}"
    save_file(golden, FILE, metadata)
    print(FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
