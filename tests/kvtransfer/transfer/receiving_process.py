"""Receiving rank in a separate process, which tests kill, freeze and restart."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from core.rpc import transfer_pb2_grpc as rpc
from core.types.failpoint import Failpoint, unobserved
from core.wire.channel import listen, make_server
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from kvtransfer.links.link import LinkGuard
from kvtransfer.protocol.frames import Opening
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.rank_servicer import RankServicer
from kvtransfer.transfer.receiver import Receiver
from tests.support.identities import in_clear, rank

LAYOUT = KVLayout(model="m", num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, dtype="float32")
NUM_BLOCKS = 512  # 32 MiB
SILENCE_S = 3.0  # timeouts.transfer_s
_IDENTITY = in_clear(rank("decode-0"))


def config(failpoint: Failpoint = unobserved, *, silence_s: float = SILENCE_S) -> LinkConfig:
    """Return the link configuration of either side."""
    pool = KVPool(LAYOUT, num_blocks=NUM_BLOCKS, device=torch.device("cpu"))
    return LinkConfig(
        rank=0,
        identity=_IDENTITY,
        pool=pool,
        wire_dtype="raw",
        backend="tcp",
        host="127.0.0.1",
        timeout_s=silence_s,
        guard=LinkGuard(bytes(32)),
        failpoint=failpoint,
    )


@dataclass
class ReceivingProcess:
    """Receiver with handoffs "h0", "h1", … open for all blocks. They must be sent one after the other."""

    address: str
    process: BaseProcess

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)


@contextmanager
def receiving_process(port: int = 0) -> Iterator[ReceivingProcess]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # takes seconds; grpc must not be imported before a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(port, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(30), "the receiving process did not start"
        yield ReceivingProcess(ours.recv(), process)
    finally:
        process.kill()
        process.join(10)


def _serve(port: int, ready: Connection) -> None:
    asyncio.run(_serve_forever(port, ready))


async def _serve_forever(port: int, ready: Connection) -> None:
    servicer = RankServicer()
    servicer.receiver = Receiver(config(), rendezvous=servicer.rendezvous, on_landed=lambda landing: None)
    num_tokens = NUM_BLOCKS * LAYOUT.block_size
    for i in range(8):
        servicer.receiver.open(
            Opening(handoff=f"h{i}", num_tokens=num_tokens, max_tokens=num_tokens, block_ids=tuple(range(NUM_BLOCKS)))
        )
    server = make_server(_IDENTITY)
    rpc.add_RankServicer_to_server(servicer, server)
    ready.send(f"127.0.0.1:{listen(server, f'127.0.0.1:{port}', _IDENTITY)}")
    await server.start()
    await server.wait_for_termination()
