"""Sharded training: its steps compared with torch's fully_shard and our DDP, and its memory."""

from sides import Bench, Case, launched, peer_ranks


class FsdpStep(Bench):
    """Steps of a GPT-2-shaped model (6 layers, 11 M parameters), 4 x 128 tokens a rank."""

    # "…_over_ddp": our own DDP is the other side. "…_exposed": what forward and backward
    # take beyond those of as many processes that do not communicate, each side compared with its own.
    name = "fsdp_step"
    rounds = 3
    peer_name = "PyTorch fully_shard; …_over_ddp: ours with ddp"
    cases = [
        case
        for ranks, most in ((2, 0.62), (4, 0.70))
        for case in (
            Case(f"ranks_{ranks}", "s/step", most, 4),
            Case(f"ranks_{ranks}_over_ddp", "s/step", 1.15, 4),
            Case(f"ranks_{ranks}_exposed", "s/step", 0.6, 4),
        )
    ]

    def __init__(self, options):
        self.options = options

    def round(self):
        for ranks in (2,) if self.options.smoke else (2, 4):
            steps = ["--steps", 1 if self.options.smoke else 15]
            ours = launched(self.options, "fsdp_step", *steps, ranks=ranks)
            alone = launched(self.options, "fsdp_step", "--strategy", "alone", *steps, ranks=ranks)
            ddp = launched(self.options, "fsdp_step", "--strategy", "ddp", *steps, ranks=ranks)["seconds"]
            yield f"ranks_{ranks}_over_ddp", ours["seconds"], ddp
            yield f"ranks_{ranks}", ours["seconds"], None
            yield f"ranks_{ranks}_exposed", ours["gradient_seconds"] - alone["gradient_seconds"], None
            if self.options.peers:
                theirs = peer_ranks(self.options, "fsdp_step.py", *steps, ranks=ranks)
                apart = peer_ranks(self.options, "fsdp_step.py", "--alone", 1, *steps, ranks=ranks)
                yield f"ranks_{ranks}", None, theirs["seconds"]
                yield f"ranks_{ranks}_exposed", None, theirs["gradient_seconds"] - apart["gradient_seconds"]


class FsdpMemory(Bench):
    """Bytes of tensors on the largest rank between steps, of a model of many layers."""

    # The other side is the formula: 16 bytes of each element of the rank's rows, and four
    # blocks and the root as well. "…_peak": the most in a step of one short sample, where
    # a block's gradients come on top. "…_growth": what a layer adds to that, compared with its
    # rows' 16 bytes. "…_bert_base": as wide, deep and many words. "…_over_ddp": peaks, ours with ddp.
    name = "fsdp_memory"
    rounds = 1
    peer_name = "16 bytes / ranks + 4 blocks; …_over_ddp: ours with ddp"
    cases = [
        case
        for ranks in (2, 4)
        for case in (
            Case(f"ranks_{ranks}_layers_6", "bytes", 1.02, 0),
            Case(f"ranks_{ranks}_layers_12", "bytes", 1.02, 0),
            Case(f"ranks_{ranks}_layers_12_peak", "bytes", float("inf"), 0),
            Case(f"ranks_{ranks}_growth", "bytes/layer", 1.02, 0),
            Case(f"ranks_{ranks}_bert_base", "bytes", 1.02, 0),
            Case(f"ranks_{ranks}_layers_12_over_ddp", "bytes", float("inf"), 0),
        )
    ]

    def __init__(self, options):
        self.options = options

    def round(self):
        for ranks in (2,) if self.options.smoke else (2, 4):
            peaks = {}
            for layers in (6, 12):
                same = ["--rows", 1, "--tokens", 8, "--steps", 2, "--layers", layers]
                run = launched(self.options, "fsdp_step", *same, ranks=ranks)
                peaks[layers] = run["peak_bytes"]
                rest = run["elements"] - layers * run["block"]
                state = 16 * run["elements"] / ranks + 4 * (4 * run["block"] + rest)
                yield f"ranks_{ranks}_layers_{layers}", run["rest_bytes"], state
            yield f"ranks_{ranks}_layers_12_peak", peaks[12], state
            if not self.options.smoke:
                wide = ["--layers", 12, "--width", 768, "--words", 30522, "--rows", 1, "--tokens", 8, "--steps", 2]
                bert = launched(self.options, "fsdp_step", *wide, ranks=ranks)
                rest = bert["elements"] - 12 * bert["block"]
                yield f"ranks_{ranks}_bert_base", bert["rest_bytes"], 16 * bert["elements"] / ranks + 4 * (4 * bert["block"] + rest)
            yield f"ranks_{ranks}_growth", (peaks[12] - peaks[6]) / 6, 16 * run["block"] / ranks
            ddp = launched(self.options, "fsdp_step", "--strategy", "ddp", *same, ranks=ranks)
            yield f"ranks_{ranks}_layers_12_over_ddp", peaks[12], ddp["peak_bytes"]
