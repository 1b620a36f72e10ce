"""Repeated messages of one size, over our link alone and over a bare TCP connection.

This module has both ends of each. Buffers are reused, as in links. The receiver starts timing after the first few
messages, which touch new memory.
"""

from __future__ import annotations

import socket
import time
from uuid import uuid4

import torch
from grpc.aio import Channel
from torch.distributed import Store

from core.rpc.transfer_pb2_grpc import RankStub
from core.wire.channel import open_channel
from kvtransfer.links.backends import make_link
from kvtransfer.links.link import LinkEnd, LinkGuard, StagingRing
from kvtransfer.profile.near_side import FAR, HOST, NEAR, TIMEOUT_S, NearSide
from kvtransfer.transfer.rendezvous import Rendezvous, local_store, remote_store

_CPU = torch.device("cpu")
_NUM_FIRST = 4


def send_over_link(near: NearSide, backend: str, *, num_bytes: int, count: int) -> float:
    """Send `count` messages between processes over the workers' link. Returns seconds."""
    prefix = f"bench/{uuid4().hex}"
    near.far.tell("receive_over_link", backend=backend, prefix=prefix, num_bytes=num_bytes, count=count)

    async def connect() -> Channel:
        return open_channel(near.address, peer=FAR, identity=NEAR)

    # The channel belongs to the loop that creates it.
    channel = near.host.call(connect(), timeout_s=TIMEOUT_S)
    store = remote_store(RankStub(channel), near.host.loop, timeout_s=TIMEOUT_S)
    link = make_link(backend, _end(store, near.guard, prefix, is_sender=True))
    link.meet()
    near.host.call(channel.close(), timeout_s=TIMEOUT_S)
    ring = StagingRing(_CPU, num_buffers=link.num_buffers)
    for i in range(_NUM_FIRST + count):
        ring.make_room()
        payload = ring.take(num_bytes)
        if i < _NUM_FIRST:
            payload.fill_(i)
        ring.start(link.send(payload), timeout_s=TIMEOUT_S)
    ring.drain()
    seconds: float = near.far.answer()
    link.close()
    return seconds


def receive_over_link(
    rendezvous: Rendezvous, guard: LinkGuard, backend: str, prefix: str, *, num_bytes: int, count: int
) -> float:
    link = make_link(backend, _end(local_store(rendezvous, timeout_s=TIMEOUT_S), guard, prefix, is_sender=False))
    link.meet()
    ring = StagingRing(_CPU, num_buffers=link.num_buffers)
    begin = 0.0
    for i in range(_NUM_FIRST + count):
        ring.make_room()
        # All warm-up messages have arrived.
        if i == _NUM_FIRST + link.num_buffers - 1:
            begin = time.monotonic()
        ring.start(link.recv(ring.take(num_bytes)), timeout_s=TIMEOUT_S)
    ring.drain()
    return time.monotonic() - begin


def send_over_tcp(near: NearSide, *, num_bytes: int, count: int, num_buffers: int = 1) -> float:
    """Send the same over a bare socket, with `num_buffers` rotating buffers on each side. Returns seconds."""
    payloads = [memoryview(bytes([i + 1]) * num_bytes) for i in range(num_buffers)]
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        near.far.tell("receive_over_tcp", port=port, num_bytes=num_bytes, count=count, num_buffers=num_buffers)
        server.settimeout(TIMEOUT_S)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(TIMEOUT_S)
        for i in range(_NUM_FIRST + count):
            connection.sendall(payloads[i % num_buffers])
        return float(near.far.answer())


def receive_over_tcp(port: int, *, num_bytes: int, count: int, num_buffers: int) -> float:
    payloads = [memoryview(bytearray(num_bytes)) for _ in range(num_buffers)]
    begin = 0.0
    with socket.create_connection((HOST, port), TIMEOUT_S) as connection:
        for i in range(_NUM_FIRST + count):
            if i == _NUM_FIRST:
                begin = time.monotonic()
            left = payloads[i % num_buffers]
            while left:
                left = left[connection.recv_into(left) :]
    return time.monotonic() - begin


def _end(store: Store, guard: LinkGuard, prefix: str, *, is_sender: bool) -> LinkEnd:
    return LinkEnd(
        store=store,
        prefix=prefix,
        is_sender=is_sender,
        host=HOST,
        device=_CPU,
        timeout_s=TIMEOUT_S,
        guard=guard,
    )
