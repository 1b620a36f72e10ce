"""Slow and lossy network for kernels without netem: a process that forwards between two TAP interfaces.

It creates both interfaces, which disappear when it ends. Needs root.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 1 << 16
_QUEUE_S = 0.5  # packets that would queue for longer are dropped, as in a switch


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """Delay, rate and loss per direction."""

    delay_s: float
    loss: float  # fraction of the packets
    bytes_per_s: float


@contextmanager
def slow_cable(near: str, far: str, slowness: Slowness) -> Iterator[None]:
    """Create both interfaces; they are still down."""
    options = [str(slowness.delay_s), str(slowness.loss), str(slowness.bytes_per_s)]
    process = subprocess.Popen([sys.executable, __file__, near, far, *options], stdout=subprocess.PIPE)
    assert process.stdout
    try:
        assert process.stdout.readline(), "failed to create the interfaces"
        yield
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


class _Direction:
    """One direction: packets are sent one after the other and arrive after a delay."""

    def __init__(self, source: int, target: int, slowness: Slowness, seed: int) -> None:
        self.source = source
        self._target = target
        self._slowness = slowness
        self._random = random.Random(seed)
        self._free_at = 0.0
        self._under_way: list[tuple[float, int, bytes]] = []
        self._number = 0

    def take(self, now: float) -> None:
        while True:
            try:
                frame = os.read(self.source, _FRAME_BYTES)
            except OSError:  # no more packets, or the interface is down
                return
            starts_at = max(now, self._free_at)
            if self._random.random() < self._slowness.loss or starts_at - now > _QUEUE_S:
                continue
            self._free_at = starts_at + len(frame) / self._slowness.bytes_per_s
            self._number += 1
            heapq.heappush(self._under_way, (self._free_at + self._slowness.delay_s, self._number, frame))

    def deliver(self, now: float) -> float:
        """Deliver the packets that are due; return the time of the next one."""
        while self._under_way and self._under_way[0][0] <= now:
            _, _, frame = heapq.heappop(self._under_way)
            try:
                os.write(self._target, frame)
            except OSError:  # the interface is down
                pass
        return self._under_way[0][0] if self._under_way else now + 1


def _carry(near: int, far: int, slowness: Slowness) -> None:
    directions = {end: _Direction(end, other, slowness, end) for end, other in ((near, far), (far, near))}
    poll = select.epoll()
    for end in directions:
        poll.register(end, select.EPOLLIN)
    while True:
        now = time.monotonic()
        next_at = min(direction.deliver(now) for direction in directions.values())
        for end, _ in poll.poll(max(next_at - time.monotonic(), 0)):
            directions[end].take(time.monotonic())


def _open_tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("near")
    parser.add_argument("far")
    for number in ("delay_s", "loss", "bytes_per_s"):
        parser.add_argument(number, type=float)
    given = parser.parse_args()
    aux_hidden_states = _open_tap(given.near), _open_tap(given.far)
    print("ready", flush=True)
    _carry(*aux_hidden_states, Slowness(delay_s=given.delay_s, loss=given.loss, bytes_per_s=given.bytes_per_s))
