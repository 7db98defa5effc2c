"""Two hosts with a slow or a broken link: what a run costs there, and how it ends."""

import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

from local_sgd import Link, link_or_reason
from sides import Bench, Case, environment

UNHELD = float("inf")


class FarLink(Link):
    """The cable of link_relay.py."""

    def __init__(self, **how):
        super().__init__()
        self.how, self.relay = how, None

    def connect(self):
        script = pathlib.Path(__file__).with_name("link_relay.py")
        flags = [str(word) for name, value in self.how.items() for word in (f"--{name}", value)]
        self.relay = subprocess.Popen(
            [sys.executable, script, *(str(holder.pid) for holder in self.holders), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.relay.stdout.readline()

    def away(self, seconds):
        self.relay.stdin.write(f"away {seconds}\n")
        self.relay.stdin.flush()

    def __exit__(self, *error):
        if self.relay is not None:
            self.relay.stdin.close()
            self.relay.wait()
        super().__exit__(*error)


def family(pid):
    """The process and all below it."""
    below = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in below for one in family(int(child)))]


class Run:
    """`hasten train` on both hosts, one rank each."""

    def __init__(self, bench, link, model, *flags):
        self.hosts, self.bench = [], bench
        for host, holder in enumerate(link.holders):
            shutil.rmtree(self.output(host), ignore_errors=True)
            line = [*link.prefix(holder), bench.options.programs / "hasten", "train", "--model", model]
            line += ["--train-file", bench.train, "--eval-strategy", "no", "--save-strategy", "no"]
            line += ["--nnodes", 2, "--node-rank", host, "--master-addr", link.ADDRESSES[0], "--nproc", 1]
            line += ["--output-dir", self.output(host), "--seed", 3, *flags]
            variables = environment({"HASTEN_TEST_HOST": "ab"[host]})
            with open(bench.work / f"err{host}", "w") as error:
                self.hosts.append(
                    subprocess.Popen(list(map(str, line)), env=variables, stdout=subprocess.DEVNULL, stderr=error)
                )

    def output(self, host):
        return self.bench.work / f"out{host}"

    def text(self, host):
        return (self.bench.work / f"err{host}").read_text()

    def records(self):
        try:
            return [json.loads(line) for line in (self.output(0) / "metrics.jsonl").read_text().splitlines()]
        except (FileNotFoundError, json.JSONDecodeError):
            return []

    def await_step(self, step):
        while not any(record.get("step", 0) >= step for record in self.records()):
            if self.hosts[0].poll() is not None:
                raise SystemExit(f"error: {self.text(0)}")
            time.sleep(0.05)

    def end(self):
        """[(exit code, seconds until then)]; a host that is left is killed after a while."""
        start, ends, patience = time.time(), {}, 600
        while len(ends) < len(self.hosts):
            for host, process in enumerate(self.hosts):
                if host not in ends and process.poll() is not None:
                    ends[host] = (process.returncode, time.time() - start)
                    patience = time.time() - start + 20
            if time.time() - start > patience:
                self.kill()
            time.sleep(0.02)
        return [ends[host] for host in range(len(self.hosts))]

    def kill(self):
        for process in self.hosts:
            if process.poll() is None:
                process.kill()

    def speed(self):
        """Samples a second in the second half, without the end of the run, and the last loss."""
        for code, _ in self.end():
            if code != 0:
                raise SystemExit(f"error: {self.text(0)}\n{self.text(1)}")
        steps = [record for record in self.records() if record.get("type") == "train"]
        rates = [record["samples_per_second"] for record in steps if record["step"] > steps[-1]["step"] // 2][:-1]
        return statistics.harmonic_mean(rates), steps[-1]["loss"]

    def weights(self):
        return hashlib.sha256((self.output(0) / "model.safetensors").read_bytes()).hexdigest()


class Links(Bench):
    """DDP and Local SGD of bert-mini over slow links, and what happens when a link or a host breaks."""

    # Throughput: "peer" is the same run over the same relay, which takes time of the CPU, without a limit.

    name = "links"
    rounds = 1
    peer_name = "an unlimited link"
    free = {"rate": 0, "delay": 0}
    slow = {"rate": 100e6, "delay": 0.025}
    lossy = {**slow, "loss": 0.05}
    cases = [
        Case("local_sgd_64_at_100mbit_50ms", "s/1000 samples", 1 / 0.95, 4),
        Case("local_sgd_64_at_100mbit_50ms_5%_lost", "s/1000 samples", UNHELD, 4),
        Case("ddp_at_100mbit_50ms", "s/1000 samples", UNHELD, 4),
        Case("loss_of_local_sgd_64", "nats", UNHELD, 4, peer="hasten DDP"),
    ]

    def __init__(self, options):
        super().__init__(options)
        _, self.skipped = link_or_reason()
        if self.skipped is None and not os.path.exists("/dev/net/tun"):
            self.skipped = "there is no /dev/net/tun for a link that delays"
        self.events, self.whole = [], None  # rows of the guide's table

    def seconds(self, how, *flags):
        model = "bert-tiny" if self.options.smoke else "bert-mini"
        with FarLink(**how) as link:
            run = Run(self, link, model, "--per-device-train-batch-size", 64, *flags)
            speed, loss = run.speed()
            return 1000 / speed, loss, run.weights()

    def round(self):
        steps = 16 if self.options.smoke else 320
        every = steps // 6 if self.options.smoke else 64
        log = ["--logging-steps", every]  # a record costs a round trip
        local = [*log, "--local-sgd-steps", every, "--local-sgd-delay", every - 1, "--max-steps"]
        # In an order in which a machine that gets slower is no advantage.
        links = (self.free, self.slow) if self.options.smoke else (self.free, self.slow, self.slow, self.free)
        runs = [(link, *self.seconds(link, *local, steps)) for link in links]
        near, far = (statistics.mean(run[1] for run in runs if run[0] is link) for link in (self.free, self.slow))
        if len({weights for *_, weights in runs}) > 1:
            raise SystemExit("error: Local SGD has other weights over a slow link")
        yield "local_sgd_64_at_100mbit_50ms", far, near
        if self.options.smoke:
            return
        yield "local_sgd_64_at_100mbit_50ms_5%_lost", self.seconds(self.lossy, *local, steps)[0], near
        ddp, ddp_loss, _ = self.seconds(self.free, *log, "--max-steps", steps)
        yield "loss_of_local_sgd_64", runs[0][2], ddp_loss
        yield "ddp_at_100mbit_50ms", self.seconds(self.slow, "--logging-steps", 4, "--max-steps", 16)[0], ddp
        self.break_links()

    def broken(self, what, break_it, *flags):
        """How a run of DDP ends after it."""
        with FarLink(rate=1e9) as link:
            run = Run(self, link, "bert-tiny", "--max-steps", 400, "--per-device-train-batch-size", 8, "--logging-steps", 4, *flags)
            run.await_step(5)
            break_it(link, run)
            ends = run.end()
            for process in run.hosts:
                for pid in family(process.pid) if process.poll() is None else []:
                    os.kill(pid, signal.SIGKILL)
            said = [re.findall(r"^error: (.*)$", run.text(host), re.MULTILINE) for host in (0, 1)]
            if all(code == 0 for code, _ in ends):
                self.whole = self.whole or run.weights()
                self.events.append(f"| {what} | goes on, {'equal' if run.weights() == self.whole else 'OTHER'} weights | |")
            else:
                code, seconds = ends[0]
                self.events.append(f"| {what} | code {code} after {seconds:.0f} s | {said[0][0] if said[0] else ''} |")

    def break_links(self):
        longer = ("--heartbeat-timeout", 30)
        stop = lambda link, run: [os.kill(pid, signal.SIGSTOP) for pid in family(run.hosts[1].pid)]
        kill = lambda link, run: [os.kill(pid, signal.SIGKILL) for pid in family(run.hosts[1].pid)]
        self.broken("nothing", lambda link, run: None)
        self.broken("away for 3 s", lambda link, run: link.away(3))
        self.broken("away for 10 s", lambda link, run: link.away(10))
        self.broken("away for 10 s, --heartbeat-timeout 30", lambda link, run: link.away(10), *longer)
        self.broken("away for good", lambda link, run: link.away(1e9))
        self.broken("host b stops", stop)
        self.broken("host b loses its power", kill)
