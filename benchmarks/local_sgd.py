"""Benchmarks of Local SGD: one average, a slow link, iterations to a target, quality."""

import gzip
import itertools
import json
import shutil
import statistics
import subprocess
import sys

import svg
from sides import PICTURES, RANKS, Bench, Case, environment, launched, peer_ranks, rank_environment, wait_all

UNHELD = float("inf")


class LocalSGDAverage:
    """One average of a model's parameters over two ranks, compared with Accelerate's LocalSGD."""

    # Limit of the transactional rows: the rows "…_copy" have it, one pass of the bytes.
    name = "local_sgd_average"
    rounds = 3
    peer_name = "Accelerate LocalSGD"
    held = {"bert_base": (0.30, 0.15), "eleven_million": (0.09, 0.05), "small_tensors": (0.003, 0.002)}
    cases = [
        case
        for shape, (most, in_place) in held.items()
        for case in (
            Case(shape, "s", most, 5),
            Case(f"{shape}_in_place", "s", in_place, 5),
            Case(f"{shape}_copy", "s", UNHELD, 5),
        )
    ]

    def __init__(self, options):
        self.options = options

    def round(self):
        for row in self.held:
            shapes = row.replace("_", "-")
            turns = ["--rounds", 1 if self.options.smoke else 10]
            ours = launched(self.options, "local_sgd_average", shapes, *turns)
            in_place = launched(self.options, "local_sgd_average", shapes, *turns, "--in-place")
            yield row, ours["seconds"], None
            yield f"{row}_in_place", in_place["seconds"], None
            yield f"{row}_copy", ours["copy_seconds"], None
            if self.options.peers:
                peer = peer_ranks(self.options, "local_sgd_average.py", shapes, *turns)["seconds"]
                yield row, None, peer
                yield f"{row}_in_place", None, peer


class Link:
    """Two networks with a cable between them; a rank runs in each."""

    ADDRESSES = ("10.77.0.1", "10.77.0.2")

    def __init__(self):
        self.holders = []

    def __enter__(self):
        try:
            for _ in self.ADDRESSES:
                holder = subprocess.Popen(
                    ["unshare", "--net", "sh", "-c", "echo ready; exec sleep 100000"], stdout=subprocess.PIPE, text=True
                )
                self.holders.append(holder)
                holder.stdout.readline()
            self.connect()
            for holder, address in zip(self.holders, self.ADDRESSES):
                self.inside(holder, "ip", "address", "add", f"{address}/24", "dev", "cable")
                self.inside(holder, "ip", "link", "set", "cable", "up")
                self.inside(holder, "ip", "link", "set", "lo", "up")
            return self
        except BaseException:
            self.__exit__()
            raise

    def connect(self):
        first, second = self.holders
        self.inside(first, "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(second.pid))

    def __exit__(self, *_):
        while self.holders:
            holder = self.holders.pop()
            holder.kill()
            holder.wait()

    @staticmethod
    def prefix(holder):
        return ["nsenter", "--net", "--target", str(holder.pid)]

    def inside(self, holder, *command):
        subprocess.run([*self.prefix(holder), *command], check=True, capture_output=True)

    def shape(self, bits_per_second):
        """Both directions. The bucket holds 10 ms, so that the mean is the given rate."""
        for holder in self.holders:
            rate, burst = f"{int(bits_per_second)}bit", str(max(65536, int(bits_per_second / 800)))
            self.inside(
                holder, "tc", "qdisc", "replace", "dev", "cable", "root", "tbf", "rate", rate, "burst", burst, "latency", "200ms"
            )

    def throughput(self, seconds=1.5):
        """Bits a second that one connection gets."""
        serve = (
            "import socket, sys; server = socket.create_server((sys.argv[1], 5555)); print(flush=True)\n"
            "peer = server.accept()[0]\nwhile peer.recv(1 << 20): pass"
        )
        send = (
            "import socket, sys, time; peer = socket.create_connection((sys.argv[1], 5555)); sent = 0; data = bytes(1 << 16)\n"
            f"start = time.time()\nwhile time.time() < start + {seconds}: sent += peer.send(data)\n"
            "peer.shutdown(socket.SHUT_WR); peer.recv(1); print(8 * sent / (time.time() - start))"
        )
        first, second = self.holders
        with subprocess.Popen(
            [*self.prefix(second), sys.executable, "-c", serve, self.ADDRESSES[1]], stdout=subprocess.PIPE
        ) as server:
            server.stdout.readline()
            command = [*self.prefix(first), sys.executable, "-c", send, self.ADDRESSES[1]]
            return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def shape_to(self, bits_per_second):
        """So that a connection gets this much: headers and the shaper take their part."""
        self.shape(bits_per_second)
        self.shape(bits_per_second**2 / self.throughput())

    def run(self, *command):
        commands = []
        for rank, holder in enumerate(self.holders):
            line = [*self.prefix(holder), *map(str, command)]
            variables = rank_environment(rank, RANKS, self.ADDRESSES[0], 29577, 1)
            commands.append((line, dict(variables, HASTEN_COMM_BACKEND="gloo")))  # not through memory
        return json.loads(wait_all(commands).output.splitlines()[-1])


def link_or_reason():
    """(a link, None), or (None, why this machine has none)."""
    needed = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if needed:
        return None, f"not found: {', '.join(needed)}"
    try:
        with Link() as link:
            link.shape(1e9)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = (getattr(error, "stderr", b"") or b"").decode().strip()
        return None, f"networks of one's own are not permitted here: {detail or error}"
    return Link(), None


class SlowLink:
    """Steps of bert-mini over a link on which an all-reduce takes 7 x the compute."""

    # "peer" is ours without Local SGD in the rows of H, and no communication in the last.
    # The model: DDP takes C/3 + T at least, blocking Local SGD C + T / H, overlapped
    # max(C, T / H).
    name = "slow_link"
    rounds = 3
    peer_name = "hasten DDP; no communication"
    cases = [
        Case("every_8_blocking", "s/step", 1 / 3.7, 4),
        Case("every_8_overlapped", "s/step", 1 / 5.5, 4),
        Case("every_64_overlapped", "s/step", 1.03, 4),
    ]
    times = 7  # communication over compute

    def __init__(self, options):
        self.options = options
        self.link, self.skipped = link_or_reason()

    def round(self):
        program = self.options.programs / "local_sgd_link"
        short = self.options.smoke
        with self.link as link:
            link.shape(10e9)
            alone = link.run(program, "alone", "--windows", 2 if short else 30)
            link.shape_to(8 * alone["bytes"] / (self.times * alone["seconds"]))
            ddp = link.run(program, "ddp", "--windows", 1 if short else 4)["seconds"]
            for case, mode, every, windows in (
                ("every_8_blocking", "blocking", 8, 4),
                ("every_8_overlapped", "overlapped", 8, 6),
            ):
                run = link.run(program, mode, "--every", every, "--windows", 1 if short else windows)
                yield case, run["seconds"], ddp
            far = link.run(program, "overlapped", "--every", 64, "--windows", 1 if short else 2)
            alone = statistics.mean(
                [alone["seconds"], link.run(program, "alone", "--windows", 2 if short else 100)["seconds"]]
            )
            yield "every_64_overlapped", far["seconds"], alone


class LocalSGDW8a:
    """Iterations to a target by workers and steps (Stich 2019), simulated; one real run."""

    # --data: w8a in libsvm form, .gz or plain. "Peer": one worker, so that a ratio is
    # 1 / speed-up in iterations.
    name = "local_sgd_w8a"
    rounds = 1
    peer_name = "one worker, H = 1"
    workers, steps = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64)
    cases = [Case(f"k{k}_h{h}", "iterations", UNHELD, 0) for k, h in itertools.product(workers[1:], steps)]

    def __init__(self, options):
        self.options = options
        if options.smoke:
            self.cases = [case for case in self.cases if case.name in ("k2_h1", "k2_h2")]
        self.skipped = None if options.data else "give --data FILE, the data set w8a in libsvm form"

    def round(self):
        self.options.work.mkdir(parents=True, exist_ok=True)
        data = self.options.work / "rows.libsvm"
        opened = gzip.open if str(self.options.data).endswith(".gz") else open
        with opened(self.options.data, "rb") as source, open(data, "wb") as target:
            shutil.copyfileobj(source, target)
        real = launched(self.options, "local_sgd_w8a", data, "--check")
        if not real["equal_bits"]:
            raise SystemExit("error: two processes do not compute what the simulation does")
        command = [self.options.programs / "local_sgd_w8a", data] + ["--smoke"] * self.options.smoke
        output = wait_all([(list(map(str, command)), environment())]).output
        self.found = {}
        for line in map(json.loads, output.splitlines()):
            self.found.setdefault(line["gap"], {})[line["workers"], line["steps"]] = line["iterations"]
        least = min(self.found)
        one = self.found[least][1, 1]
        for (k, h), iterations in self.found[least].items():
            if k > 1:
                yield f"k{k}_h{h}", iterations, one

    def picture(self, root):
        charts = []
        for gap, found in sorted(self.found.items(), reverse=True):
            speed = {
                f"H = {h}": [(k, found[1, 1] / found[k, h]) for k in self.workers if found[k, h] > 0] for h in self.steps
            }
            charts.append(svg.chart(f"Speed-up in iterations, gap {gap:g}", "workers K", "times one worker", speed))
        found = self.found[min(self.found)]
        cost = 25  # an average costs as much as this many steps
        time = {
            f"H = {h}": [(k, found[1, 1] / (found[k, h] * (1 + (cost / h if k > 1 else 0)))) for k in self.workers if found[k, h] > 0]
            for h in self.steps
        }
        charts.append(svg.chart(f"Speed-up in time, an average costs {cost} steps", "workers K", "times one worker", time))
        svg.write(root / PICTURES / "local_sgd_w8a.svg", charts)


class LocalSGDReviews(Bench):
    """Mistakes and loss on unseen reviews after the same samples, by H, compared with DDP."""

    name = "local_sgd_reviews"
    rounds = 3
    peer_name = "hasten DDP"
    middle = staticmethod(statistics.mean)
    every = (1, 4, 8, 32)
    cases = [Case(f"mistakes_h{h}", "mistakes/1000 rows", UNHELD, 1) for h in every] + [
        Case(f"loss_h{h}", "nats", UNHELD, 4) for h in every
    ]
    seed = 0

    def __init__(self, options):
        super().__init__(options)
        self.all = {}

    def quality(self, *flags):
        same = ["--seed", str(self.seed), "--learning-rate", "5e-5", "--per-device-train-batch-size", "16"]
        epochs = "0.05" if self.options.smoke else "2"
        self.ours("minilm", *same, "--num-train-epochs", epochs, "--eval-file", self.eval, *flags)
        record = next(r for r in reversed(self.records()) if "eval_accuracy" in r)
        return 1000 * (1 - record["eval_accuracy"]), record["eval_loss"]

    def round(self):
        self.seed += 1
        ddp = self.quality()
        for h in (8,) if self.options.smoke else self.every:
            local = self.quality("--local-sgd-steps", str(h))
            for name, ours, peer in zip(("mistakes", "loss"), local, ddp):
                self.all.setdefault(name, {}).setdefault(h, []).append((ours, peer))
                yield f"{name}_h{h}", ours, peer

    def picture(self, root):
        charts = []
        for name, unit in (("mistakes", "mistakes per 1000"), ("loss", "loss, nats")):
            values = self.all[name]
            lines = {
                "Local SGD": [(h, statistics.mean(ours for ours, _ in values[h])) for h in self.every],
                "DDP": [(h, statistics.mean(peer for _, peer in values[h])) for h in self.every],
            }
            charts.append(svg.chart(f"Unseen reviews: {unit}", "H, optimizer steps between averages", unit, lines, y_log=False))
        svg.write(root / PICTURES / "local_sgd_reviews.svg", charts)
