"""Exports a model of transformers once, so that hasten trains it without Python.

    python -m hasten.export --model microsoft/deberta-v3-small --task text-classification --output-dir deberta
    hasten train --model deberta --train-file reviews.csv --output-dir out

The folder has what a model's folder of transformers has, and model.pt2, the graph of its logits, without
weights. Batch and length are free. Needs torch and transformers. The format is that of the torch that
runs: do not use a newer one than hasten's.
"""

import argparse
import pathlib
import re
import sys

TASKS = {
    "text-classification": "SequenceClassification",
    "token-classification": "TokenClassification",
    "fill-mask": "MaskedLM",
}


def cure(model):
    """Changes what an export cannot take, and says so. Nothing of it changes a result of training."""
    said = []
    for module in [model, *model.modules()]:
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
            said.append("use_cache=False (a graph returns no cache)")
        if getattr(config, "layerdrop", 0):
            config.layerdrop = 0.0
            said.append("layerdrop=0 (the graph has every layer)")
    config = model.config
    if getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0):
        model.set_experts_implementation("batched_mm")
        said.append("experts_implementation=batched_mm (the others loop over data)")
    return list(dict.fromkeys(said))


def export_graph(model, names, train):
    import torch
    from torch.export import Dim, export

    model.train(train)
    example = {name: torch.ones(3, 17, dtype=torch.long) for name in names}
    free = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in names}
    return export(model, (), example, dynamic_shapes=free, strict=False)


def operators(program):
    """What it calls. Flags of the mode are arguments and no part of this."""
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


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


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m hasten.export", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--num-labels", type=int, help="labels of a new head; default: the model's")
    parser.add_argument("--output-dir", required=True, type=pathlib.Path, help="a folder that does not exist, or is empty")
    flags = parser.parse_args(arguments)
    if flags.output_dir.exists() and any(flags.output_dir.iterdir()):
        sys.exit(f"error: {flags.output_dir} is not empty")
    try:
        import torch
        import transformers
    except ImportError as error:
        sys.exit(f"error: {error.name} is missing. Run: {sys.executable} -m pip install torch transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = {"num_labels": flags.num_labels} if flags.num_labels else {}
    auto = getattr(transformers, f"AutoModelFor{TASKS[flags.task]}")
    model = auto.from_pretrained(flags.model, torch_dtype=torch.float32, ignore_mismatched_sizes=True, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(flags.model)
    cures = cure(model)
    names = [n for n in ("input_ids", "attention_mask", "token_type_ids") if n in [*tokenizer.model_input_names, "input_ids"]]
    try:
        train, evaluation = (export_graph(model, names, mode) for mode in (True, False))
    except Exception as error:  # whatever the model's code raises
        sys.exit(f"error: torch.export cannot export {model.config.model_type}: {type(error).__name__}: {error}")
    one = operators(train) == operators(evaluation)
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(flags.output_dir)
    tokenizer.save_pretrained(flags.output_dir)
    write({"model": train} if one else {"train": train, "eval": evaluation}, flags.output_dir / "model.pt2")
    print(f"exported {model.config.model_type}: {len(blocks(train))} blocks, free batch and length"
          + ("" if one else ", one graph for training and one for evaluation")
          + "".join(f"; set {said}" for said in cures))


if __name__ == "__main__":
    main()
