"""Sender to receiver over real gRPC and real links, in one process: KV lands completely or is rejected."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from core.types.errors import HandoffExpired, LayoutMismatch, LinkClosed, TransferError
from core.types.handoff import Handoff
from engine.kv.layout import KVLayout
from kvtransfer.links.backends import LINKS
from kvtransfer.links.link import LinkEnd, Operation
from tests.kvtransfer.replicas import Replica, handoff_to, replica

_LAYOUT = KVLayout(model="m", num_layers=3, num_kv_heads=4, head_dim=16, block_size=8, dtype="float32")
# Four ranks split the second layer's heads and replicate the others, so some links carry one layer only.
_UNLIKE = replace(_LAYOUT, num_kv_heads=(2, 4, 1), head_dim=(32, 16, 64))
_NUM_TOKENS = 37
_CHUNKS = (10, 30, 37)
_OURS, _THEIRS = [5, 2, 9, 0, 7], [3, 1, 8, 11, 6]  # blocks


def _fill(side: Replica) -> list[torch.Tensor]:
    """Write random KV of every head at _OURS and return it: (2, heads, tokens, D) of each layer."""
    layout, generator = side.pools[0].layout, torch.Generator().manual_seed(1)
    whole = replace(layout, tensor_parallel=1).heads
    kv = [torch.randn(2, count, _NUM_TOKENS, dim, generator=generator) for count, dim in whole]
    positions = torch.arange(_NUM_TOKENS)
    slots = torch.tensor(_OURS)[positions // 8] * 8 + positions % 8
    for rank, pool in enumerate(side.pools):
        for layer, numbers in enumerate(kv):
            start, end = layout.head_range(layer, rank=rank)
            k, v = numbers[:, start:end].transpose(1, 2)
            pool.write(layer, slots, k, v)
    return kv


def _read(side: Replica, blocks: list[int], layer: int) -> list[torch.Tensor]:
    """Return the KV of a layer in the pool of each rank: (2, heads of the rank, tokens, D)."""
    return [pool.read(layer, torch.tensor(blocks), torch.float32)[:, :, :_NUM_TOKENS] for pool in side.pools]


def _has(side: Replica, kv: list[torch.Tensor]) -> bool:
    """Return whether every rank has its heads of `kv` at _THEIRS, of all layers."""
    layout = side.pools[0].layout
    return all(
        torch.equal(got, numbers[:, slice(*layout.head_range(layer, rank=rank))])
        for layer, numbers in enumerate(kv)
        for rank, got in enumerate(_read(side, _THEIRS, layer))
    )


def _handoff(side: Replica, **more: Any) -> Handoff:
    return handoff_to(side.addresses, _NUM_TOKENS, **more)


@pytest.mark.parametrize(
    ("layout", "group_bytes"), [(_LAYOUT, None), (_UNLIKE, None), (_UNLIKE, 1)], ids=["alike", "unlike", "one by one"]
)
@pytest.mark.parametrize("receiver_tp", [1, 2, 8])
@pytest.mark.parametrize("sender_tp", [1, 2, 8])
async def test_kv_lands_completely_for_any_pair_of_tensor_parallel_sizes(
    sender_tp: int, receiver_tp: int, layout: KVLayout, group_bytes: int | None
) -> None:
    async with replica(layout, sender_tp, group_bytes=group_bytes) as p, replica(layout, receiver_tp) as d:
        kv, handoff = _fill(p), _handoff(d)
        d.open(handoff, _THEIRS)
        p.ship(handoff, _OURS, chunks=_CHUNKS, next_tokens=[42, 43])
        landings = [await d.landed() for _ in d.receivers]
        assert {landing.handoff for landing in landings} == {"h"}
        assert sorted(landing.next_tokens for landing in landings)[-1] == (42, 43)
        assert _has(d, kv)


async def test_only_missing_positions_are_sent() -> None:
    async with replica(_LAYOUT) as p, replica(_LAYOUT) as d:
        kv, handoff = _fill(p), _handoff(d, first_token=16)
        d.open(handoff, _THEIRS)
        p.ship(handoff, _OURS, chunks=_CHUNKS)
        await d.landed()
        shipment = await p.shipped()
        for numbers in kv:
            numbers[..., :16, :] = 0
        assert _has(d, kv)
        num_payload_bytes = (_NUM_TOKENS - 16) * 3 * 2 * 4 * 16 * 4
        assert num_payload_bytes < shipment.wire_bytes < num_payload_bytes + 400
        assert shipment.error is None
        whole = handoff_to(d.addresses, 40, id="whole", first_token=40)  # only the commit is sent
        d.open(whole, _THEIRS)
        p.ship(whole, _OURS, chunks=(37, 40), next_tokens=[42])
        assert (await d.landed()).next_tokens == (42,)


async def test_transfer_is_aborted_and_a_newer_epoch_fences_an_older_one() -> None:
    async with replica(_LAYOUT) as p, replica(_LAYOUT) as d:
        kv = _fill(p)
        d.open(_handoff(d), _THEIRS)
        transfer = p.senders[0].begin(_handoff(d), _OURS)
        assert transfer
        transfer.layer_ready(0, 0, 20)
        transfer.abort()
        assert isinstance((await p.shipped()).error, TransferError)
        p.ship(_handoff(d, epoch=2), _OURS)
        assert (await d.landed()).epoch == 2 and (await p.shipped()).error is None
        p.ship(_handoff(d), _OURS)
        assert isinstance((await p.shipped()).error, HandoffExpired)
        assert _has(d, kv)


@pytest.mark.parametrize(
    "link",
    [
        "tcp",
        "gloo",
        pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")),
    ],
)
async def test_rejected_handoffs_write_nothing_and_do_not_affect_others_on_the_link(link: str) -> None:
    async with replica(_LAYOUT, link=link) as p, replica(_LAYOUT, link=link) as d:
        kv = _fill(p)
        closed, unopened, others = {"0", "4"}, {"2", "6"}, [2, 4, 5, 7, 9]
        for id in map(str, range(8)):
            if id not in unopened:
                d.open(_handoff(d, id=id), others if id in closed else _THEIRS)
            if id in closed:
                d.receivers[0].close(id)
            p.ship(_handoff(d, id=id), _OURS)
        assert sorted([(await d.landed()).handoff for _ in range(4)]) == ["1", "3", "5", "7"]
        errors = {shipment.handoff: shipment.error for shipment in [await p.shipped() for _ in range(8)]}
        assert {id for id, error in errors.items() if isinstance(error, HandoffExpired)} == closed | unopened
        assert _has(d, kv) and not any(_read(d, others, layer)[0].any() for layer in range(3))


@pytest.mark.parametrize(
    ("ours", "theirs", "what"),
    [
        ({}, {"layout": replace(_LAYOUT, block_size=16)}, "KV layout"),
        ({"layout": replace(_LAYOUT, dtype="int8")}, {"layout": replace(_LAYOUT, dtype="fp8_e4m3")}, "KV layout"),
        ({}, {"layout": replace(_LAYOUT, plain_layers=(0,))}, "KV layout"),
        ({}, {"layout": replace(_LAYOUT, head_dim=(16, 32, 16))}, "KV layout"),
        ({}, {"wire": "fp8_e4m3"}, "wire dtype"),
        ({}, {"link": "gloo"}, "link backend"),
        ({}, {"is_encrypted": True}, "link backend"),
    ],
)
async def test_another_layout_or_wire_is_refused_at_once(
    ours: dict[str, Any], theirs: dict[str, Any], what: str
) -> None:
    async with replica(**{"layout": _LAYOUT} | ours) as p, replica(**{"layout": _LAYOUT} | theirs) as d:
        _fill(p)
        p.ship(_handoff(d), _OURS)
        error = (await p.shipped()).error
        assert isinstance(error, LayoutMismatch) and what in str(error)


class FakeLink:
    """Link whose peer never connects, and whose operations never complete. `close` ends the wait for the peer."""

    backend = "fake"
    device = torch.device("cpu")
    num_buffers = 2

    def __init__(self, end: LinkEnd, *, has_peer: bool) -> None:
        self.end = end
        self.has_peer = has_peer
        self.meets, self.closed = threading.Event(), threading.Event()
        self.waited_s: list[float] = []

    def meet(self) -> None:
        self.meets.set()
        if not self.has_peer:
            self.closed.wait()
            raise LinkClosed("the link is closed")

    def send(self, payload: torch.Tensor) -> Operation:
        return self

    def recv(self, payload: torch.Tensor) -> Operation:
        return self

    def wait(self, *, timeout_s: float) -> None:
        self.waited_s.append(timeout_s)
        raise LinkClosed("nothing comes")

    def close(self) -> None:
        self.closed.set()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("is_making", [True, False], ids=["constructing", "connecting"])
async def test_both_ends_can_close_a_link_before_it_connects(is_making: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ends at once.

    Constructing a link may take long (NCCL is loaded first). It cannot be closed until then, but it must not connect.
    """
    begun, made, may_go = list[LinkEnd](), list[FakeLink](), threading.Event()

    def make(end: LinkEnd) -> FakeLink:
        begun.append(end)
        if is_making:
            may_go.wait()
        made.append(FakeLink(end, has_peer=False))
        return made[-1]

    monkeypatch.setitem(LINKS, "fake", make)
    try:
        async with replica(_LAYOUT, link="fake") as p:
            async with replica(_LAYOUT, link="fake") as d:
                p.ship(_handoff(d), _OURS)
                while len(begun) < 2 or not (is_making or sum(link.meets.is_set() for link in made) == 2):
                    await asyncio.sleep(0)
            assert isinstance((await p.shipped()).error, LinkClosed)
            may_go.set()
            while len(made) < 2:
                await asyncio.sleep(0)
            for link in made:
                assert await asyncio.to_thread(link.closed.wait, 10) and link.meets.is_set() != is_making
    finally:
        may_go.set()
        for link in made:
            link.close()


@pytest.mark.timeout(30)
async def test_operations_wait_at_most_until_their_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends use a deadline, because a peer may be frozen while its host still answers."""
    made: list[FakeLink] = []

    def make(end: LinkEnd) -> FakeLink:
        made.append(FakeLink(end, has_peer=True))
        return made[-1]

    monkeypatch.setitem(LINKS, "fake", make)
    async with replica(_LAYOUT, link="fake", timeout_s=10.0) as p, replica(_LAYOUT, link="fake", timeout_s=10.0) as d:
        while len({link.end.is_sender for link in made if link.waited_s}) < 2:
            p.ship(_handoff(d), _OURS)  # repeat in case one end failed before the other one started to wait
            assert isinstance((await p.shipped()).error, TransferError)
    assert all(waited_s <= 2 * link.end.timeout_s for link in made for waited_s in link.waited_s)
