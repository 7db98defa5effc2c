"""Folders of small models, adapters and tokenizers, and what transformers and PEFT make of them.

A case is a folder that save_pretrained wrote, perhaps as older releases wrote it. `reference(folder)`
is what the library makes of that folder or of a changed copy: {"logits"} or {"ids", …}; {"random"} if
it draws weights or tokens; {"error"} if it raises. `jobs(folder)` asks hasten for the same
(benchmarks/model_logits.cpp, --jobs). Needs torch, transformers, peft.
"""

import contextlib
import io
import json
import os
import pathlib
import resource
import shutil
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RUST_BACKTRACE"] = "0"

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import families  # noqa: E402
import lora  # noqa: E402
import tokenizers_golden  # noqa: E402

TOKENIZERS = families.FILE.parent / "tokenizers"
PROMPTS = [[9, 10, 11], [30, 12, 13, 14, 15], [20]]
NEW = 12  # tokens
LARGEST = 2 * 10**7  # numbers of a model that is loaded
TASK_TYPES = {"CausalLM": "CAUSAL_LM", "SequenceClassification": "SEQ_CLS", "TokenClassification": "TOKEN_CLS"}


def quiet():
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (2 * 10**9, 2 * 10**9))
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def outcome(compute):
    """compute(), or the error."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), torch.no_grad():
            torch.manual_seed(0)
            return compute()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001: whatever the library raises, panics of tokenizers, too
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def equal(one, two):
    """Empty, or in what two results differ."""
    for key in ("logits", "ids", "types", "pairs", "pair_types", "texts"):
        if key not in one or key not in two:
            continue
        a, b = one[key], two[key]
        if key == "logits":
            if a.shape != b.shape or not bool(((a - b).abs().max() <= 1e-5 * max(1.0, a.abs().max().item()))):
                return key
        elif a != b:
            return key
    return ""


class Model:
    """A model of families.py. sharded: in several files with an index."""

    kind = "logits"

    def __init__(self, name, sharded=False):
        self.name, self.sharded = name + "_sharded" * sharded, sharded
        self.model = name
        self.model_type, self.task, self.options = families.CASES[name]
        self.of = self.config_of = f"{self.model_type}:{self.task}"

    def build(self, folder):
        model = families.make(self.model_type, self.task, self.options)
        model.save_pretrained(folder, **({"max_shard_size": "4KB"} if self.sharded else {}))
        inputs = families.batch(0, families.BATCHES[0], model.config, self.task)
        del inputs["labels"]
        self.inputs = inputs
        self.inputs_file = folder.with_name(folder.name + ".inputs.safetensors")
        save_file(inputs, self.inputs_file)

    def selected(self, logits):
        """Of tokens, not of padding."""
        return logits[self.inputs["attention_mask"].bool()] if logits.dim() == 3 else logits

    def load(self, folder):
        kind = getattr(transformers, f"AutoModelFor{self.task}")
        with torch.device("meta"):  # an absent size may be that of a model of billions
            numbers = sum(each.numel() for each in kind.from_config(transformers.AutoConfig.from_pretrained(folder)).parameters())
        if numbers > LARGEST:
            raise ValueError(f"a model of {numbers} numbers")
        return kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)

    def reference(self, folder):
        def compute():
            model, info = self.load(folder)
            if info["missing_keys"]:
                return {"random": f"missing: {sorted(info['missing_keys'])[:4]}"}
            output = model.eval()(**self.inputs)
            return {"logits": self.selected(output[0] if isinstance(output, tuple) else output.logits)}

        return outcome(compute)

    def jobs(self, folder, saved=None):
        self.output_file = folder.with_name(folder.name + ".logits.safetensors")
        return [{"do": "logits", "model": str(folder), "task": self.task, "inputs": str(self.inputs_file),
                 "output": str(self.output_file), "save": saved and str(saved)}]

    def result(self, answers):
        return {"logits": self.selected(load_file(self.output_file)["logits"]), "report": answers[0].get("report", [])}


class Adapter(Model):
    """A case of lora.py, or (case of families.py, options of LoraConfig)."""

    kind = "adapter"

    def __init__(self, name, case=None, options=None):
        case, options = lora.CASES[name] if case is None else (case, options)
        super().__init__(case)
        self.name, self.lora_options, self.of = "adapter_" + name, options, "*"

    def build(self, folder):
        base = folder.with_name(folder.name + ".base")
        super().build(base)
        self.inputs_file = base.with_name(base.name + ".inputs.safetensors")
        model = families.make(self.model_type, self.task, self.options)
        options = dict(task_type=TASK_TYPES.get(self.task)) | self.lora_options
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
        with torch.no_grad():
            for path, parameter in model.named_parameters(remove_duplicate=False):
                if "lora_" in path or "modules_to_save" in path:
                    values = families.bits("adapter." + lora.plain(path), parameter.numel()) / 2**32 - 0.5
                    parameter.copy_(torch.tensor(values).float().view_as(parameter))
        model.peft_config["default"].base_model_name_or_path = str(base)
        model.save_pretrained(folder)
        self.base = base

    def reference(self, folder):
        def compute():
            model, _ = super(Adapter, self).load(self.base)
            model = peft.PeftModel.from_pretrained(model, folder)
            return {"logits": self.selected(model.eval()(**self.inputs).logits)}

        return outcome(compute)


class Generation:
    """What a decoder of families.py answers, with these settings in generation_config.json."""

    kind = "generate"

    def __init__(self, name, settings, case="llama", without=False, config=None, tokenizer=None):
        self.name, self.settings, self.case, self.of = "generate_" + name, settings, case, "*"
        self.without, self.config, self.tokenizer = without, config or {}, tokenizer
        self.config_of = families.CASES[case][0] + ":CausalLM"

    def build(self, folder):
        families.make(*families.CASES[self.case]).save_pretrained(folder)
        write_json(folder / "generation_config.json", self.settings)
        if self.without:
            (folder / "generation_config.json").unlink()
        write_json(folder / "config.json", read_json(folder / "config.json") | self.config)
        if self.tokenizer:
            shutil.copy(TOKENIZERS / f"{self.tokenizer}.json", folder / "tokenizer.json")
            write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})

    def new_tokens(self, folder):
        """None if the folder says how many."""
        for name in ("generation_config.json", "config.json"):
            with contextlib.suppress(Exception):
                found = read_json(folder / name)
                return None if found.get("max_length") is not None or found.get("max_new_tokens") is not None else NEW
        return NEW

    def reference(self, folder):
        def compute():
            model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
            if info["missing_keys"]:
                return {"random": f"missing: {sorted(info['missing_keys'])}"}
            model.eval()
            config, more = model.generation_config, {}
            if config.do_sample and config.top_k != 1 and config.top_p != 0:
                model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=1)
                return {"random": "do_sample"}
            if self.tokenizer:
                more["tokenizer"] = transformers.AutoTokenizer.from_pretrained(folder)
            if self.new_tokens(folder):
                more["max_new_tokens"] = NEW
            ids = []
            for prompt in PROMPTS:
                prompt = torch.tensor([prompt])
                made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **more)
                made = made if torch.is_tensor(made) else made.sequences
                ids.append(made[0, prompt.size(1):].tolist())
            return {"ids": ids}

        return outcome(compute)

    def jobs(self, folder, saved=None):
        return [{"do": "generate", "model": str(folder), "prompts": PROMPTS, "max_new_tokens": self.new_tokens(folder),
                 "tokenizer": str(folder) if self.tokenizer else None}]

    def result(self, answers):
        return {"ids": answers[0]["ids"]}


TEXTS = ["Hello World, isn't it Öl good? <mask> 你好 <new1> new2 [X]", " leading, trailing ", "two  spaces\tand\nlines the the",
         "[CLS] x </s> <|endoftext|>y [MASK]<s>", "É\u0301 \u200bＡｂｃ x² ½ straße", "xxxxxxxxxxxxxxxxxxxxxxxxxx 3.14 don't new1"]
TEXTS += [tokenizers_golden.text_of(number) for number in (3, 17, 29, 41)]


class Tokenizer:
    """A tokenizer of tests/golden/tokenizers in a folder. style: "5" as transformers 5 saves it; "4" as
    older releases did; "legacy" with added_tokens.json; "files" with the vocabulary alone."""

    kind = "encode"

    def __init__(self, name, tokenizer_class, style="5", model_type=None):
        self.name = f"tokenizer_{name}_{tokenizer_class or model_type}_{style}"
        self.source, self.style, self.model_type = name, style, model_type
        self.tokenizer_class, self.config_of = tokenizer_class, "*"
        self.of = {"DistilBertTokenizer": "BertTokenizer", "PreTrainedTokenizer": "TokenizersBackend"}.get(
            (tokenizer_class or "").removesuffix("Fast"), (tokenizer_class or "").removesuffix("Fast") or "TokenizersBackend")

    def build(self, folder):
        folder.mkdir(parents=True)
        described = read_json(TOKENIZERS / f"{self.source}.json")
        write_json(folder / "tokenizer.json", described)
        given = {"tokenizer_class": self.tokenizer_class} if self.tokenizer_class else {}
        if "bert" in self.source and "modern" not in self.source and "cased" in self.source:
            given["do_lower_case"] = False
        write_json(folder / "tokenizer_config.json", given)
        if self.model_type:
            write_json(folder / "config.json", {"model_type": self.model_type})
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.save_pretrained(folder)
        shutil.copy(TOKENIZERS / f"{self.source}.json", folder / "tokenizer.json")
        config = read_json(folder / "tokenizer_config.json")
        if not self.tokenizer_class:
            (folder / "tokenizer_config.json").unlink()
            return
        config["tokenizer_class"] = self.tokenizer_class
        named = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
        tokens = {token["id"]: {key: value for key, value in token.items() if key != "id"} for token in described["added_tokens"]}
        if self.style == "4":
            config["added_tokens_decoder"] = {str(number): token for number, token in tokens.items()}
            config["additional_special_tokens"] = []
            write_json(folder / "special_tokens_map.json", named)
        elif self.style == "legacy":
            write_json(folder / "special_tokens_map.json", named | {"additional_special_tokens": ["<new1>"]})
            free = 1 + max([*tokens, *(described["model"]["vocab"].values() if isinstance(described["model"]["vocab"], dict) else [0]),
                            len(described["model"]["vocab"]) - 1])
            write_json(folder / "added_tokens.json", {"new2": free, "[X]": free + 1})
        elif self.style == "files":
            (folder / "tokenizer.json").unlink()
            vocab = described["model"]["vocab"]
            if described["model"]["type"] == "WordPiece":
                pieces = sorted(vocab, key=vocab.get)
                (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
            else:
                write_json(folder / "vocab.json", vocab)
                merges = [" ".join(each) if isinstance(each, list) else each for each in described["model"]["merges"]]
                (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
        write_json(folder / "tokenizer_config.json", config)

    def reference(self, folder):
        def compute():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            alone = tokenizer(TEXTS, return_token_type_ids=True)
            both = tokenizer(TEXTS, TEXTS[1:] + TEXTS[:1], return_token_type_ids=True)
            ids = alone["input_ids"]
            return {"ids": ids, "types": alone["token_type_ids"], "pairs": both["input_ids"], "pair_types": both["token_type_ids"],
                    "texts": [tokenizer.decode(each) for each in ids]}

        return outcome(compute)

    def jobs(self, folder, saved=None):
        encode = {"do": "encode", "tokenizer": str(folder), "texts": TEXTS}
        return [encode | {"pairs": None}, encode | {"pairs": TEXTS[1:] + TEXTS[:1]},
                lambda answers: {"do": "decode", "tokenizer": str(folder), "ids": answers[0]["ids"]}]

    def result(self, answers):
        alone, both, texts = answers
        return {"ids": alone["ids"], "types": alone["type_ids"], "pairs": both["ids"], "pair_types": both["type_ids"],
                "texts": texts["texts"]}


def cases():
    # The texts are longer than llama_dynamic's max_position_embeddings.
    made = [Model(name) for name in families.CASES if name != "llama_dynamic"] + [Model("llama3", sharded=True), Model("bert_masked", sharded=True)]
    made += [Adapter(name) for name in lora.CASES]
    attention = dict(r=2, lora_alpha=4, target_modules=["q_proj"])
    for name, case, options in [
            ("tied_embeddings", "qwen2", attention | dict(modules_to_save=["embed_tokens"])),
            ("tied_head", "qwen2", attention | dict(modules_to_save=["lm_head"])),
            ("tied_both", "qwen2", attention | dict(modules_to_save=["embed_tokens", "lm_head"])),
            ("tied_wte", "gpt2", dict(r=2, lora_alpha=4, target_modules=["c_attn"], modules_to_save=["wte"], fan_in_fan_out=True)),
            ("head", "llama", dict(r=2, lora_alpha=4, target_modules=["q_proj", "lm_head"])),
            ("tied_lora_head", "qwen2", dict(r=2, lora_alpha=4, target_modules=["q_proj", "lm_head"])),
            ("head_saved", "llama", attention | dict(modules_to_save=["lm_head", "norm"])),
            ("embeddings_saved", "llama", attention | dict(modules_to_save=["embed_tokens"])),
            ("one_layer", "llama", attention | dict(layers_to_transform=[1])),
            ("pattern", "llama", dict(r=2, lora_alpha=4, target_modules=r".*layers\.1.*(q|v)_proj")),
            ("tokens", "bert_tokens", dict(r=2, lora_alpha=4, target_modules=["query", "value"])),
            ("masked", "bert_masked", dict(r=2, lora_alpha=4, target_modules=["query"], modules_to_save=["word_embeddings"]))]:
        made.append(Adapter(name, case, options))
    made += [Generation("plain", {"eos_token_id": 2, "do_sample": False}),
             Generation("full", {"eos_token_id": [5, 2], "max_new_tokens": 9, "do_sample": False, "repetition_penalty": 1.2, "temperature": 1.0,
                                 "top_k": 50, "top_p": 1.0, "pad_token_id": 0, "bos_token_id": 1, "use_cache": True}, "qwen3"),
             Generation("sampled", {"eos_token_id": 2, "do_sample": True, "top_k": 1, "temperature": 0.6, "top_p": 0.9, "max_length": 10}, "llama3"),
             Generation("without", {}, "gpt2", without=True, config={"eos_token_id": 44, "max_length": 9, "repetition_penalty": 1.1}),
             Generation("strings", {"max_new_tokens": 10, "eos_token_id": 2}, "llama", tokenizer="gpt2")]
    fast = "PreTrainedTokenizerFast"
    for name, tokenizer_class, style, model_type in [
            ("bert", "BertTokenizer", "5", None), ("bert_cased", "BertTokenizer", "4", "bert"), ("bert_cased", fast, "4", "bert"),
            ("bert", "DistilBertTokenizerFast", "legacy", "distilbert"), ("bert", "BertTokenizer", "files", None), ("bert", None, "5", "bert"),
            ("roberta", "RobertaTokenizer", "5", None), ("roberta", "RobertaTokenizerFast", "4", "roberta"),
            ("roberta", "RobertaTokenizer", "files", "roberta"), ("gpt2", "GPT2Tokenizer", "5", None), ("gpt2", "GPT2TokenizerFast", "4", "gpt2"),
            ("gpt2", "GPT2Tokenizer", "legacy", None), ("roberta", "RobertaTokenizer", "legacy", None), ("mistral", fast, "legacy", None), ("gpt2", "GPT2Tokenizer", "files", None), ("gpt2_prefix", fast, "5", None),
            ("modernbert", fast, "4", "modernbert"), ("llama3", fast, "4", "llama"), ("qwen", "Qwen2Tokenizer", "4", "qwen2"),
            ("qwen", fast, "5", "qwen3"), ("llama2", "LlamaTokenizer", "4", "llama"), ("mistral", "LlamaTokenizerFast", "5", None),
            ("llama2", fast, "5", "llama"), ("xlm_roberta", "XLMRobertaTokenizer", "5", "xlm-roberta"), ("xlm_roberta", fast, "4", None),
            ("other_unigram", fast, "5", None), ("other_bpe", fast, "5", None), ("other_word_piece", fast, "5", None)]:
        made.append(Tokenizer(name, tokenizer_class, style, model_type))
    return made
