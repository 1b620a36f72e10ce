"""Detection of dead and frozen receivers by a sender, without effect on other transfers."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from core.types.errors import HandoffExpired, LinkClosed
from core.types.failpoint import FailpointStage
from core.types.handoff import Handoff
from kvtransfer.protocol.rank_transfer import RankTransfer, Shipment
from kvtransfer.transfer import outgoing_link
from kvtransfer.transfer.sender import Sender
from tests.kvtransfer.transfer.receiving_process import (
    LAYOUT,
    NUM_BLOCKS,
    SILENCE_S,
    ReceivingProcess,
    config,
    receiving_process,
)

_NUM_TOKENS = NUM_BLOCKS * LAYOUT.block_size
_END_S = 40.0  # bound for events that must happen, on any machine
_NEVER_S = 600.0  # timeout that does not expire within a test


class Shipping:
    """A sender and the results of its handoffs."""

    def __init__(self, silence_s: float) -> None:
        self.shipments: asyncio.Queue[Shipment] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.sending: asyncio.Queue[str] = asyncio.Queue()  # handoff of each payload put on the wire

        def failpoint(milestone: FailpointStage, handoff: str) -> None:
            if milestone is FailpointStage.SENDING:
                loop.call_soon_threadsafe(self.sending.put_nowait, handoff)

        self.sender = Sender(
            config(failpoint, silence_s=silence_s),
            loop=loop,
            on_shipped=lambda shipment: loop.call_soon_threadsafe(self.shipments.put_nowait, shipment),
        )

    def begin(self, peer: ReceivingProcess, number: int) -> RankTransfer:
        handoff = Handoff(
            id=f"h{number}",
            epoch=1,
            replica="d",
            ranks=(peer.address,),
            layout=LAYOUT.fingerprint,
            num_tokens=_NUM_TOKENS,
            max_tokens=_NUM_TOKENS,
            first_token=0,
            ttl_s=10.0,
        )
        transfer = self.sender.begin(handoff, range(NUM_BLOCKS))
        assert transfer
        return transfer

    def ship(self, peer: ReceivingProcess, number: int) -> None:
        transfer = self.begin(peer, number)
        for layer in range(LAYOUT.num_layers):
            transfer.layer_ready(layer, 0, _NUM_TOKENS)
        transfer.commit(_NUM_TOKENS, [1])

    async def is_sending(self, number: int) -> None:
        while await asyncio.wait_for(self.sending.get(), _END_S) != f"h{number}":
            pass

    async def ended(self) -> Shipment:
        return await asyncio.wait_for(self.shipments.get(), _END_S)


@asynccontextmanager
async def _shipping(*, silence_s: float = _NEVER_S) -> AsyncIterator[Shipping]:
    shipping = Shipping(silence_s)
    yield shipping
    await shipping.sender.close()


async def test_killed_receiver_is_detected_at_once_and_fails_only_its_own_links() -> None:
    with receiving_process() as victim, receiving_process() as bystander:
        async with _shipping() as shipping:
            shipping.ship(victim, 0)
            shipping.ship(bystander, 2)
            assert [(await shipping.ended()).error for _ in range(2)] == [None, None]
            victim.signal(signal.SIGSTOP)  # so that the send cannot complete before the kill
            shipping.ship(victim, 1)
            await shipping.is_sending(1)
            victim.signal(signal.SIGKILL)
            shipment = await shipping.ended()
            assert shipment.handoff == "h1" and isinstance(shipment.error, LinkClosed)
            shipping.ship(bystander, 3)
            assert (await shipping.ended()).error is None


async def test_frozen_receiver_is_detected_by_the_deadline() -> None:
    with receiving_process() as connected, receiving_process() as pending_peer:
        async with _shipping(silence_s=SILENCE_S) as shipping:
            shipping.ship(connected, 0)
            assert (await shipping.ended()).error is None
            for number, peer in enumerate((connected, pending_peer), start=1):
                peer.signal(signal.SIGSTOP)
                shipping.ship(peer, number)
            errors = [(await shipping.ended()).error for _ in range(2)]
            assert all(isinstance(error, LinkClosed) for error in errors)


async def test_transfer_is_aborted_at_once_while_the_link_is_stuck() -> None:
    with receiving_process() as peer:
        async with _shipping() as shipping:
            shipping.ship(peer, 0)
            assert (await shipping.ended()).error is None
            peer.signal(signal.SIGSTOP)
            transfer = shipping.begin(peer, 1)
            transfer.layer_ready(0, 0, _NUM_TOKENS)
            transfer.abort()
            assert isinstance((await shipping.ended()).error, HandoffExpired), "not the link, and not its deadline"
            peer.signal(signal.SIGCONT)
            shipping.ship(peer, 2)
            assert (await shipping.ended()).error is None, "the link lives on"


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
    with receiving_process() as peer:
        async with _shipping() as shipping:
            shipping.ship(peer, 0)
            error = (await shipping.ended()).error
            assert isinstance(error, LinkClosed) and "can't start new thread" in str(error)
            shipping.ship(peer, 1)
            assert (await shipping.ended()).error is None


async def test_restarted_receiver_is_reached_under_a_new_epoch() -> None:
    async with _shipping() as shipping:
        with receiving_process() as first:
            shipping.ship(first, 0)
            assert (await shipping.ended()).error is None
        for _ in range(3):
            shipping.ship(first, 1)
            assert isinstance((await shipping.ended()).error, LinkClosed)
        with receiving_process(int(first.address.rsplit(":", 1)[1])) as second:
            shipping.ship(second, 2)
            assert (await shipping.ended()).error is None
