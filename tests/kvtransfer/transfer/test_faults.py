"""Detection of dead and frozen receivers by a sender, without effect on other transfers."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from core.types.errors import HandoffExpired, LinkClosed, TransferError
from core.types.failpoint import FailpointStage
from engine.kv.layout import KVLayout
from kvtransfer.protocol.frames import Opening
from kvtransfer.transfer import outgoing_link
from tests.kvtransfer.replicas import END_S, FarReplica, Replica, far_replica, handoff_to, replica

_LAYOUT = KVLayout(model="m", num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, dtype="float32")
_NUM_BLOCKS = 512  # 32 MiB
_NUM_TOKENS = _NUM_BLOCKS * _LAYOUT.block_size
_BLOCKS = tuple(range(_NUM_BLOCKS))
_SILENCE_S = 3.0  # timeouts.transfer_s


@contextmanager
def _receiver(port: int = 0) -> Iterator[FarReplica]:
    """Serve a receiver with handoffs "h0", "h1", … open for all blocks. They must be sent one after the other."""
    openings = [
        Opening(handoff=f"h{i}", num_tokens=_NUM_TOKENS, max_tokens=_NUM_TOKENS, block_ids=_BLOCKS) for i in range(8)
    ]
    with far_replica(_LAYOUT, openings, num_blocks=_NUM_BLOCKS, port=port) as peer:
        yield peer


def _ship(ours: Replica, peer: FarReplica, number: int) -> None:
    ours.ship(handoff_to([peer.address], _NUM_TOKENS, id=f"h{number}"), _BLOCKS)


async def _error(ours: Replica) -> TransferError | None:
    return (await ours.shipped()).error


def _sender(**config: Any) -> AbstractAsyncContextManager[Replica]:
    """Serve a sender. Its timeout does not expire within a test, unless it is given."""
    return replica(_LAYOUT, num_blocks=_NUM_BLOCKS, **{"timeout_s": 600.0} | config)


async def test_killed_receiver_is_detected_at_once_and_fails_only_its_own_links() -> None:
    is_sending, loop = asyncio.Event(), asyncio.get_running_loop()

    def failpoint(stage: FailpointStage, handoff: str) -> None:
        if stage is FailpointStage.SENDING and handoff == "h1":
            loop.call_soon_threadsafe(is_sending.set)

    with _receiver() as victim, _receiver() as bystander:
        async with _sender(failpoint=failpoint) as ours:
            _ship(ours, victim, 0)
            _ship(ours, bystander, 2)
            assert [await _error(ours) for _ in range(2)] == [None, None]
            victim.signal(signal.SIGSTOP)  # so that the send cannot complete before the kill
            _ship(ours, victim, 1)
            async with asyncio.timeout(END_S):
                await is_sending.wait()
            victim.signal(signal.SIGKILL)
            shipment = await ours.shipped()
            assert shipment.handoff == "h1" and isinstance(shipment.error, LinkClosed)
            _ship(ours, bystander, 3)
            assert await _error(ours) is None


async def test_frozen_receiver_is_detected_by_the_deadline() -> None:
    with _receiver() as connected, _receiver() as pending_peer:
        async with _sender(timeout_s=_SILENCE_S) as ours:
            _ship(ours, connected, 0)
            assert await _error(ours) is None
            for number, peer in enumerate((connected, pending_peer), start=1):
                peer.signal(signal.SIGSTOP)
                _ship(ours, peer, number)
            errors = [await _error(ours) for _ in range(2)]
            assert all(isinstance(error, LinkClosed) for error in errors)


async def test_transfer_is_aborted_at_once_while_the_link_is_stuck() -> None:
    with _receiver() as peer:
        async with _sender() as ours:
            _ship(ours, peer, 0)
            assert await _error(ours) is None
            peer.signal(signal.SIGSTOP)
            transfer = ours.senders[0].begin(handoff_to([peer.address], _NUM_TOKENS, id="h1"), _BLOCKS)
            assert transfer
            transfer.layer_ready(0, 0, _NUM_TOKENS)
            transfer.abort()
            assert isinstance(await _error(ours), HandoffExpired), "not the link, and not its deadline"
            peer.signal(signal.SIGCONT)
            _ship(ours, peer, 2)
            assert await _error(ours) is None, "the link lives on"


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
        async with _sender() as ours:
            _ship(ours, peer, 0)
            error = await _error(ours)
            assert isinstance(error, LinkClosed) and "can't start new thread" in str(error)
            _ship(ours, peer, 1)
            assert await _error(ours) is None


async def test_restarted_receiver_is_reached_under_a_new_epoch() -> None:
    async with _sender() as ours:
        with _receiver() as first:
            _ship(ours, first, 0)
            assert await _error(ours) is None
        for _ in range(3):  # the first breaks the link, the others find no listener
            _ship(ours, first, 1)
            assert isinstance(await _error(ours), LinkClosed)
        with _receiver(int(first.address.rsplit(":", 1)[1])) as second:
            _ship(ours, second, 2)
            assert await _error(ours) is None
