"""The changes that tools/check_keys.py makes to the files of a folder, and what hasten may make of them."""

import copy
import json
import re

import keys
from reference import Model, load_file, read_json, save_file, torch, write_json

REPEATS = 2  # cases of one family or class in which a change of one key is tried
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
    "task_type": ["SEQ_CLS", "NO"], "bias": ["none", "all"], "rank_pattern": [{}, {"q_proj": 1}], "alpha_pattern": [{}, {"q_proj": 9}], "use_dora": [True],
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
        return case.config_of
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
    if file == "config.json" and case.kind == "logits" and path[0] in ("eos_token_id", "sinusoidal_pos_embds"):
        return "neutral"  # generate() reads it, and what makes new weights
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
        self.step = None  # (path, value) of a change of one key
        self.strict = False  # the reference uses it, so naming it is not enough

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


class Tensors:
    """Changes tensors: name = from * scale + shift; with scale=None the name is dropped."""

    def __init__(self, *steps):
        self.steps = steps

    def __call__(self, tensors):
        for name, source, scale, shift in self.steps:
            if scale is None:
                tensors.pop(name)
            else:
                tensors[name] = tensors[source] * scale + shift


def words(value):
    """The names and texts in a value, by which an error may name it."""
    if isinstance(value, dict):
        return [word for pair in value.items() for each in pair for word in words(each)]
    if isinstance(value, list):
        return [word for each in value for word in words(each)]
    return [value] if isinstance(value, str) and len(value) > 3 and value not in (DELETE, "AddedToken", *NEW_TOKEN) else []


def other_names(file, path):
    """What else may be named: of a change of an added token another one, whose id became wrong."""
    if file == "added_tokens.json" or path[0] in ("added_tokens", "added_tokens_decoder"):
        return ["the added token"]
    return [path[0]] if file == "tokenizer.json" else []


def shown(value):
    return value if value is DELETE else json.dumps(value, ensure_ascii=False)[:120]


REBUILT = ["normalizer", "pre_tokenizer", "decoder"]  # by tokenizers of these classes, so hasten does not read them
REBUILT_TOO = {each: ["post_processor"] for each in ("BertTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer")}


def meant(case, file, document, base, path, value, use):
    """`base` with the change as hasten may read it where the reference raises: null as no key, a whole
    number as a number, without what is neutral, with what tokenizers requires and hasten has a default for."""
    absent = value is None or value is DELETE
    if file == "tokenizer.json":
        rebuilt = getattr(case, "of", "") in keys.CLASSES and (
            path[0] in REBUILT + REBUILT_TOO.get(case.of, []) or path[0] == "model" and path[-1] not in ("vocab", "merges", "model"))
        return base if rebuilt or absent else changed(base, path, value)
    if use == "neutral":
        return base
    if value is None:
        return changed(base, path, DELETE) if path[-1] in at(base, path[:-1]) else base
    whole = isinstance(value, int) and re.search("penalty|eps|drop|theta|factor|temperature|top_p|range|alpha", path[-1])
    return changed(base, path, float(value) if whole else value)


def key_changes(case, file, document, draw, seen):
    """Each key of one file, and pairs. `seen`: counts by key, so that what no case shows is tried once."""
    singles = []

    def add(path, value):
        use = use_of(case, file, document, path)
        names = [path[-1] if isinstance(path[-1], str) else str(path[0]), *words(value), *other_names(file, path)]
        made = Change(case, file, names, f"{'.'.join(map(str, path))}={shown(value)}", {file: changed(document, path, value)}, use == "neutral",
                      {file: meant(case, file, document, document, path, value, use)})
        made.step = (path, value)
        singles.append(made)
        return made

    made = []
    for path in paths_of(file, document):
        value = at(document, path)
        use = use_of(case, file, document, path)
        values = [DELETE, None, *legal_values(path, value), wrong_type(value)]
        if file == "special_tokens_map.json":
            values = [None, *[token for token in TOKENS if token != value], wrong_type(value)]
            if case.style == "4":  # not read beside added_tokens_decoder
                values = [draw.choice(values)] if draw.random() < 0.2 else []
        if use == "neutral" or path[0] == "transformers_version":
            place = (file, part_of(case, file, document, path), path[-1])
            seen[place] = seen.get(place, 0) + 1
            values = [draw.choice(values)] if seen[place] == 1 else []
        for value in values:
            general = tuple("#" if isinstance(step, int) or step.isdigit() else step for step in path)
            place = (file, part_of(case, file, document, path), general, shown(value))
            seen[place] = seen.get(place, 0) + 1
            if seen[place] <= REPEATS * (2 if case.kind == "adapter" else 1) and (value is not None or at(document, path) is not None):
                made.append(add(path, value))
    of = part_of(case, file, document, ("",))
    for (row_file, row_of, key), (use, accepted) in keys.rows.items():
        if row_file != file or key in document or key.startswith("*") or row_of not in (of, of.split(":")[0], "*", "do_sample"):
            continue
        if keys.find(file, of, key)[0] != use and row_of != "do_sample":
            continue
        place = (file, row_of, key, "absent")
        seen[place] = seen.get(place, 0) + 1
        if use == "used" and seen[place] <= REPEATS:
            made += [add((key,), value) for value in legal_values((key,), None)]
        elif use == "refused" and seen[place] <= 2:
            more = LEGAL.get(key, [True, 7])
            made += [add((key,), value) for value in ([*accepted[:1], *more] if seen[place] == 1 else [draw.choice(more)])]
        elif use == "neutral" and seen[place] == 1:
            made.append(add((key,), draw.choice([True, 3, "other", 0.5])))
    for value in (3, {"a": [1]}):
        made.append(add((f"unknown_{len(made)}_{case.name}",), value))
    for _ in range(len(made) // 10):
        one, two = draw.sample(singles, 2)
        (first, value), (second, other) = one.step, two.step
        if first[0] == second[0]:
            continue
        lenient = meant(case, file, document, document, first, value, "neutral" if one.neutral else "")
        made.append(Change(case, file, one.names + two.names, f"{one.text}, {two.text}",
                           {file: changed(changed(document, first, value), second, other)}, one.neutral and two.neutral,
                           {file: meant(case, file, document, lenient, second, other, "neutral" if two.neutral else "")}))
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
        other = Tensors((copied, own, 0.5, 0.1))
        made += [change(f"{copied} as {own}", Tensors((copied, own, 1, 0)), copied),
                 change(f"{copied} differs from {own}", other, copied),
                 change(f"{own} under the name {copied} only", Tensors((copied, own, 1, 0), (own, "", None, 0)), own, copied),
                 change(f"no {own}", Tensors((own, "", None, 0)), own),
                 Change(case, file, [copied, "tie_word_embeddings"], f"{copied} differs, tie_word_embeddings=false",
                        {file: other, "config.json": lambda document: document | {"tie_word_embeddings": False}})]
        for each in made:
            each.strict = True
    for name in sorted(tensors)[:: max(1, len(tensors) // 6)]:
        made.append(change(f"no {name}", Tensors((name, "", None, 0)), name))
        made.append(change(f"{name} has another shape", lambda all, n=name: all.update({n: torch.ones(3, 5)}), name))
        made.append(change(f"{name} is half", lambda all, n=name: all.update({n: all[n].bfloat16()}), name))
        made.append(change(f"{name} is int", lambda all, n=name: all.update({n: (all[n] * 9).long()}), name))
        made.append(change(f"{name} is 0", Tensors((name, name, 0, 0)), name))
        if "LayerNorm" in name:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            made.append(change(f"{name} by its old name", Tensors((old, name, 1, 0), (name, "", None, 0)), name, old))
            made.append(change(f"{name} by both names", Tensors((old, name, 3, 1)), name, old))
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
        names = [*files, *(word for value in files.values() for word in words(value) if word not in config and word not in config.values())]
        made.append(Change(case, "which file wins", names,
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
                made += [Change(case, path.name, [key, "tokenizer_class"], f"{key}={value}", {path.name: read_json(path) | {key: value}})
                         for key, value in [("model_type", each) for each in ("bert", "gpt2", "qwen2", "llama", "modernbert")] + [
                             ("tokenizer_class", each) for each in ("BertTokenizer", "PreTrainedTokenizerFast", "XLMRobertaTokenizer")]]
            elif not (case.kind == "generate" and path.name.startswith("tokenizer")) and not (
                    case.kind == "logits" and path.name == "generation_config.json"):
                made += key_changes(case, path.name, read_json(path), draw, seen)
        elif path.suffix == ".safetensors" and case.kind in ("logits", "adapter") and not getattr(case, "sharded", False):
            tensors = load_file(path)
            made += (adapter_tensor_changes if case.kind == "adapter" else tensor_changes)(case, path.name, tensors)
    if case.kind == "encode":
        made += file_changes(case, folder, draw, 12)
    return [each for each in made if wanted in each.file]
