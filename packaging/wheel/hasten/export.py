"""Exports a model of transformers once, so that hasten trains it without Python.

    hasten export --model microsoft/deberta-v3-small --task text-classification --output-dir deberta
    hasten train --model deberta --train-file reviews.csv --output-dir out

`python -m hasten.export` is the same command. The folder has what a model's folder of transformers has,
and model.pt2, the graph of its logits, without weights. Needs torch and transformers. The format is
that of the torch that runs: do not use a newer one than hasten's.
"""

import argparse
import inspect
import pathlib
import re
import shutil
import sys

TASKS = {
    "text-classification": "SequenceClassification",
    "token-classification": "TokenClassification",
    "fill-mask": "MaskedLM",
    "text-generation": "CausalLM",
    "image-classification": "ImageClassification",
}
# Their flags are those of the mode, so they are no difference between two graphs.
FOLLOW_MODE = ("dropout", "batch_norm", "scaled_dot_product_attention")


def fail(text):
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def cure(model, pad_token_id):
    """Changes what an export cannot take, and says so. Nothing of it changes a result of training."""
    said = []
    config = model.config
    for module in model.modules():
        part = getattr(module, "config", None)
        if getattr(part, "use_cache", False):
            part.use_cache = False
            said.append("use_cache=False (a graph returns no cache)")
        for name, why in (("layerdrop", "the graph has every layer"), ("apply_spec_augment", "the graph masks nothing")):
            if getattr(part, name, 0):
                setattr(part, name, type(getattr(part, name))(0))
                said.append(f"{name}={getattr(part, name)} ({why})")
    if getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0):
        model.set_experts_implementation("batched_mm")
        said.append("experts_implementation=batched_mm (the others loop over data)")
    if getattr(config, "pad_token_id", None) is None and pad_token_id is not None:
        config.pad_token_id = pad_token_id
        said.append(f"pad_token_id={pad_token_id} (the tokenizer's)")
    return list(dict.fromkeys(said))


def example_inputs(model, task, tokenizer):
    """Inputs by name, and their sizes that may change."""
    import torch
    from torch.export import Dim

    takes = inspect.signature(model.forward).parameters
    if task == "image-classification":
        config = model.config
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {"pixel_values": torch.ones(3, getattr(config, "num_channels", 3), height, width)}, {"pixel_values": {0: Dim.DYNAMIC}}
    names = [n for n in ("input_ids", "attention_mask", "token_type_ids") if n in [*tokenizer.model_input_names, "input_ids"] and n in takes]
    if task == "text-generation":  # transformers keeps the texts of a row apart by their positions, if there is no mask
        names = [n for n in ("input_ids", "position_ids") if n in takes]
    example = {name: torch.ones(3, 17, dtype=torch.long) for name in names}
    if "position_ids" in example:
        example["position_ids"] = torch.arange(17).repeat(3, 1)
    return example, {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in names}


def calls(program):
    """What a graph calls, with its arguments."""
    return [
        (str(node.target), "" if any(name in str(node.target) for name in FOLLOW_MODE) else str((node.args, node.kwargs)))
        for node in program.graph.nodes
        if node.op == "call_function"
    ]


def blocks(program):
    """The numbered submodules: "deberta.encoder.layer.0"."""
    found = {}
    for node in program.graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            if re.search(r"\.\d+$", path):
                found[path] = True
                break
    return list(found)


def write(programs, path):
    """The programs without values of their weights, which model.safetensors has."""
    import torch
    from torch.export.pt2_archive._package import package_pt2

    for program in programs.values():
        program._example_inputs = None
        for module in program.graph_module.modules():
            for node in getattr(module, "graph", program.graph).nodes:
                trace = node.meta.get("stack_trace", "")
                lines = [line for line in trace.splitlines() if line.strip().startswith("File ")]
                if lines:  # the innermost line of the model, for messages of errors
                    own = [line for line in lines if "/torch/" not in line] or lines
                    node.meta["stack_trace"] = own[-1].strip()
    whole = str(path) + ".tmp.pt2"
    package_pt2(whole, exported_programs=programs)
    reader, writer = torch._C.PyTorchFileReader(whole), torch._C.PyTorchFileWriter(str(path))
    for record in reader.get_all_records():
        if not record.startswith((".data/", "data/sample_inputs/")) and record != "byteorder":
            values = record.startswith("data/weights/") and not record.endswith(".json")
            data = b"" if values else reader.get_record(record)
            writer.write_record(record, data, len(data))
    writer.write_end_of_file()
    pathlib.Path(whole).unlink()


def arguments_of(arguments):
    parser = argparse.ArgumentParser(prog="hasten export", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--num-labels", type=int, help="labels of a new head; default: the model's")
    parser.add_argument("--from-config", action="store_true", help="random weights, of the configuration alone")
    parser.add_argument("--seed", type=int, default=42, help="of the random weights")
    parser.add_argument("--output-dir", required=True, type=pathlib.Path, help="a folder that does not exist, or is empty")
    return parser.parse_args(arguments)


def load(flags):
    import torch
    import transformers

    options = {"num_labels": flags.num_labels} if flags.num_labels else {}
    auto = getattr(transformers, f"AutoModelFor{TASKS[flags.task]}")
    torch.manual_seed(flags.seed)
    if flags.from_config:
        config = transformers.AutoConfig.from_pretrained(flags.model, **options)
        model = auto.from_config(config, torch_dtype=torch.float32)
    else:
        model = auto.from_pretrained(flags.model, torch_dtype=torch.float32, ignore_mismatched_sizes=True, **options)
    image = flags.task == "image-classification"
    return model, None if image else transformers.AutoTokenizer.from_pretrained(flags.model)


def save(model, tokenizer, flags):
    """What a folder of transformers has."""
    from transformers.utils import cached_file

    flags.output_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(flags.output_dir, save_original_format=False)  # names as in the graph
    if tokenizer is not None:
        return tokenizer.save_pretrained(flags.output_dir)
    found = cached_file(flags.model, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
    if found:
        shutil.copy(found, flags.output_dir)


def main(arguments=None):
    flags = arguments_of(arguments)
    if flags.output_dir.exists() and any(flags.output_dir.iterdir()):
        fail(f"{flags.output_dir} is not empty")
    try:
        import torch
        import transformers
    except ImportError as error:
        fail(f"{error.name} is missing. Run: {sys.executable} -m pip install torch transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, tokenizer = load(flags)
    except (OSError, ValueError) as error:  # transformers' words: no such model, no class for the task
        fail(f"{str(error).splitlines()[0]}")
    cures = cure(model, getattr(tokenizer, "pad_token_id", None))
    example, free = example_inputs(model, flags.task, tokenizer)

    def export(mode):
        return torch.export.export(model.train(mode), (), example, dynamic_shapes=free, strict=False)

    try:
        train, evaluation = export(True), export(False)
    except Exception as error:  # whatever the model's code raises
        fail(f"torch.export cannot export {model.config.model_type}: {type(error).__name__}: {error}")
    one = calls(train) == calls(evaluation)
    save(model, tokenizer, flags)
    write({"model": train} if one else {"train": train, "eval": evaluation}, flags.output_dir / "model.pt2")
    length = "" if flags.task == "image-classification" else " and length"
    print(f"exported {model.config.model_type}: {len(blocks(train))} blocks, free batch{length}"
          + ("" if one else ", one graph for training and one for evaluation")
          + "".join(f"; set {said}" for said in cures))


if __name__ == "__main__":
    main()
