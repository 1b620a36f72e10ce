"""Sender to receiver over real gRPC and real links, in one process: KV lands completely or is rejected."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from grpc import aio

from core.rpc import transfer_pb2_grpc as rpc
from core.types.errors import HandoffExpired, LayoutMismatch, LinkClosed, TransferError
from core.types.handoff import Handoff
from core.wire.channel import listen, make_server
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from kvtransfer.links.backends import LINKS
from kvtransfer.links.link import LinkEnd, LinkGuard, Operation
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.rank_servicer import RankServicer
from kvtransfer.transfer.receiver import Receiver
from kvtransfer.transfer.sender import Sender
from tests.support.identities import in_clear
from tests.support.identities import rank as named

_CPU = torch.device("cpu")
_LAYOUT = KVLayout(model="m", num_layers=3, num_kv_heads=4, head_dim=16, block_size=8, dtype="float32")
# Four ranks split the second layer's heads and replicate the others, so some links carry one layer only.
_UNLIKE = replace(_LAYOUT, num_kv_heads=(2, 4, 1), head_dim=(32, 16, 64))
_NUM_TOKENS = 37
_SECRET = bytes(range(32))
_BLOCKS = [5, 2, 9, 0, 7]


class Side:
    """Ranks of one replica, on one side of a transfer."""

    def __init__(self) -> None:
        self.landings: asyncio.Queue[Landing] = asyncio.Queue()
        self.shipments: asyncio.Queue[Shipment] = asyncio.Queue()
        self.senders: list[Sender] = []
        self.receivers: list[Receiver] = []
        self.servers: list[aio.Server] = []
        self.addresses: list[str] = []

    def open(self, handoff: Handoff, blocks: list[int]) -> None:
        first_block = handoff.first_token // _LAYOUT.block_size
        opening = Opening(
            handoff=handoff.id,
            first_token=handoff.first_token,
            num_tokens=handoff.num_tokens,
            max_tokens=handoff.max_tokens,
            block_ids=tuple(blocks[first_block:]),
        )
        for receiver in self.receivers:
            receiver.open(opening)

    async def landed(self) -> Landing:
        return await asyncio.wait_for(self.landings.get(), 10)

    async def shipped(self) -> Shipment:
        return await asyncio.wait_for(self.shipments.get(), 10)


def _layout(tp: int) -> KVLayout:
    return replace(_LAYOUT, tensor_parallel=tp)


@asynccontextmanager
async def _replica(
    tp: int,
    *,
    wire: str = "raw",
    link: str = "tcp",
    is_encrypted: bool = False,
    layout: KVLayout = _LAYOUT,
    timeout_s: float = 10.0,
    group_bytes: int | None = None,
) -> AsyncIterator[Side]:
    side, loop = Side(), asyncio.get_running_loop()
    for rank in range(tp):
        pool = KVPool(replace(layout, tensor_parallel=tp), num_blocks=12, device=_CPU)
        identity = in_clear(named("prefill-0", rank))
        config = LinkConfig(
            rank=rank,
            identity=identity,
            pool=pool,
            wire_dtype=wire,
            backend=link,
            host="127.0.0.1",
            timeout_s=timeout_s,
            guard=LinkGuard(_SECRET, is_encrypted),
        )
        servicer = RankServicer()
        servicer.receiver = Receiver(
            config,
            rendezvous=servicer.rendezvous,
            on_landed=lambda x: loop.call_soon_threadsafe(side.landings.put_nowait, x),
        )
        side.receivers.append(servicer.receiver)
        side.senders.append(
            Sender(
                config,
                loop=loop,
                on_shipped=lambda x: loop.call_soon_threadsafe(side.shipments.put_nowait, x),
                group_bytes=group_bytes,
            )
        )
        server = make_server(identity)
        rpc.add_RankServicer_to_server(servicer, server)
        side.addresses.append(f"127.0.0.1:{listen(server, '127.0.0.1:0', identity)}")
        await server.start()
        side.servers.append(server)
    try:
        yield side
    finally:
        for sender in side.senders:
            await sender.close()
        for server in side.servers:
            await server.stop(None)


def _fill(side: Side) -> list[torch.Tensor]:
    """Write random KV of every head at _BLOCKS and return it: (2, heads, tokens, D) of each layer."""
    layout, generator = side.senders[0].config.pool.layout, torch.Generator().manual_seed(1)
    whole = replace(layout, tensor_parallel=1).heads
    kv = [torch.randn(2, count, _NUM_TOKENS, dim, generator=generator) for count, dim in whole]
    positions = torch.arange(_NUM_TOKENS)
    slots = torch.tensor(_BLOCKS)[positions // 8] * 8 + positions % 8
    for sender in side.senders:
        for layer, numbers in enumerate(kv):
            start, end = layout.head_range(layer, rank=sender.config.rank)
            k, v = numbers[:, start:end].transpose(1, 2)
            sender.config.pool.write(layer, slots, k, v)
    return kv


def _read(side: Side, blocks: list[int], layer: int) -> list[torch.Tensor]:
    """Return the KV of a layer in the pool of each rank: (2, heads of the rank, tokens, D)."""
    pools = (receiver.config.pool for receiver in side.receivers)
    return [pool.read(layer, torch.tensor(blocks), torch.float32)[:, :, :_NUM_TOKENS] for pool in pools]


def _has(side: Side, blocks: list[int], kv: list[torch.Tensor]) -> bool:
    """Return whether every rank has its heads of `kv`, of all layers."""
    layout = side.receivers[0].config.pool.layout
    return all(
        torch.equal(got, numbers[:, slice(*layout.head_range(layer, rank=rank))])
        for layer, numbers in enumerate(kv)
        for rank, got in enumerate(_read(side, blocks, layer))
    )


def _handoff(side: Side, *, first_token: int = 0, epoch: int = 1, id: str = "h") -> Handoff:
    return Handoff(
        id=id,
        epoch=epoch,
        replica="d",
        ranks=tuple(side.addresses),
        layout=_LAYOUT.fingerprint,
        num_tokens=_NUM_TOKENS,
        max_tokens=_NUM_TOKENS,
        first_token=first_token,
        ttl_s=10,
    )


def _ship(side: Side, handoff: Handoff, *, chunks: tuple[int, ...] = (_NUM_TOKENS,), commit: bool = True) -> None:
    """Ship a prompt by chunk and layer, as the step loop does."""
    for sender in side.senders:
        transfer = sender.begin(handoff, _BLOCKS)
        if transfer is None:
            continue
        start = 0
        for end in chunks:
            for layer in range(_LAYOUT.num_layers):
                transfer.layer_ready(layer, start, end)
            start = end
        if commit:
            transfer.commit(handoff.num_tokens, [42, 43])


@pytest.mark.parametrize(
    ("layout", "group_bytes"), [(_LAYOUT, None), (_UNLIKE, None), (_UNLIKE, 1)], ids=["alike", "unlike", "one by one"]
)
@pytest.mark.parametrize("receiver_tp", [1, 2, 8])
@pytest.mark.parametrize("sender_tp", [1, 2, 8])
async def test_kv_lands_completely_for_any_pair_of_tensor_parallel_sizes(
    sender_tp: int, receiver_tp: int, layout: KVLayout, group_bytes: int | None
) -> None:
    async with (
        _replica(sender_tp, layout=layout, group_bytes=group_bytes) as p,
        _replica(receiver_tp, layout=layout) as d,
    ):
        kv, handoff, blocks = _fill(p), _handoff(d), [3, 1, 8, 11, 6]
        d.open(handoff, blocks)
        _ship(p, handoff, chunks=(10, 30, 37))
        landings = [await d.landed() for _ in d.receivers]
        assert {landing.handoff for landing in landings} == {"h"}
        assert sorted(landing.next_tokens for landing in landings)[-1] == (42, 43)
        assert _has(d, blocks, kv)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize(("sender_tp", "receiver_tp"), [(1, 1), (2, 1), (1, 4)])
async def test_quantized_pool_lands_bit_exact(sender_tp: int, receiver_tp: int, dtype: str) -> None:
    """The pool's codes and scales are sent unchanged, for any wire dtype."""
    layout, blocks = replace(_UNLIKE, dtype=dtype), [3, 1, 8, 11, 6]
    async with (
        _replica(sender_tp, wire="fp8_e4m3", layout=layout) as p,
        _replica(receiver_tp, wire="fp8_e4m3", layout=layout) as d,
    ):
        _fill(p)
        d.open(_handoff(d), blocks)
        _ship(p, _handoff(d), chunks=(10, 30, 37))
        for _ in d.receivers:
            await d.landed()
        # Two ranks replicate the last layer's only head.
        kv = [torch.cat(_read(p, _BLOCKS, layer), dim=1)[:, :count] for layer, count in enumerate(layout.kv_heads)]
        assert _has(d, blocks, kv) and all(numbers.any() for numbers in kv)
        if sender_tp == receiver_tp:
            sent, landed = p.receivers[0].config.pool.copy_out(_BLOCKS), d.receivers[0].config.pool.copy_out(blocks)
            assert torch.equal(landed, sent)


async def test_only_missing_positions_are_sent() -> None:
    async with _replica(1) as p, _replica(1) as d:
        kv = _fill(p)
        d.open(_handoff(d, first_token=16), [3, 1, 8, 11, 6])
        _ship(p, _handoff(d, first_token=16), chunks=(10, 30, 37))
        await d.landed()
        shipment = await p.shipped()
        for numbers in kv:
            numbers[..., :16, :] = 0
        assert _has(d, [3, 1, 8, 11, 6], kv)
        num_payload_bytes = (_NUM_TOKENS - 16) * 3 * 2 * 4 * 16 * 4
        assert num_payload_bytes < shipment.wire_bytes < num_payload_bytes + 400
        assert shipment.error is None


async def test_a_receiver_that_has_everything_gets_only_the_commit() -> None:
    async with _replica(1) as p, _replica(1) as d:
        handoff = replace(_handoff(d), first_token=40, num_tokens=40, max_tokens=40)
        d.open(handoff, [1, 2, 3, 4, 5])
        _ship(p, handoff, chunks=(37, 40))
        assert (await d.landed()).next_tokens == (42, 43)


async def test_closed_handoff_is_rejected_and_its_blocks_are_unchanged() -> None:
    async with _replica(1) as p, _replica(1) as d:
        _fill(p)
        d.open(_handoff(d), [3, 1, 8, 11, 6])
        d.receivers[0].close("h")
        _ship(p, _handoff(d))
        assert isinstance((await p.shipped()).error, HandoffExpired)
        assert not any(read.any() for layer in range(3) for read in _read(d, [3, 1, 8, 11, 6], layer))


async def test_a_newer_epoch_fences_an_older_one() -> None:
    async with _replica(1) as p, _replica(1) as d:
        kv = _fill(p)
        d.open(_handoff(d), [3, 1, 8, 11, 6])
        _ship(p, _handoff(d, epoch=1), chunks=(10,), commit=False)
        _ship(p, _handoff(d, epoch=2))
        landing = await d.landed()
        assert landing.epoch == 2
        assert _has(d, [3, 1, 8, 11, 6], kv)
        _ship(p, _handoff(d, epoch=1))
        assert {type((await p.shipped()).error) for _ in range(2)} == {type(None), HandoffExpired}


@pytest.mark.parametrize(
    "link",
    [
        "tcp",
        "gloo",
        pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")),
    ],
)
async def test_rejected_handoff_does_not_affect_others_on_the_link(link: str) -> None:
    async with _replica(1, link=link) as p, _replica(1, link=link) as d:
        kv = _fill(p)
        for i in range(8):
            if i % 2:
                d.open(_handoff(d, id=str(i)), [3, 1, 8, 11, 6])
            _ship(p, _handoff(d, id=str(i)))
        assert sorted([(await d.landed()).handoff for _ in range(4)]) == ["1", "3", "5", "7"]
        errors = [(await p.shipped()).error for _ in range(8)]
        assert sum(isinstance(error, HandoffExpired) for error in errors) == 4
        assert _has(d, [3, 1, 8, 11, 6], kv)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {"block_size": 16}),
        ({"dtype": "int8"}, {"dtype": "fp8_e4m3"}),
        ({}, {"plain_layers": (0,)}),
        ({}, {"head_dim": (16, 32, 16)}),
    ],
    ids=str,
)
async def test_another_layout_is_refused_at_once(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    async with (
        _replica(1, layout=replace(_LAYOUT, **ours)) as p,
        _replica(1, layout=replace(_LAYOUT, **theirs)) as d,
    ):
        _fill(p)
        _ship(p, _handoff(d))
        error = (await p.shipped()).error
        assert isinstance(error, LayoutMismatch) and "KV layout" in str(error)


@pytest.mark.parametrize(
    ("theirs", "what"),
    [
        ({"wire": "fp8_e4m3"}, "wire dtype"),
        ({"link": "gloo"}, "link backend"),
        ({"is_encrypted": True}, "link backend"),
    ],
    ids=str,
)
async def test_another_wire_is_refused_at_once(theirs: dict[str, Any], what: str) -> None:
    async with _replica(1, **theirs) as p, _replica(1) as d:
        _fill(p)
        _ship(p, _handoff(d))
        assert what in str((await p.shipped()).error)


async def test_shipment_to_a_missing_receiver_fails_and_a_later_one_succeeds() -> None:
    async with _replica(1) as p:
        kv = _fill(p)
        async with _replica(1) as gone:
            dead = _handoff(gone)
        _ship(p, dead)
        assert isinstance((await p.shipped()).error, LinkClosed)
        async with _replica(1) as d:
            d.open(_handoff(d), [3, 1, 8, 11, 6])
            _ship(p, _handoff(d))
            assert (await p.shipped()).error is None
            assert _has(d, [3, 1, 8, 11, 6], kv)


async def test_aborted_transfer_ends_and_the_link_stays_open() -> None:
    async with _replica(1) as p, _replica(1) as d:
        kv = _fill(p)
        d.open(_handoff(d), [3, 1, 8, 11, 6])
        transfer = p.senders[0].begin(_handoff(d), _BLOCKS)
        assert transfer
        transfer.layer_ready(0, 0, 20)
        transfer.abort()
        assert isinstance((await p.shipped()).error, TransferError)
        _ship(p, _handoff(d, epoch=2))
        assert (await d.landed()).epoch == 2
        assert _has(d, [3, 1, 8, 11, 6], kv)


class WaitingLink:
    """Link whose peer never connects. Only `close` ends the wait."""

    backend = "waiting"
    device = _CPU
    num_buffers = 2

    def __init__(self, end: LinkEnd) -> None:
        self.meets, self.closed = threading.Event(), threading.Event()

    def meet(self) -> None:
        self.meets.set()
        self.closed.wait()
        raise LinkClosed("the link is closed")

    def send(self, payload: torch.Tensor) -> Operation:
        raise NotImplementedError

    def recv(self, payload: torch.Tensor) -> Operation:
        raise NotImplementedError

    def close(self) -> None:
        self.closed.set()


@pytest.mark.timeout(30)
async def test_both_ends_can_close_a_connecting_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners can close the link while it connects, so its thread ends at once."""
    made: list[WaitingLink] = []

    def make(end: LinkEnd) -> WaitingLink:
        made.append(WaitingLink(end))
        return made[-1]

    monkeypatch.setitem(LINKS, "waiting", make)
    async with _replica(1, link="waiting") as p:
        async with _replica(1, link="waiting") as d:
            _ship(p, _handoff(d))
            while len(made) < 2 or not all(link.meets.is_set() for link in made):
                await asyncio.sleep(0)
        assert isinstance((await p.shipped()).error, LinkClosed)
        for link in made:
            assert await asyncio.to_thread(link.closed.wait, 10)


@pytest.mark.timeout(30)
async def test_link_is_not_connected_if_its_owner_closed_during_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constructing a link may take long (NCCL is loaded first), and it cannot be closed until then."""
    making: list[None] = []
    may_go = threading.Event()
    made: list[WaitingLink] = []

    def make(end: LinkEnd) -> WaitingLink:
        making.append(None)
        may_go.wait()
        made.append(WaitingLink(end))
        return made[-1]

    monkeypatch.setitem(LINKS, "waiting", make)
    try:
        async with _replica(1, link="waiting") as p:
            async with _replica(1, link="waiting") as d:
                _ship(p, _handoff(d))
                while len(making) < 2:
                    await asyncio.sleep(0)
            assert isinstance((await p.shipped()).error, LinkClosed)
            may_go.set()
            while len(made) < 2:
                await asyncio.sleep(0)
            for link in made:
                assert await asyncio.to_thread(link.closed.wait, 10) and not link.meets.is_set()
    finally:
        may_go.set()
        for link in made:
            link.close()


class ToldLink:
    """Link that never completes an operation, and records the timeouts. Implements Operation, too."""

    backend = "told"
    device = _CPU
    num_buffers = 2

    def __init__(self, end: LinkEnd) -> None:
        self.end = end
        self.waited_s: list[float] = []

    def meet(self) -> None: ...

    def send(self, payload: torch.Tensor) -> Operation:
        return self

    def recv(self, payload: torch.Tensor) -> Operation:
        return self

    def wait(self, *, timeout_s: float) -> None:
        self.waited_s.append(timeout_s)
        raise LinkClosed("nothing comes")

    def close(self) -> None: ...


@pytest.mark.timeout(30)
async def test_operations_wait_at_most_until_their_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends use a deadline, because a peer may be frozen while its host still answers."""
    made: list[ToldLink] = []

    def make(end: LinkEnd) -> ToldLink:
        made.append(ToldLink(end))
        return made[-1]

    monkeypatch.setitem(LINKS, "told", make)
    async with _replica(1, link="told") as p, _replica(1, link="told") as d:
        while len({link.end.is_sender for link in made if link.waited_s}) < 2:
            _ship(p, _handoff(d))  # repeat in case one end failed before the other one started to wait
            assert isinstance((await p.shipped()).error, TransferError)
    assert all(waited_s <= 2 * link.end.timeout_s for link in made for waited_s in link.waited_s)
