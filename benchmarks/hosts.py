"""Collectives between hosts: network namespaces of this machine, joined by a bridge."""

import json
import os
import subprocess

from sides import ROOT, Bench, Case, rank_environment, wait_all

MIB = 64
RATE = 1e9  # bits a second
RANKS_OF_HOST = 2


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


class Network:
    """So many hosts, 10.77.0.1 and following. `shaped`: each link has RATE in both directions."""

    def __init__(self, hosts, shaped):
        self.hosts, self.shaped = hosts, shaped
        self.names = [f"hasten-{os.getpid()}-{host}" for host in range(hosts)]
        self.switch = f"hasten-{os.getpid()}-switch"

    def __enter__(self):
        try:
            self.make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def make(self):
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", f"port{host}", "netns", self.switch)
            ip("-n", self.switch, "link", "set", f"port{host}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            for space, device in ((name, "eth0"), (self.switch, f"port{host}")) if self.shaped else ():
                rule = f"tc -n {space} qdisc add dev {device} root tbf rate {RATE:.0f}bit burst 128kb latency 50ms"
                subprocess.run(rule.split(), check=True, capture_output=True, text=True)

    def __exit__(self, *error):
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def run(self, *command, backend="auto"):
        """What rank 0 of a program printed last."""
        commands, ranks = [], self.hosts * RANKS_OF_HOST
        for rank in range(ranks):
            host = rank // RANKS_OF_HOST
            line = list(map(str, ["ip", "netns", "exec", self.names[host], *command]))
            variables = rank_environment(rank, ranks, "10.77.0.1", 29500, RANKS_OF_HOST)
            variables |= {"HASTEN_TEST_HOST": self.names[host], "HASTEN_COMM_BACKEND": backend, "GLOO_SOCKET_IFNAME": "eth0"}
            if backend == "auto":
                del variables["HASTEN_COMM_BACKEND"]
            commands.append((line, variables))
        return json.loads(wait_all(commands).output.splitlines()[-1])

    def seconds(self, options, backend):
        """Of one all_reduce, the median."""
        found = self.run(options.programs / "collectives", "auto", "--large", backend=backend)
        return found["all_reduce_65536k"]["median"]

    def sent(self):
        """Bytes that the first host's interface has sent."""
        show = ["ip", "-n", self.names[0], "-s", "-j", "link", "show", "eth0"]
        return json.loads(subprocess.run(show, check=True, capture_output=True).stdout)[0]["stats64"]["tx"]["bytes"]

    def bytes(self, options):
        """Of one all_reduce: what a longer run sends more than a shorter one."""
        sent = []
        for rounds in (1, 3):
            before = self.sent()
            self.run(options.programs / "collectives", "auto", "--large", "--rounds", rounds)
            sent.append(self.sent() - before)
        return (sent[1] - sent[0]) / 10  # a round has 5 calls


def floor(hosts):
    """Seconds that a link needs for what a host has to send."""
    return 2 * (hosts - 1) / hosts * MIB * 2**20 * 8 / RATE


class Hosts(Bench):
    """An all_reduce of 64 MiB between hosts of two ranks: shared memory and Gloo, compared with Gloo alone."""

    # "…_of_link": how many times as long as the link needs for the ideal bytes.

    name = "hosts"
    rounds = 3
    peer_name = "Gloo alone"
    cases = [
        Case("2_hosts", "s", 0.70),
        Case("3_hosts", "s", float("inf")),
        Case("2_hosts_1gbit", "s", 0.75),
        Case("3_hosts_1gbit", "s", 0.85),  # a ring of all ranks sends 1.25 times the ideal bytes
        *(Case(f"{hosts}_hosts_1gbit_of_link", "times", float("inf"), limit=1.15) for hosts in (2, 3)),
        Case("2_hosts_bytes_of_ideal", "times", float("inf"), limit=1.07),
        Case("ddp_step_1gbit", "s/step", 0.75, peer="PyTorch DDP"),
    ]

    def __init__(self, options):
        self.options, self.skipped = options, None
        try:
            with Network(2, True):
                pass
        except (OSError, subprocess.CalledProcessError) as error:
            why = (getattr(error, "stderr", "") or str(error)).strip()
            self.skipped = f"network namespaces with limited links need root, ip and tc: {why}"

    def round(self):
        for hosts in (2,) if self.options.smoke else (2, 3):
            for shaped in (False,) if self.options.smoke else (False, True):
                case = f"{hosts}_hosts" + "_1gbit" * shaped
                with Network(hosts, shaped) as network:
                    ours = network.seconds(self.options, "auto")
                    yield case, ours, network.seconds(self.options, "gloo")
                if shaped:
                    yield f"{case}_of_link", ours / floor(hosts), None
        if self.options.smoke:
            return
        with Network(2, False) as network:
            yield "2_hosts_bytes_of_ideal", network.bytes(self.options) / (MIB * 2**20), None
        with Network(2, True) as network:
            same = ["bert-mini", "--steps", 10]
            yield "ddp_step_1gbit", network.run(self.options.programs / "ddp_step", *same)["seconds"], None
            if self.options.peers:
                script = ROOT / "benchmarks/peers/ddp_step.py"
                yield "ddp_step_1gbit", None, network.run(self.options.peer_python, script, *same)["seconds"]
