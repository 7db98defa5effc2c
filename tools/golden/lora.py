"""Writes tests/golden/lora.safetensors: logits and the losses of AdamW steps of small models with
LoRA, by PEFT. The weights, also those of the adapters, follow from a formula (families.py). The
metadata has each case's config.json and adapter_config.json.

Run: python tools/golden/lora.py   (needs torch, transformers, peft)
"""

import json

import families
import peft
import torch
import transformers
from safetensors.torch import save_file

FILE = families.FILE.with_name("lora.safetensors")
# name: case of families.py, options of LoraConfig
CASES = {
    "llama": ("llama", dict(r=4, lora_alpha=8, task_type="CAUSAL_LM")),
    "mistral": ("mistral", dict(r=4, lora_alpha=8, task_type="CAUSAL_LM")),
    "smollm3": ("smollm3", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")),
    "llama_classes": ("llama_classes", dict(r=3, lora_alpha=6, target_modules="all-linear",
                                            use_rslora=True, task_type="SEQ_CLS")),
    "gpt2": ("gpt2", dict(r=4, lora_alpha=16, target_modules=["c_attn", "mlp.c_proj"],
                          fan_in_fan_out=True, task_type="CAUSAL_LM")),
    "roberta": ("roberta", dict(r=2, lora_alpha=2, task_type="SEQ_CLS")),
    # The output layer and the word embeddings of qwen2 are tied.
    "tied_embeddings": ("qwen2", dict(r=2, lora_alpha=8, target_modules=["q_proj"],
                                      modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")),
    "tied_head": ("qwen2", dict(r=2, lora_alpha=8, target_modules=["q_proj"],
                                modules_to_save=["lm_head"], task_type="CAUSAL_LM")),
    "tied_lora_head": ("qwen2", dict(r=2, lora_alpha=8, target_modules=["q_proj", "lm_head"],
                                     task_type="CAUSAL_LM")),
    "lora_head": ("llama", dict(r=2, lora_alpha=8, target_modules=["q_proj", "lm_head"],
                                task_type="CAUSAL_LM")),
    "patterns": ("llama", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"],
                               rank_pattern={"layers.1.self_attn.q_proj": 3, "v_pro.": 1},
                               alpha_pattern={"down_proj|v_proj": 5}, exclude_modules=["0.mlp.down_proj"],
                               task_type="CAUSAL_LM")),
    "layers": ("roberta", dict(r=2, lora_alpha=4, target_modules=["query", "value", "layer.0.output.dense"],
                               layers_to_transform=1, bias="lora_only",
                               task_type="SEQ_CLS")),
    "all_biases": ("roberta", dict(r=2, lora_alpha=4, target_modules=["query"], layers_to_transform=[0],
                                   bias="all", task_type="SEQ_CLS")),
    "tied_lora_embeddings": ("qwen2", dict(r=2, lora_alpha=8, target_modules=["q_proj", "embed_tokens"],
                                           task_type="CAUSAL_LM")),
    "tied_dora": ("qwen2", dict(r=2, lora_alpha=8, target_modules=["q_proj", "embed_tokens", "lm_head"],
                                use_dora=True, use_rslora=True, task_type="CAUSAL_LM")),
    "tied_scaled_embeddings": ("gemma2", dict(r=2, lora_alpha=8, target_modules=["o_proj", "embed_tokens"],
                                              task_type="CAUSAL_LM")),
    "fused": ("phi3", dict(r=2, lora_alpha=8, target_modules=["qkv_proj", "gate_up_proj"], use_dora=True,
                           task_type="CAUSAL_LM")),
    "dora_gpt2": ("gpt2", dict(r=2, lora_alpha=8, target_modules=["c_attn", "wpe"], use_dora=True,
                               fan_in_fan_out=True, task_type="CAUSAL_LM")),
}


def plain(name):
    """A parameter's name without what PEFT adds."""
    for part in ("base_model.model.", ".default", ".base_layer", ".modules_to_save", ".original_module"):
        name = name.replace(part, "")
    return name + ".weight" if "lora_embedding_" in name else name  # a parameter in PEFT


def make(name):
    case, options = CASES[name]
    model_type, task, settings = families.CASES[case]
    base = families.make(model_type, task, settings)
    config = base.config.to_diff_dict() | {
        "model_type": model_type, "architectures": [type(base).__name__]}
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_" in path:
                values = families.bits(plain(path), parameter.numel()) / 2**32 - 0.5
                values = values * 0.2 + 1 if parameter.dim() == 1 else values
                parameter.copy_(torch.tensor(values).float().view_as(parameter))
    return model, task, config


def main():
    torch.set_num_threads(1)
    golden, metadata = {}, {}
    for name in CASES:
        model, task, config = make(name)
        adapter = model.peft_config["default"].to_dict()
        adapter = {key: sorted(value) if isinstance(value, set) else value
                   for key, value in adapter.items()}
        metadata[name] = json.dumps({"config": config, "adapter": adapter}, default=str)
        first = families.batch(0, families.BATCHES[0], model.config, task)
        model.eval()
        with torch.no_grad():
            golden[name + ".logits"] = model(
                input_ids=first["input_ids"], attention_mask=first["attention_mask"]).logits
        model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        trainable, every = model.get_nb_trainable_parameters()
        unused = [parameter.numel() for path, parameter in model.named_parameters()
                  if parameter.requires_grad and ".original_module." in path]  # with bias="all"
        golden[name + ".trainable"] = torch.tensor([trainable - sum(unused), every])
        optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01)
        losses = []
        for number, lengths in enumerate(families.BATCHES[1:6], 1):
            loss = model(**families.batch(number, lengths, model.config, task)).loss
            losses.append(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        golden[name + ".losses"] = torch.stack(losses)
        print(name, [round(float(loss), 4) for loss in losses])
    metadata["made_with"] = (f"torch {torch.__version__}, transformers {transformers.__version__}, "
                             f"peft {peft.__version__}")
    save_file(golden, FILE, metadata)
    print(FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
