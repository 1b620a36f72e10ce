"""Detection of dead and frozen receivers by a sender, without effect on other transfers."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from core.types.errors import HandoffExpired, LinkClosed, TransferError
from core.types.failpoint import FailpointStage
from core.types.handoff import Handoff
from engine.kv.layout import KVLayout
from kvtransfer.protocol.frames import Opening
from kvtransfer.transfer import outgoing_link
from tests.kvtransfer.replicas import END_S, FarReplica, Replica, far_replica, handoff_to, replica

_LAYOUT = KVLayout(model="m", num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, dtype="float32")
_NUM_BLOCKS = 512  # 32 MiB
_NUM_TOKENS = _NUM_BLOCKS * _LAYOUT.block_size
_BLOCKS = tuple(range(_NUM_BLOCKS))
_SILENCE_S = 3.0  # timeouts.transfer_s
_NEVER_S = 600.0  # timeout that does not expire within a test


@contextmanager
def _receiver(port: int = 0) -> Iterator[FarReplica]:
    """Serve a receiver with handoffs "h0", "h1", … open for all blocks. They must be sent one after the other."""
    openings = [
        Opening(handoff=f"h{i}", num_tokens=_NUM_TOKENS, max_tokens=_NUM_TOKENS, block_ids=_BLOCKS) for i in range(8)
    ]
    with far_replica(_LAYOUT, openings, num_blocks=_NUM_BLOCKS, port=port) as peer:
        yield peer


class Shipping:
    """A sender and the results of its handoffs. sending: handoff of each payload put on the wire."""

    def __init__(self, ours: Replica, sending: asyncio.Queue[str]) -> None:
        self.ours, self._sending = ours, sending

    def handoff(self, peer: FarReplica, number: int) -> Handoff:
        return handoff_to([peer.address], _NUM_TOKENS, id=f"h{number}")

    def ship(self, peer: FarReplica, number: int) -> None:
        self.ours.ship(self.handoff(peer, number), _BLOCKS)

    async def is_sending(self, number: int) -> None:
        async with asyncio.timeout(END_S):
            while await self._sending.get() != f"h{number}":
                pass

    async def error(self) -> TransferError | None:
        return (await self.ours.shipped()).error


@asynccontextmanager
async def _shipping(*, silence_s: float = _NEVER_S) -> AsyncIterator[Shipping]:
    loop, sending = asyncio.get_running_loop(), asyncio.Queue[str]()

    def failpoint(stage: FailpointStage, handoff: str) -> None:
        if stage is FailpointStage.SENDING:
            loop.call_soon_threadsafe(sending.put_nowait, handoff)

    async with replica(_LAYOUT, num_blocks=_NUM_BLOCKS, timeout_s=silence_s, failpoint=failpoint) as ours:
        yield Shipping(ours, sending)


async def test_killed_receiver_is_detected_at_once_and_fails_only_its_own_links() -> None:
    with _receiver() as victim, _receiver() as bystander:
        async with _shipping() as shipping:
            shipping.ship(victim, 0)
            shipping.ship(bystander, 2)
            assert [await shipping.error() for _ in range(2)] == [None, None]
            victim.signal(signal.SIGSTOP)  # so that the send cannot complete before the kill
            shipping.ship(victim, 1)
            await shipping.is_sending(1)
            victim.signal(signal.SIGKILL)
            shipment = await shipping.ours.shipped()
            assert shipment.handoff == "h1" and isinstance(shipment.error, LinkClosed)
            shipping.ship(bystander, 3)
            assert await shipping.error() is None


async def test_frozen_receiver_is_detected_by_the_deadline() -> None:
    with _receiver() as connected, _receiver() as pending_peer:
        async with _shipping(silence_s=_SILENCE_S) as shipping:
            shipping.ship(connected, 0)
            assert await shipping.error() is None
            for number, peer in enumerate((connected, pending_peer), start=1):
                peer.signal(signal.SIGSTOP)
                shipping.ship(peer, number)
            errors = [await shipping.error() for _ in range(2)]
            assert all(isinstance(error, LinkClosed) for error in errors)


async def test_transfer_is_aborted_at_once_while_the_link_is_stuck() -> None:
    with _receiver() as peer:
        async with _shipping() as shipping:
            shipping.ship(peer, 0)
            assert await shipping.error() is None
            peer.signal(signal.SIGSTOP)
            transfer = shipping.ours.senders[0].begin(shipping.handoff(peer, 1), _BLOCKS)
            assert transfer
            transfer.layer_ready(0, 0, _NUM_TOKENS)
            transfer.abort()
            assert isinstance(await shipping.error(), HandoffExpired), "not the link, and not its deadline"
            peer.signal(signal.SIGCONT)
            shipping.ship(peer, 2)
            assert await shipping.error() is None, "the link lives on"


async def test_link_that_fails_to_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handoffs fail, and the next handoff gets a new link."""
    num_threads = 0

    def thread(**more: Any) -> threading.Thread:
        nonlocal num_threads
        num_threads += 1
        if num_threads == 1:
            raise RuntimeError("can't start new thread")
        return threading.Thread(**more)

    monkeypatch.setattr(outgoing_link, "threading", SimpleNamespace(Lock=threading.Lock, Thread=thread))
    with _receiver() as peer:
        async with _shipping() as shipping:
            shipping.ship(peer, 0)
            error = await shipping.error()
            assert isinstance(error, LinkClosed) and "can't start new thread" in str(error)
            shipping.ship(peer, 1)
            assert await shipping.error() is None


async def test_restarted_receiver_is_reached_under_a_new_epoch() -> None:
    async with _shipping() as shipping:
        with _receiver() as first:
            shipping.ship(first, 0)
            assert await shipping.error() is None
        for _ in range(3):  # the first of them breaks the link, the others find nobody
            shipping.ship(first, 1)
            assert isinstance(await shipping.error(), LinkClosed)
        with _receiver(int(first.address.rsplit(":", 1)[1])) as second:
            shipping.ship(second, 2)
            assert await shipping.error() is None
