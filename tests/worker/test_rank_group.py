"""Calls of rank 0 to other ranks take effect after the steps that it has broadcast before."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from core.rpc import transfer_pb2_grpc as rpc
from core.types.errors import TransferError
from core.wire.channel import listen, make_server
from engine.scheduler.step_commands import Orders
from kvtransfer.protocol.frames import Opening
from kvtransfer.transfer.rank_servicer import RankServicer, StepCount
from tests.support.identities import in_clear
from tests.support.identities import rank as named
from tests.worker.rank_of_one import FakeSender
from worker.gang_runner import GangRunner
from worker.rank_group import OtherRanks

_OPENING = Opening(handoff="h", num_tokens=4, max_tokens=4, block_ids=(2,))


class FakeRank:
    """Fake runner, process group and receiver of a rank that records the operations on its blocks in order."""

    size, has_scales, num_blocks, heads, max_drafted = 2, False, 12, None, 0

    def __init__(self, broadcasts: deque[bytes]) -> None:
        self.did: list[object] = []
        self.parallel = self.pool = self
        self.layout = SimpleNamespace(block_size=4, tensor_parallel=2)
        self.config = SimpleNamespace(vocab_size=100, max_context=64)
        self._broadcasts = broadcasts

    def broadcast_bytes(self, data: bytes | None = None) -> bytes:
        if data is None:
            return self._broadcasts.popleft()
        self._broadcasts.append(data)
        return data

    def settle(self) -> None:
        pass

    def copy(self, orders: Orders) -> None:
        self.did += orders.copies + orders.state_copies

    def checked(self, opening: Opening) -> Opening:
        return opening

    def open(self, opening: Opening) -> None:
        self.did.append(opening.handoff)


class SeenWaiting(StepCount):
    """Step count that reports when a thread waits on it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def wait_for(self, number: int, *, timeout_s: float) -> None:
        self._loop.call_soon_threadsafe(self.is_asked.set)
        super().wait_for(number, timeout_s=timeout_s)


def _gang_runner(rank: FakeRank, steps: StepCount) -> GangRunner:
    stand_ins: Any = rank, FakeSender()
    return GangRunner(*stand_ins, None, steps=steps)


async def test_open_on_a_rank_waits_for_earlier_steps() -> None:
    """A late block copy must not overwrite data of a peer.

    A fork copies a block and ends at once, and its block is opened for a peer, on a rank that has not copied yet.
    """
    broadcasts: deque[bytes] = deque()
    broadcast, carried_out = StepCount(), SeenWaiting()
    leading, following = FakeRank(broadcasts), FakeRank(broadcasts)
    servicer, identity = RankServicer(carried_out), in_clear(named("decode-0", 1))
    servicer.receiver = following  # type: ignore[assignment]
    server = make_server(identity)
    rpc.add_RankServicer_to_server(servicer, server)
    address = f"127.0.0.1:{listen(server, '127.0.0.1:0', identity)}"
    await server.start()
    others = OtherRanks(["", address], identity=in_clear(named("decode-0", 0)), steps=broadcast, timeout_s=30.0)
    try:
        leader = _gang_runner(leading, broadcast)
        leader.execute(None, Orders(copies=[(1, 2)]))
        opening, asked = asyncio.create_task(others.open(_OPENING)), asyncio.create_task(carried_out.is_asked.wait())
        await asyncio.wait({opening, asked}, return_when=asyncio.FIRST_COMPLETED)
        assert following.did == []
        leader.execute(None, Orders(stop=True))
        _gang_runner(following, carried_out).follow()
        await opening
        assert following.did == [(1, 2), "h"]
    finally:
        await others.disconnect()
        await server.stop(None)


def test_wait_for_a_lagging_rank_times_out() -> None:
    steps = StepCount()
    steps.add()
    steps.wait_for(1, timeout_s=0.0)
    with pytest.raises(TransferError, match="executed 1 of 2 steps"):
        steps.wait_for(2, timeout_s=0.0)
