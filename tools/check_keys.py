#!/usr/bin/env python3
"""Is each key of the files of a model's folder used as in transformers and PEFT, refused, or named?

  check_keys.py [--program PROGRAM] [--cases TEXT] [--files TEXT] [--limit N] [--seed N] [--report FILE]
  check_keys.py --golden FILE

Takes the folders of tools/golden/reference.py and changes keys of their JSON files, one at a time and
random ones in pairs: a key is deleted, set to null, to another legal value and to a wrong type, and
keys are added, those of src/tables/known_keys.inc and unknown ones. It changes tensors, too, and draws
which files of a tokenizer are there, with values that contradict each other. hasten's result must be
the reference's, or an error that names the key or tensor, or the log must name it as ignored. Where
the reference raises, hasten must refuse, or the table must say that the key is neutral. Two things
may be lenient: null counts as no key, and a whole number as a number.

Prints each failure, and for each kind of file for how many changes the reference's own output changed
or it raised; below 30 % a kind fails, because such changes prove nothing. --golden writes a sample
with the reference's results for the C++ tests. Exit code 0 when all is right. Needs torch,
transformers and peft, and benchmarks' program model_logits.
"""

import argparse
import copy
import json
import multiprocessing
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "golden"))
import keys  # noqa: E402
import reference  # noqa: E402
from reference import load_file, read_json, save_file, torch, write_json  # noqa: E402

LEAST = 0.3  # of a kind's changes must change the reference's output
DELETE = "(delete)"
ROPES = [{"rope_type": "default", "rope_theta": 3.0}, {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
         {"rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
         {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10}, {"rope_theta": 7.0}, {}]
NEW_TOKEN = {"__type": "AddedToken", "content": "<new1>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False,
             "special": True}
TOKENS = ["the", "<new1>", NEW_TOKEN, {"content": "<new1>", "lstrip": True}]
# Other legal values, by the last part of a key's path.
LEGAL = {
    "model_type": ["roberta", "llama", "unknown"], "hidden_act": ["relu", "gelu_new", "gelu_pytorch_tanh", "gelu_python", "swish", "quick_gelu", "no"],
    "activation": ["relu", "gelu_pytorch_tanh", "no"], "hidden_activation": ["relu", "gelu_pytorch_tanh", "no"],
    "activation_function": ["relu", "gelu_pytorch_tanh", "gelu_fast", "no"], "classifier_activation": ["relu", "gelu_new", "no"],
    "num_hidden_layers": [1, 3], "n_layer": [1, 3], "n_layers": [1, 3], "num_attention_heads": [1, 4, 3], "n_head": [1, 4], "n_heads": [1, 4],
    "num_key_value_heads": [1, 2], "pad_token_id": [3, 9, -1, 100], "vocab_size": [40, 64], "type_vocab_size": [1, 3],
    "max_position_embeddings": [16, 40], "problem_type": ["regression", "no"], "num_labels": [2, 5], "architectures": [["OtherModel"], []],
    "id2label": [{"0": "a", "1": "b"}, {"0": "x", "1": "y", "2": "z"}], "dtype": ["bfloat16", "no"], "torch_dtype": ["bfloat16"],
    "rope_parameters": ROPES, "rope_scaling": [*ROPES, {"type": "linear", "factor": 4.0}], "rope_theta": [5.0, 0.5], "factor": [4.0, 0.5],
    "rope_type": ["linear", "llama3", "dynamic", "no"], "type": ["linear", "no"], "low_freq_factor": [2.0], "high_freq_factor": [9.0],
    "original_max_position_embeddings": [4, 16], "partial_rotary_factor": [0.5], "layer_norm_eps": [0.5, 1], "norm_eps": [0.5],
    "rms_norm_eps": [0.5, 1], "layer_norm_epsilon": [0.5], "local_attention": [2, 4, 128], "global_attn_every_n_layers": [1, 2],
    "classifier_pooling": ["cls", "mean", "no"], "n_inner": [24], "head_dim": [8, 4], "sliding_window": [2], "position_embedding_type": ["absolute", "relative_key"],
    "tokenizer_class": ["BertTokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "NoTokenizer"], "quantization_config": [{"quant_method": "awq"}],
    "per_layer_config": [{"0": {"hidden_act": "relu"}}],
    "eos_token_id": [44, [44, 33, 20], [], -1], "do_sample": [True, False], "temperature": [0.0, 0.5, -1.0], "top_k": [0, 5, -1], "top_p": [0.0, 0.5, 2.0],
    "repetition_penalty": [1.5, 0.0, -2.0, 2], "max_new_tokens": [1, 4, 0, -3], "max_length": [4, 8, 20, 0], "stop_strings": ["b", ["zz", "e"]],
    "num_beams": [1, 2], "num_return_sequences": [1, 2], "min_length": [0, 30], "min_new_tokens": [0, 30], "no_repeat_ngram_size": [0, 1],
    "bad_words_ids": [[[33]]], "suppress_tokens": [[], [33, 5]], "begin_suppress_tokens": [[], [33, 5]], "sequence_bias": [[[[33], -9.0]]],
    "forced_bos_token_id": [7], "forced_eos_token_id": [7], "exponential_decay_length_penalty": [[1, 9.0]], "guidance_scale": [1, 3.0],
    "watermarking_config": [{"bias": 9.0}], "max_time": [0.0], "penalty_alpha": [0, 0.6], "cache_implementation": ["dynamic", "no"],
    "r": [1, 3], "lora_alpha": [1, 16, 0, -2], "lora_dropout": [0.5], "use_rslora": [True, False], "fan_in_fan_out": [True, False],
    "target_modules": [["v_proj"], ["q_proj", "k_proj"], "all-linear", ".*q_proj", ["no_proj"]], "modules_to_save": [["norm"], ["lm_head"], []],
    "layers_to_transform": [[0], 0, []], "exclude_modules": [["q_proj"], ["no"], []], "layers_pattern": ["layers"], "peft_type": ["IA3", "NO"],
    "task_type": ["SEQ_CLS", "NO"], "bias": ["none", "all"], "rank_pattern": [{}, {"q_proj": 1}], "alpha_pattern": [{}, {"q_proj": 9}],
    "init_lora_weights": [False, "gaussian", "pissa"], "base_model_name_or_path": ["/no/where"],
    "additional_special_tokens": [["<new1>", "new2"], [], ["the", NEW_TOKEN]], "extra_special_tokens": [["<new1>", "new2"], [], {"image_token": "<new1>"}],
    "added_tokens_decoder": [{}, {"0": {"content": "the", "special": True}}, {"9000": {"content": "<new1>"}, "8000": {"content": "new2", "special": True}}],
    "model_max_length": [5, 1e30], "padding_side": ["left", "middle"], "truncation_side": ["left", "middle"], "image_token": ["<new1>"],
    "prepend_scheme": ["always", "never", "first"], "behavior": ["Removed", "MergedWithNext", "Contiguous"], "replacement": ["_"], "content": ["the", "<other>"],
    "pattern": [{"String": "e"}, {"Regex": "[a-m]+"}], "unk_token": ["the", None], "unk_id": [1], "max_input_chars_per_word": [3], "prefix": ["@@"],
    "continuing_subword_prefix": ["@@", ""], "end_of_word_suffix": ["</e>"], "dropout": [0.0, 0.9], "suffix": ["e"], "start": [0, 3], "stop": [2],
    "strip_accents": [True, False], "cls": [["the", 50]], "sep": [["the", 50]], "id": [60],
}
for name in keys.NAMED.split():
    LEGAL.setdefault(name, TOKENS)


def legal_values(path, value):
    last = path[-1]
    if last in LEGAL:
        return [each for each in LEGAL[last] if each != value or isinstance(each, bool) != isinstance(value, bool)]
    if last == "layer_types":
        count = len(value) if isinstance(value, list) else 2
        return [["sliding_attention"] * count, ["full_attention"] * count, ["no"] * count, ["full_attention"]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value * 2 + (1 if isinstance(value, int) else 0.25)]
    return {str: ["other"], list: [[]], dict: [{}]}.get(type(value), [True, 3, "other"])


def wrong_type(value):
    return {bool: "yes", int: "3", float: "0.5", str: 3, list: {"a": 1}, dict: [1]}.get(type(value), {"wrong": "type"})


def part_of(case, file, document, path):
    """The table's column `of` for a key at that path."""
    if file == "config.json":
        if len(path) > 1 and path[0] in ("rope_parameters", "rope_scaling"):
            return "rope_parameters:modernbert" if path[-1].endswith("_attention") else "rope_parameters"
        return case.of if isinstance(case, reference.Model) else "*"
    if file == "tokenizer.json" and len(path) > 1:
        if path[0] == "added_tokens":
            return "added_token"
        inside = document
        for step in path[:-1]:
            inside = inside[step]
        return f"{path[0]}:{inside.get('type')}" if isinstance(inside, dict) else "*"
    return case.of if file == "tokenizer_config.json" else "*"


def use_of(case, file, document, path):
    if file == "config.json" and path[0] in ("id2label", "label2id"):
        return "used"
    row = keys.find(file, part_of(case, file, document, path), path[-1])
    return row[0] if row else "unknown"


def paths_of(file, document):
    """The keys to change: those of the document, and of the objects in it that have keys of their own."""
    found = []

    def walk(value, path):
        for key in value if isinstance(value, dict) else range(min(2, len(value))):
            if isinstance(value, dict):
                found.append(path + (key,))
            if isinstance(value[key], (dict, list)) and key not in ("vocab", "merges", "special_tokens", "single", "pair", "pattern"):
                walk(value[key], path + (key,))

    if file == "tokenizer.json":
        walk(document, ())
        return [path for path in found if path[-1] != "precompiled_charsmap"] + [path for path in found if path[-1] == "precompiled_charsmap"]
    for key, value in document.items():
        found.append((key,))
        if key == "rope_parameters" and isinstance(value, dict):
            found.extend((key, each) for each in value)
            found.extend((key, each, inner) for each, nested in value.items() if isinstance(nested, dict) for inner in nested)
        if key == "added_tokens_decoder":
            found.extend((key, each, inner) for each in list(value)[:2] for inner in value[each])
    return found


def at(document, path):
    for step in path:
        document = document[step]
    return document


def changed(document, path, value):
    document = copy.deepcopy(document)
    inside = at(document, path[:-1])
    if value is DELETE:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return document


class Change:
    """New documents for files of a case's folder: {file: JSON value, None (no file), or a function: of the
    old JSON value, or one that changes a dictionary of tensors}."""

    def __init__(self, case, file, names, text, files, neutral=False, lenient=None):
        self.case, self.file, self.names, self.text, self.files, self.neutral = case, file, names, text, files, neutral
        self.lenient = lenient  # the documents that hasten may read instead, where the reference raises

    def apply(self, folder, files=None):
        for file, value in (files or self.files).items():
            if value is None:
                (folder / file).unlink(missing_ok=True)
            elif callable(value) and file.endswith(".json"):
                write_json(folder / file, value(read_json(folder / file)))
            elif callable(value):
                tensors = load_file(folder / file)
                value(tensors)
                save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
            elif isinstance(value, str):
                (folder / file).write_text(value, encoding="utf-8")
            else:
                write_json(folder / file, value)


def shown(value):
    return value if value is DELETE else json.dumps(value, ensure_ascii=False)[:120]


def key_changes(case, file, document, draw, seen):
    """Each key of one file, and pairs. `seen`: counts by key, so that what no case can tell is tried once."""
    singles = []

    def add(path, value):
        use = use_of(case, file, document, path)
        name = path[-1] if isinstance(path[-1], str) else str(path[0])
        singles.append((path, value, use == "neutral"))
        lenient = None
        if value is None:
            lenient = {file: changed(document, path, DELETE) if path[-1] in at(document, path[:-1]) else document}
        elif isinstance(value, int) and not isinstance(value, bool):
            lenient = {file: changed(document, path, float(value))}
        return Change(case, file, [name], f"{'.'.join(map(str, path))}={shown(value)}", {file: changed(document, path, value)}, use == "neutral",
                      lenient)

    made = []
    for path in paths_of(file, document):
        value = at(document, path)
        use = use_of(case, file, document, path)
        values = [DELETE, None, *legal_values(path, value), wrong_type(value)]
        if use == "neutral" or path[0] == "transformers_version":
            place = (file, part_of(case, file, document, path), path[-1])
            seen[place] = seen.get(place, 0) + 1
            values = [draw.choice(values)] if seen[place] == 1 else []
        made += [add(path, value) for value in values if value is not None or at(document, path) is not None]
    of = part_of(case, file, document, ("",))
    for (row_file, row_of, key), (use, accepted) in keys.rows.items():
        if row_file != file or key in document or key.startswith("*") or row_of not in (of, of.split(":")[0], "*", "do_sample"):
            continue
        if keys.find(file, of, key)[0] != use and row_of != "do_sample":
            continue
        place = (file, row_of, key, "absent")
        seen[place] = seen.get(place, 0) + 1
        if use == "used":
            made += [add((key,), value) for value in legal_values((key,), None)]
        elif use == "refused" and seen[place] <= 2:
            more = LEGAL.get(key, [True, 7])
            made += [add((key,), value) for value in ([*accepted[:1], *more] if seen[place] == 1 else [draw.choice(more)])]
        elif use == "neutral" and seen[place] == 1:
            made.append(add((key,), draw.choice([True, 3, "other", 0.5])))
    for value in (3, {"a": [1]}):
        made.append(add((f"unknown_{len(made)}_{case.name}",), value))
    for _ in range(len(made) // 10):
        (one, first, alike), (two, second, too) = draw.sample(singles, 2)
        if one[0] != two[0]:
            document_of_both = changed(changed(document, one, first), two, second)
            made.append(Change(case, file, [str(one[-1]), str(two[-1])], f"{'.'.join(map(str, one))}={shown(first)}, {'.'.join(map(str, two))}={shown(second)}",
                               {file: document_of_both}, alike and too))
    return made


HEADS = {"qwen2": ("model.embed_tokens.weight", "lm_head.weight"), "llama3": ("model.embed_tokens.weight", "lm_head.weight"),
         "gpt2": ("transformer.wte.weight", "lm_head.weight"), "bert_masked": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
         "roberta_masked": ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
         "xlm_roberta_masked": ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
         "distilbert_masked": ("distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight"),
         "modernbert_masked": ("model.embeddings.tok_embeddings.weight", "decoder.weight")}
BIASES = {"bert_masked": ("cls.predictions.bias", "cls.predictions.decoder.bias"), "roberta_masked": ("lm_head.bias", "lm_head.decoder.bias"),
          "xlm_roberta_masked": ("lm_head.bias", "lm_head.decoder.bias")}


def tensor_changes(case, file, tensors):
    def change(text, function, *names):
        return Change(case, file, names, text, {file: function})

    made = []
    for table, what in ((HEADS, "weight"), (BIASES, "bias")):
        if case.name not in table:
            continue
        own, copied = table[case.name]
        made += [
            change(f"{copied} as {own}", lambda all, a=own, b=copied: all.update({b: all[a].clone()}), copied),
            change(f"{copied} differs from {own}", lambda all, a=own, b=copied: all.update({b: all[a] * 0.5 + 0.1}), copied),
            change(f"{own} under the name {copied} only", lambda all, a=own, b=copied: all.update({b: all.pop(a)}), own, copied),
            change(f"no {own}", lambda all, a=own: all.pop(a), own, copied)]
        made.append(Change(case, file, [copied, "tie_word_embeddings"], f"{copied} differs, tie_word_embeddings=false",
                           {file: lambda all, a=own, b=copied: all.update({b: all[a] * 0.5 + 0.1}),
                            "config.json": lambda document: document | {"tie_word_embeddings": False}}))
    for name in sorted(tensors)[:: max(1, len(tensors) // 6)]:
        made.append(change(f"no {name}", lambda all, n=name: all.pop(n), name))
        made.append(change(f"{name} has another shape", lambda all, n=name: all.update({n: torch.ones(3, 5)}), name))
        made.append(change(f"{name} is half", lambda all, n=name: all.update({n: all[n].bfloat16()}), name))
        made.append(change(f"{name} is int", lambda all, n=name: all.update({n: (all[n] * 9).long()}), name))
        made.append(change(f"{name} is 0", lambda all, n=name: all.update({n: all[n] * 0}), name))
        if "LayerNorm" in name:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            made.append(change(f"{name} by its old name", lambda all, n=name, o=old: all.update({o: all.pop(n)}), name, old))
            made.append(change(f"{name} by both names", lambda all, n=name, o=old: all.update({o: all[n] * 3 + 1}), name, old))
    prefix = sorted(tensors)[len(tensors) // 2].split(".")[0] + "."
    if prefix != "base_model.":
        made.append(change("names without the prefix", lambda all: all.update(
            {name.removeprefix(prefix): all.pop(name) for name in list(all) if name.startswith(prefix)}), prefix))
    for name in ("foo.weight", "classifier.weight", "score.weight", "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq",
                 "bert.embeddings.position_ids", "bert.pooler.dense.weight", "transformer.h.0.attn.bias", "model.layers.7.mlp.up_proj.weight"):
        if name not in tensors and not any(name == copied for _, copied in HEADS.values() if case.name in HEADS):
            made.append(change(f"also {name}", lambda all, n=name: all.update({n: torch.ones(3, 5)}), name))
    return made


def adapter_tensor_changes(case, file, tensors):
    made = tensor_changes(case, file, tensors)
    for name in sorted(tensors)[:2]:
        other = name.replace("layers.0", "layers.9").replace("layer.0", "layer.9").replace("h.0", "h.9")
        if other != name:
            made.append(Change(case, file, [other, name], f"also {other}", {file: lambda all, n=name, o=other: all.update({o: all[n].clone()})}))
        made.append(Change(case, file, [name], f"{name} without its prefix", {file: lambda all, n=name: all.update({n.removeprefix("base_model.model."): all.pop(n)})}))
    return made


def file_changes(case, folder, draw, count):
    """Random combinations of a tokenizer's files, with values that contradict each other."""
    made = []
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    named = ["pad_token", "cls_token", "mask_token", "eos_token", "bos_token", "unk_token", "sep_token"]
    tokens = ["the", "<new1>", "new2", "[X]", "!"]
    for number in range(count):
        files, text = {}, []
        given = dict(config)
        if draw.random() < 0.5:
            given.pop("added_tokens_decoder", None)
        elif draw.random() < 0.5:
            given["added_tokens_decoder"] = {str(7000 - i): {"content": token, "special": draw.random() < 0.5, "lstrip": draw.random() < 0.5}
                                             for i, token in enumerate(draw.sample(tokens, 2))}
        if draw.random() < 0.6:
            given[draw.choice(named)] = draw.choice(tokens)
        if draw.random() < 0.4:
            given[draw.choice(["additional_special_tokens", "extra_special_tokens"])] = draw.sample(tokens, 2)
        if draw.random() < 0.3:
            given["add_prefix_space"] = draw.random() < 0.5
        files["tokenizer_config.json"] = given
        if draw.random() < 0.15:
            files["tokenizer_config.json"] = None
        files["special_tokens_map.json"] = None
        if draw.random() < 0.7:
            special = {name: draw.choice(tokens) for name in draw.sample(named, 2)}
            if draw.random() < 0.4:
                special["additional_special_tokens"] = draw.sample(tokens, 2)
            if draw.random() < 0.3:
                special[draw.choice(named)] = {"content": draw.choice(tokens), "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
            files["special_tokens_map.json"] = special
        files["added_tokens.json"] = {token: 5000 - i for i, token in enumerate(draw.sample(tokens, 2))} if draw.random() < 0.4 else None
        if draw.random() < 0.15 and (folder / "tokenizer.json").exists():
            files["config.json"] = {"model_type": draw.choice(["bert", "roberta", "gpt2", "qwen2", "modernbert", "llama"])}
        for file, value in files.items():
            text.append(f"{file}: " + ("none" if value is None else json.dumps({key: each for key, each in value.items() if config.get(key) != each})[:160]))
        made.append(Change(case, "which file wins", [name for name in files] + named + tokens + ["additional_special_tokens", "extra_special_tokens"],
                           f"{number}: " + "; ".join(text), files))
    return made


def changes_of(case, folder, draw, seen, wanted):
    made = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json" and not path.name.startswith("vocab"):
            if case.kind == "generate" and path.name == "config.json" and not getattr(case, "without", False):
                document = read_json(path)
                made += [Change(case, path.name, [key], f"{key}={value}", {path.name: document | {key: value}}, True)
                         for key, value in (("eos_token_id", 33), ("max_length", 5), ("repetition_penalty", 3.0), ("stop_strings", ["e"]))]
            elif case.kind == "encode" and path.name == "config.json":
                made += [Change(case, path.name, [key], f"{key}={value}", {path.name: read_json(path) | {key: value}})
                         for key, value in [("model_type", each) for each in ("bert", "gpt2", "qwen2", "llama", "modernbert")] + [
                             ("tokenizer_class", each) for each in ("BertTokenizer", "PreTrainedTokenizerFast", "XLMRobertaTokenizer")]]
            elif not (case.kind == "generate" and path.name.startswith("tokenizer")):
                made += key_changes(case, path.name, read_json(path), draw, seen)
        elif path.suffix == ".safetensors" and case.kind in ("logits", "adapter") and not getattr(case, "sharded", False):
            tensors = load_file(path)
            made += (adapter_tensor_changes if case.kind == "adapter" else tensor_changes)(case, path.name, tensors)
    if case.kind == "encode":
        made += file_changes(case, folder, draw, 12)
    return [each for each in made if wanted in each.file]


class Hasten:
    """The program that answers jobs. It logs a line once, so the lines of earlier jobs count."""

    def __init__(self, program):
        self.program, self.process, self.lines = program, None, []

    def ask(self, job):
        if self.process is None:
            self.process = subprocess.Popen([self.program, "--jobs"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, text=True, env={**reference.os.environ, "OMP_NUM_THREADS": "1"})
            self.lines = []
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        except (OSError, json.JSONDecodeError):
            code = self.process.poll()
            self.process.kill()
            self.process = None
            return {"error": f"CRASH: the program ended, exit code {code}"}
        self.lines += answer.get("log", [])
        return answer

    def result(self, case, folder):
        answers = []
        for job in case.jobs(folder):
            answers.append(self.ask(job(answers) if callable(job) else job))
            if "error" in answers[-1]:
                return {"error": answers[-1]["error"], "log": self.lines}
        return case.result(answers) | {"log": self.lines}


def equal(one, two):
    for key in one.keys() & two.keys() & {"logits", "ids", "types", "pairs", "pair_types", "texts"}:
        a, b = one[key], two[key]
        if key == "logits":
            if a.shape != b.shape or not bool(((a - b).abs().max() <= 1e-5 * max(1.0, a.abs().max().item()))):
                return key
        elif a != b:
            return key
    return ""


def verdict(change, theirs, ours):
    """Empty if hasten does as it must."""
    names = change.names
    mentions = lambda text: any(name.split(".")[-1] in text or name in text for name in names)  # noqa: E731
    log = "\n".join([*(line for line in ours.get("log", []) if "ignored" in line), *ours.get("report", [])])
    if "CRASH" in ours.get("error", ""):
        return "crash"
    if "error" in ours:
        # A change of a size makes other names of tensors wrong, which both say in their words.
        tensors = re.search(r"do(es)? not fit|larger than the folder's weights|occurs twice", ours["error"])
        if "error" in theirs or mentions(ours["error"]) or tensors:
            return ""
        return "the error does not name it"
    if "error" in theirs:
        return "" if change.neutral or mentions(log) else "accepted what the reference refuses"
    if "random" in theirs:
        return "" if theirs["random"] == "do_sample" or "random weights" in log or mentions(log) else "new weights without a word"
    different = equal(theirs, ours)
    return "" if not different or mentions(log) else f"other {different}"


def summary(result):
    if "error" in result or "random" in result:
        return result.get("error") or "random: " + result["random"]
    if "logits" in result:
        return "logits " + str([round(float(each), 5) for each in result["logits"].flatten()[:4]])
    return json.dumps({key: result[key] for key in ("ids", "texts") if key in result}, ensure_ascii=False)[:300]


def run(task):
    """The rows of one worker's cases: (kind of file, changed the reference, verdict, text)."""
    number, workers, options = task
    reference.quiet()
    hasten = Hasten(options.program) if options.program else None
    rows = []
    with tempfile.TemporaryDirectory() as work:
        pristine, copy_of = pathlib.Path(work) / "pristine", pathlib.Path(work) / "copy"
        changes, plain = [], {}
        draw, seen = random.Random(options.seed), {}
        for case in reference.cases():
            if options.cases not in case.name:
                continue
            folder = pristine / case.name
            pristine.mkdir(exist_ok=True)
            case.build(folder)
            changes += changes_of(case, folder, draw, seen, options.files)
        draw.shuffle(changes)
        changes = changes[: options.limit] if options.limit else changes
        for change in changes[number::workers]:
            case = change.case
            folder = pristine / case.name
            if case.name not in plain:
                plain[case.name] = case.reference(folder)
            shutil.rmtree(copy_of, ignore_errors=True)
            shutil.copytree(folder, copy_of)
            change.apply(copy_of)
            theirs = case.reference(copy_of)
            bites = "error" in theirs or "random" in theirs or bool(equal(plain[case.name], theirs))
            ours = hasten.result(case, copy_of) if hasten else {}
            wrong = verdict(change, theirs, ours) if hasten else ""
            if wrong and "error" in theirs and change.lenient:
                change.apply(copy_of, change.lenient)
                meant = case.reference(copy_of)
                wrong = verdict(change, meant, ours) and wrong
            text = ""
            if wrong:
                text = (f"{wrong} | {case.name} | {change.file} | {change.text}\n    reference: {summary(theirs)}\n    hasten: {summary(ours)}")
            rows.append((change.file, bites, wrong, text))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "build/release/bin/model_logits"))
    parser.add_argument("--cases", default="", help="part of a case's name")
    parser.add_argument("--files", default="", help="part of a file's name")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=pathlib.Path)
    parser.add_argument("--golden", type=pathlib.Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        rows = [row for part in pool.map(run, [(number, 2, options) for number in range(2)]) for row in part]
    failures = sorted(row for row in rows if row[2])
    lines = [f"{file}: {text}" for file, _, _, text in failures]
    failed = bool(failures)
    for file in sorted({row[0] for row in rows}):
        of_file = [row for row in rows if row[0] == file]
        bitten = sum(row[1] for row in of_file)
        wrong = sum(bool(row[2]) for row in of_file)
        lines.append(f"{file}: {len(of_file)} changes, {wrong} wrong; the reference's output changed for {bitten} ({bitten / len(of_file):.0%})")
        if bitten < LEAST * len(of_file) and not (options.limit or options.files or options.cases):
            lines.append(f"{file}: fewer than {LEAST:.0%} of the changes tell anything")
            failed = True
    (options.report.write_text("\n".join(lines) + "\n") if options.report else None)
    print("\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
