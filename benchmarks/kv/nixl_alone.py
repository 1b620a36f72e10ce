"""Throughput of NIXL alone between two processes of this machine, for comparison with `python -m benchmarks kv`.

python -m benchmarks.kv.nixl_alone 1024,16384                       sizes in KiB; prints a JSON object for each

`read`: one process reads the other's memory repeatedly, one read at a time, without notifications: NIXL's own rate.
`offered`: like a link, each message is announced by a notification, read, and acknowledged, with two alternating
buffers. No code of ours is involved. Both sides poll; best of five, after one warm-up.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

_MOST_BYTES, _MOST_MESSAGES = 128 << 20, 512  # as in benchmarks.kv.run
_NUM_TRIES = 6
_NUM_BUFFERS = 2
_WITHIN_S = 60.0


def main() -> None:
    sizes = [int(size) << 10 for size in sys.argv[1].split(",")]
    ours, theirs = multiprocessing.Pipe()
    sender = multiprocessing.get_context("spawn").Process(target=_send, args=(theirs, sizes))
    sender.start()
    agent = _agent("receiver")
    ours.send(agent.get_agent_metadata())
    peer = agent.add_remote_agent(ours.recv())
    peer = peer.decode() if isinstance(peer, bytes) else peer
    for size in sizes:
        buffers, _ = _buffers(agent, size)
        # The peer has registered new memory.
        agent.add_remote_agent(ours.recv())
        places = ours.recv()
        count = min(_MOST_MESSAGES, max(4, _MOST_BYTES // size))
        read = [_reads(agent, peer, buffers, places, size, count) for _ in range(_NUM_TRIES)]
        offered = []
        for _ in range(_NUM_TRIES):
            ours.send(count)
            offered.append(_take_offers(agent, peer, buffers, places, size, count))
        ours.send(0)
        assert all(torch.equal(buffer, torch.full_like(buffer, i + 1)) for i, buffer in enumerate(buffers))
        rates = {"read": min(read[1:]), "offered": min(offered[1:])}
        print(
            json.dumps({"bytes": size, **{k: round(size * count / s / 1e9, 3) for k, s in rates.items()}}), flush=True
        )
    sender.join(_WITHIN_S)


def _send(connection: Connection, sizes: list[int]) -> None:
    agent = _agent("sender")
    peer = agent.add_remote_agent(connection.recv())
    connection.send(agent.get_agent_metadata())
    peer = peer.decode() if isinstance(peer, bytes) else peer
    for size in sizes:
        buffers, known = _buffers(agent, size)
        for i, buffer in enumerate(buffers):
            buffer.fill_(i + 1)
        connection.send(agent.get_partial_agent_metadata(known, True, ["UCX"]))
        connection.send([buffer.data_ptr() for buffer in buffers])
        while count := _next_count(agent, connection):
            begun = over = 0
            while over < count:
                while begun < min(count, over + _NUM_BUFFERS):
                    agent.send_notif(peer, b"%d" % begun)
                    begun += 1
                over += len(agent.get_new_notifs().get("receiver", []))


def _next_count(agent: Any, connection: Connection) -> int:
    """Wait for the receiver's next count. UCX makes progress only while it is polled, even for connecting."""
    while not connection.poll():
        agent.get_new_notifs()
    count: int = connection.recv()
    return count


def _reads(agent: Any, peer: str, buffers: list[Any], places: list[int], size: int, count: int) -> float:
    begin = time.perf_counter()
    for i in range(count):
        handle = _read(agent, peer, buffers[i % _NUM_BUFFERS], places[i % _NUM_BUFFERS], size, b"")
        _until(partial(_is_read, agent, handle))
        agent.release_xfer_handle(handle)
    return time.perf_counter() - begin


def _is_read(agent: Any, handle: Any) -> bool:
    return bool(agent.check_xfer_state(handle) != "PROC")


def _take_offers(agent: Any, peer: str, buffers: list[Any], places: list[int], size: int, count: int) -> float:
    begin = time.perf_counter()
    under_way: list[Any] = []
    begun = over = 0
    deadline = begin + _WITHIN_S
    while over < count and time.perf_counter() < deadline:
        for _ in agent.get_new_notifs().get("sender", []):
            at = begun % _NUM_BUFFERS
            under_way.append(_read(agent, peer, buffers[at], places[at], size, b"done"))
            begun += 1
        while under_way and agent.check_xfer_state(under_way[0]) == "DONE":
            agent.release_xfer_handle(under_way.pop(0))
            over += 1
    assert over == count
    return time.perf_counter() - begin


def _read(agent: Any, peer: str, buffer: torch.Tensor, place: int, size: int, done: bytes) -> Any:
    here, there = (agent.get_xfer_descs([(at, size, 0)], "DRAM") for at in (buffer.data_ptr(), place))
    handle = agent.initialize_xfer("READ", here, there, peer, done)
    assert agent.transfer(handle) != "ERR"
    return handle


def _until(is_done: Callable[[], bool]) -> None:
    deadline = time.perf_counter() + _WITHIN_S
    while not is_done():
        assert time.perf_counter() < deadline


def _buffers(agent: Any, size: int) -> tuple[list[torch.Tensor], Any]:
    buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(_NUM_BUFFERS)]
    return buffers, agent.register_memory([(one.data_ptr(), size, 0, "") for one in buffers], "DRAM")


def _agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


if __name__ == "__main__":
    main()
