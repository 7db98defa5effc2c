"""A file of the hub, fetched and compared with its checksum."""

import hashlib
import os
import shutil
import subprocess
import time

from sides import Bench, Case, environment, wait_all


class Download(Bench):
    """500 MB from a server on this machine, fetched and hashed: `hasten download`, or curl and sha256sum."""

    name = "download"
    rounds = 7
    peer_name = "curl, sha256sum"
    cases = [Case("500_mb", "s", 1.10)]

    def __init__(self, options):
        self.empty_work(options)
        self.skipped = None if shutil.which("curl") else "curl is not installed"
        weights = os.urandom(5_000_000 if options.smoke else 500_000_000)
        (self.work / "model.safetensors").write_bytes(weights)
        (self.work / "config.json").write_text("{}")
        served = ["config.json=config", f"model.safetensors={hashlib.sha256(weights).hexdigest()}"]
        # It ends when this program does, with its input.
        self.server = subprocess.Popen(
            [options.programs / "hub_server", *served], cwd=self.work, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = self.server.stdout.readline().strip()

    def seconds(self, *commands):
        home = self.work / "home"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        variables = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "", "no_proxy": "127.0.0.1"}
        start = time.time()
        for command in commands:
            wait_all([(list(map(str, command)), environment(variables))])
        return time.time() - start

    def round(self):
        file, commit = self.work / "home/file", "c" * 40
        ours = self.seconds([self.options.programs / "hasten", "download", "org/tiny"])
        peer = None
        if self.options.peers:
            url = f"{self.url}/org/tiny/resolve/{commit}/model.safetensors"
            peer = self.seconds(["curl", "--silent", "--fail", "--output", file, url], ["sha256sum", file])
        yield "500_mb", ours, peer
