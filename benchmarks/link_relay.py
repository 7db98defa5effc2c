"""A cable between two networks that delays, loses and limits what it carries, and can be cut.

  link_relay.py PID PID [--rate BITS] [--delay SECONDS] [--loss SHARE] [--seed N]

PID is a process in each network. Both get an interface "cable". Prints "ready". A line "away SECONDS"
on stdin cuts the cable for so long. Linux has netem for this, but not every kernel's modules.
"""

import argparse
import collections
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time

MTU = 1500
QUEUE = 1 << 20  # bytes that a direction holds before it drops packets
TOGETHER = 0.001  # packets of as many seconds are one wake-up, as with a network card


def make_device(pid):
    """An interface whose packets this process reads and writes."""
    name = f"hr{os.getpid() % 100000}{'ab'[pid == sys.argv[2]]}"
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, 0x400454CA, struct.pack("16sH", name.encode(), 0x1001))  # TUNSETIFF: packets without a head
    inside = ["nsenter", "--net", "--target", pid]
    subprocess.run(["ip", "link", "set", name, "netns", pid], check=True)
    subprocess.run([*inside, "ip", "link", "set", name, "name", "cable", "mtu", str(MTU), "txqueuelen", "1000"], check=True)
    return device


class Direction:
    def __init__(self, source, target, options, seed):
        self.source, self.target, self.options = source, target, options
        self.random = random.Random(seed)
        self.waiting, self.bytes, self.free = collections.deque(), 0, 0.0

    def take(self, now, cut):
        for _ in range(64):
            try:
                packet = os.read(self.source, 65536)
            except BlockingIOError:
                return
            if cut or self.random.random() < self.options.loss or self.bytes > QUEUE:
                continue
            self.free = max(now, self.free) + (8 * len(packet) / self.options.rate if self.options.rate else 0)
            self.waiting.append((self.free + self.options.delay, packet))
            self.bytes += len(packet)

    def give(self, now):
        while self.waiting and self.waiting[0][0] <= now:
            packet = self.waiting.popleft()[1]
            self.bytes -= len(packet)
            try:
                os.write(self.target, packet)
            except OSError:  # the other end is not up
                pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("pids", nargs=2)
    parser.add_argument("--rate", type=float, default=0)
    parser.add_argument("--delay", type=float, default=0, help="of one direction")
    parser.add_argument("--loss", type=float, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    first, second = map(make_device, options.pids)
    both = [Direction(first, second, options, options.seed), Direction(second, first, options, options.seed + 1)]
    print("ready", flush=True)
    away_until = 0.0
    while True:
        now = time.monotonic()
        due = min((way.waiting[0][0] for way in both if way.waiting), default=now + 1)
        time.sleep(TOGETHER)
        ready, _, _ = select.select([first, second, 0], [], [], max(0, due - now))
        now = time.monotonic()
        if 0 in ready:
            words = sys.stdin.readline().split()
            if not words:
                return
            away_until = now + float(words[1])
        for way in both:
            if way.source in ready:
                way.take(now, now < away_until)
            way.give(now)


if __name__ == "__main__":
    main()
