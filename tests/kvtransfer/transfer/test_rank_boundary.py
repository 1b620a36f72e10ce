"""Invalid messages from other processes are rejected by field, or close their own link, without other effects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio
from torch.distributed import PrefixStore

from core.rpc import transfer_pb2 as pb
from core.rpc import transfer_pb2_grpc as rpc
from core.rpc import worker_pb2, worker_pb2_grpc
from core.types.errors import HandoffExpired, RequestError, TransferError
from core.types.handoff import Handoff
from core.wire.frames import FrameHub
from core.wire.messages import to_message
from engine.kv.layout import KVLayout
from engine.runner import streams
from kvtransfer.protocol.frames import Opening, SegmentFrame
from kvtransfer.protocol.plan import plan_heads
from kvtransfer.protocol.validation import check_segment
from kvtransfer.transfer.codec import slots_of
from kvtransfer.transfer.rank_servicer import RankServicer
from kvtransfer.transfer.receiver import Receiver
from kvtransfer.transfer.rendezvous import Rendezvous, local_store
from kvtransfer.transfer.serve_fetches import FetchServicer
from kvtransfer.transfer.wire_messages import frame_from_proto
from tests.kvtransfer.replicas import Replica, handoff_to, link_config, replica
from tests.support.identities import rank as named
from tests.support.waiting import becomes
from worker.replica_service import ReplicaService

_LAYOUT = KVLayout(model="m", num_layers=2, num_kv_heads=4, head_dim=16, block_size=8, dtype="float32")
_NUM_BLOCKS, _NUM_TOKENS = 12, 20
_ROW_BYTES = 2 * 4 * 16 * 4  # one position of one layer
_HELLO = link_config(_LAYOUT, name="prefill-9").hello(epoch=1)


class ServedRank:
    """A receiving rank and a client stub."""

    def __init__(self, made: Replica, stub: rpc.RankStub) -> None:
        self.made, self.stub = made, stub
        self.receiver, self.servicer = made.receivers[0], made.servicers[0]

    async def rejects(self, method: str, request: Any, field: str) -> bool:
        with pytest.raises(aio.AioRpcError) as raised:
            await getattr(self.stub, method)(request, timeout=10)
        is_named = field in (raised.value.details() or "")
        return raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT and is_named

    async def hears(self, *frames: pb.SenderFrame) -> list[str]:
        """Send these frames and return the kinds of the answers, until the rank ends the link."""
        has_ended = asyncio.Event()

        async def say() -> AsyncIterator[pb.SenderFrame]:
            for frame in frames:
                yield frame
            await has_ended.wait()

        answers: list[str] = []
        try:
            async for answer in self.stub.Connect(say(), timeout=60):
                answers.append(str(answer.WhichOneof("frame")))
        except aio.AioRpcError as error:  # the rank ended the call before all frames were sent
            assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        has_ended.set()
        return answers


@asynccontextmanager
async def _rank() -> AsyncIterator[ServedRank]:
    async with replica(_LAYOUT, name="decode-0") as made, aio.insecure_channel(made.addresses[0]) as channel:
        yield ServedRank(made, rpc.RankStub(channel))


@asynccontextmanager
async def _sender() -> AsyncIterator[Replica]:
    """Serve a sender with a pool full of 1.5."""
    async with replica(_LAYOUT, name="decode-0") as made:
        for codes in made.pools[0].codes:
            codes.fill_(1.5)
        yield made


def _segment(**changes: Any) -> pb.SenderFrame:
    segment = pb.Segment(handoff="h", epoch=1, num_layers=1, num_tokens=4, num_bytes=4 * _ROW_BYTES)
    for name, value in changes.items():
        setattr(segment, name, value)
    return pb.SenderFrame(segment=segment)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("block_ids", {"block_ids": [0, 999_999_999, 1]}),
        ("block_ids", {"block_ids": [0, 1, _NUM_BLOCKS]}),
        ("block_ids", {"block_ids": [0, 1]}),
        ("block_ids", {"block_ids": [0, 1, 1]}),
        ("block_ids", {"block_ids": list(range(13))}),
        ("first_token", {"first_token": 3}),
        ("num_tokens", {"first_token": 24}),
        ("num_tokens", {"num_tokens": 21}),
        ("num_tokens", {"max_tokens": 2**32 - 1}),
        ("block_ids", {"max_tokens": 2**30}),
        ("handoff", {"handoff": ""}),
        ("handoff", {"handoff": "x" * 5000}),
    ],
)
async def test_an_opening_of_blocks_that_there_are_not_is_refused(field: str, change: dict[str, Any]) -> None:
    async with _rank() as rank:
        assert await rank.rejects("Open", _opening(**change), field)
        with pytest.raises(HandoffExpired):
            rank.receiver.find("h")
        await rank.stub.Open(_opening(), timeout=10)
        assert rank.receiver.find("h")


def test_no_slot_is_made_of_a_block_that_is_not_in_the_pool() -> None:
    """This is the only bounds check before the kernels of engine/cpu/wire.h and of the GPU."""
    pool = link_config(_LAYOUT).pool
    assert slots_of(pool, [3, 1, 8], 4, 8).tolist() == [28, 29, 30, 31, 8, 9, 10, 11]
    for blocks in ([3, _NUM_BLOCKS], [3, -1], [3, 1 << 60], [3]):
        with pytest.raises(TransferError, match="are outside the pool"):
            slots_of(pool, blocks, 0, 16)
    opening = Opening(handoff="h", num_tokens=16, max_tokens=16, block_ids=(3, 999_999_999))
    receiver = Receiver(link_config(_LAYOUT), rendezvous=RankServicer().rendezvous, on_landed=lambda landing: None)
    with pytest.raises(TransferError):
        receiver.open(opening)


@pytest.mark.parametrize(
    "frame",
    [
        _segment(num_layers=3, num_bytes=12 * _ROW_BYTES),
        _segment(first_layer=2),
        _segment(first_layer=2**32 - 1),
        _segment(num_layers=0, num_bytes=0),
        _segment(num_tokens=0, num_bytes=0),
        _segment(num_tokens=2**32 - 1, num_bytes=(2**32 - 1) * _ROW_BYTES),
        _segment(first_token=_NUM_BLOCKS * 8),
        _segment(num_bytes=1 << 40),
        _segment(num_bytes=0),
        _segment(handoff=""),
        _segment(handoff="x" * 5000),
        pb.SenderFrame(commit=pb.Commit(handoff="h", epoch=1, num_tokens=_NUM_BLOCKS * 8 + 1)),
        pb.SenderFrame(commit=pb.Commit(handoff="h", epoch=1, next_tokens=[1] * 5000)),
        pb.SenderFrame(hello=_HELLO),
        pb.SenderFrame(),
    ],
    ids=lambda frame: str(frame).replace("\n", " ")[:60],
)
async def test_an_announcement_that_cannot_be_meant_ends_its_own_link(frame: pb.SenderFrame) -> None:
    async with _rank() as rank:
        await rank.stub.Open(_opening(), timeout=10)
        assert await rank.hears(pb.SenderFrame(hello=_HELLO), frame) == ["welcome"]
        assert not any(codes.any() for codes in rank.receiver.config.pool.codes)


def test_a_segment_of_layers_that_its_sender_has_no_heads_of_is_invalid() -> None:
    """Rank 1 of 4 sends a head of the first layer only; an empty payload would be sent for the second."""
    layout = replace(_LAYOUT, num_kv_heads=(4, 1))
    copies = plan_heads(sender=replace(layout, tensor_parallel=4), receiver=layout)
    (copy,) = [copy for copy in copies if copy.sender == 1]
    for first_layer, num_layers in ((0, 1), (0, 2), (1, 1)):
        frame = frame_from_proto(_segment(first_layer=first_layer, num_layers=num_layers))
        assert isinstance(frame, SegmentFrame)
        if first_layer == 0:
            check_segment(frame, layout, copy=copy, num_blocks=_NUM_BLOCKS)
        else:
            with pytest.raises(RequestError, match="must be of a layer that this rank sends heads of"):
                check_segment(frame, layout, copy=copy, num_blocks=_NUM_BLOCKS)


async def test_payloads_that_are_announced_and_never_come_do_not_pile_up() -> None:
    async with _rank() as rank:
        await rank.stub.Open(_opening(), timeout=10)
        frames = [_segment(number=number) for number in range(5000)]
        assert set(await rank.hears(pb.SenderFrame(hello=_HELLO), *frames)) <= {"welcome"}


@pytest.mark.parametrize(
    "changes",
    [
        {"sender_ranks": 3},
        {"sender_ranks": 0},
        {"sender_ranks": 2**32 - 1},
        {"sender_rank": 1},
        {"sender_rank": 2**32 - 1},
        {"sender": ""},
        {"sender": "x" * 5000},
        {"layout": "y" * 5000},
        {"wire_version": 2**32 - 1},
        {"backend": "../../etc"},
    ],
    ids=str,
)
async def test_a_greeting_that_fits_nothing_here_is_refused_and_learns_nothing(changes: dict[str, Any]) -> None:
    hello = pb.Hello.FromString(_HELLO.SerializeToString())
    for name, value in changes.items():
        setattr(hello, name, value)
    async with _rank() as rank:
        answers = [answer async for answer in rank.stub.Connect(iter([pb.SenderFrame(hello=hello)]), timeout=10)]
        assert [answer.WhichOneof("frame") for answer in answers] == ["rejected"]
        assert _LAYOUT.fingerprint not in answers[0].rejected.reason and len(answers[0].rejected.reason) < 2000


async def test_call_without_a_hello_ends() -> None:
    async with _rank() as rank:
        assert [answer async for answer in rank.stub.Connect(iter([]), timeout=10)] == []
        assert [a.WhichOneof("frame") async for a in rank.stub.Connect(iter([_segment()]), timeout=10)] == ["rejected"]


async def test_a_transfer_goes_on_beside_links_that_are_refused_or_broken_off() -> None:
    async with _rank() as rank, _sender() as sender:
        await rank.stub.Open(_opening(), timeout=10)
        transfer = sender.senders[0].begin(_handoff(rank.made.addresses), [0, 1, 2])
        assert transfer
        transfer.layer_ready(0, 0, _NUM_TOKENS)
        assert await rank.hears(pb.SenderFrame(hello=_HELLO), _segment(num_layers=9)) == ["welcome"]
        assert await rank.rejects("Open", pb.OpenRequest(handoff="x", block_ids=[1 << 30]), "block_ids")
        transfer.layer_ready(1, 0, _NUM_TOKENS)
        transfer.commit(_NUM_TOKENS, [7])
        await rank.made.landed()
        assert (await sender.shipped()).error is None
        assert (rank.receiver.config.pool.codes[1][[3, 1]] == 1.5).all()


class FakeDevice(streams.AtOnce):
    """Device that records the threads that use it, because each may block on it."""

    is_at_once = False

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def __getattribute__(self, name: str) -> Any:
        if name != "threads":
            self.threads.add(threading.get_ident())
        return super().__getattribute__(name)


async def test_event_loop_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may lag many steps behind, and waiting for it on the event loop would block every other call."""
    async with _rank() as rank, _sender() as sender:
        device = FakeDevice()
        monkeypatch.setattr(streams, "streams_of", lambda of: device)
        await rank.stub.Open(_opening(), timeout=10)
        assert device.threads, "slots were not brought to it"
        await asyncio.to_thread(sender.ship, _handoff(rank.made.addresses), [0, 1, 2])  # as the step thread does
        await rank.made.landed()
        await rank.stub.Close(pb.CloseRequest(handoff="h"), timeout=10)
    assert threading.get_ident() not in device.threads


async def test_only_the_replica_that_a_handoff_names_fills_it() -> None:
    """This holds even if another replica knows the handoff's id."""
    async with _rank() as rank, _sender() as sender:
        own = str(named("decode-0")).partition("/")[0]
        await rank.stub.Open(_opening(handoff="theirs", sender="prefill-3", block_ids=[2, 4, 5]), timeout=10)
        await rank.stub.Open(_opening(handoff="ours", sender=own), timeout=10)
        sender.ship(_handoff(rank.made.addresses, id="theirs"), [0, 1, 2])
        assert "another replica sends it" in str((await sender.shipped()).error)
        sender.ship(_handoff(rank.made.addresses, id="ours"), [0, 1, 2])
        assert (await sender.shipped()).error is None
        assert (await rank.made.landed()).handoff == "ours"
        pool = rank.receiver.config.pool
        assert all((codes[[3, 1]] == 1.5).all() and not codes[[2, 4, 5]].any() for codes in pool.codes)


def _opening(**changes: Any) -> pb.OpenRequest:
    fields = {"handoff": "h", "num_tokens": _NUM_TOKENS, "max_tokens": _NUM_TOKENS, "block_ids": [3, 1, 8]}
    return pb.OpenRequest(**fields | changes)


def _handoff(ranks: list[str], *, id: str = "h") -> Handoff:
    return handoff_to(ranks, _NUM_TOKENS, id=id)


# Rendezvous and reports of the ranks of one replica.


async def test_keys_without_a_value_are_dropped() -> None:
    async with _rank() as rank:
        for number in range(20):
            with pytest.raises(aio.AioRpcError):
                await rank.stub.Ask(pb.AskRequest(key=f"nobody/{number}"), timeout=0.01)
        await rank.stub.Tell(pb.TellRequest(key="gang/come/1", value=b"here"), timeout=10)
        assert (await rank.stub.Ask(pb.AskRequest(key="gang/come/1"), timeout=10)).value == b"here"
        await becomes(lambda: len(rank.servicer.rendezvous) == 1)  # a cancelled call ends a moment later on the server
        assert await rank.rejects("Tell", pb.TellRequest(key="k" * 5000), "key")
        assert await rank.rejects("Tell", pb.TellRequest(key="k", value=bytes(1 << 20)), "value")
        assert await rank.rejects("Ask", pb.AskRequest(), "key")
        assert await rank.rejects("Close", pb.CloseRequest(), "handoff")


_GOOD = pb.ShippedPart(handoff="h", epoch=1, wire_bytes=5, seconds=0.1, link_s=0.05)


def _shipped(**changes: Any) -> pb.ShippedPart:
    part = pb.ShippedPart.FromString(_GOOD.SerializeToString())
    for name, value in changes.items():
        setattr(part, name, value)
    return part


@pytest.mark.parametrize(
    ("field", "report"),
    [
        ("rank", pb.ReportRequest(rank=0, shipped=_GOOD)),
        ("rank", pb.ReportRequest(rank=2, shipped=_GOOD)),
        ("rank", pb.ReportRequest(rank=2**32 - 1, landed=pb.LandedPart(handoff="h", epoch=1))),
        ("part", pb.ReportRequest(rank=1)),
        ("seconds", pb.ReportRequest(rank=1, shipped=_shipped(seconds=float("nan")))),
        ("seconds", pb.ReportRequest(rank=1, shipped=_shipped(link_s=-1.0))),
        ("handoff", pb.ReportRequest(rank=1, landed=pb.LandedPart(epoch=1))),
        ("num_tokens", pb.ReportRequest(rank=1, landed=pb.LandedPart(handoff="h", num_tokens=2**32 - 1))),
        ("num_bytes", pb.ReportRequest(rank=1, loaded=pb.LoadedPart(id=1, num_bytes={9: 1}))),
        ("seconds", pb.ReportRequest(rank=1, loaded=pb.LoadedPart(id=1, seconds={1: 1.0}))),
        ("seconds", pb.ReportRequest(rank=1, loaded=pb.LoadedPart(num_bytes={1: 1}, seconds={1: float("inf")}))),
    ],
    ids=lambda value: str(value).replace("\n", " ")[:50],
)
async def test_a_report_that_no_rank_of_ours_would_make_is_refused(field: str, report: pb.ReportRequest) -> None:
    posted: list[Callable[[], None]] = []
    host = SimpleNamespace(identity=None)
    setup: Any = SimpleNamespace(addresses=["127.0.0.1:1", "127.0.0.1:2"], host=host, replica="decode-0")
    service = ReplicaService(setup, SimpleNamespace(), FrameHub())  # type: ignore[arg-type]
    service.post = posted.append  # type: ignore[method-assign]
    async with _rank() as rank:
        rank.servicer.on_report = service.on_report
        assert await rank.rejects("Report", report, field)
        assert posted == []
        await rank.stub.Report(pb.ReportRequest(rank=1, shipped=_GOOD), timeout=10)
        assert len(posted) == 1


# Fetch calls of other replicas.


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("handoff.ranks", {"ranks": ()}),
        ("handoff.ranks", {"ranks": ("127.0.0.1:1",) * 3}),
        ("handoff.ranks", {"ranks": ("127.0.0.1:1",) * 65}),
        ("handoff.ranks", {"ranks": ("unix:1",)}),
        ("handoff.first_token", {"first_token": 5}),
        ("handoff.num_tokens", {"first_token": 24}),
        ("handoff.epoch", {"epoch": 0}),
        ("handoff.ttl_s", {"ttl_s": float("nan")}),
        ("handoff.id", {"id": ""}),
        ("hashes", {}),
    ],
    ids=str,
)
async def test_a_prefix_is_not_shipped_along_a_ticket_that_cannot_be(field: str, changes: dict[str, Any]) -> None:
    posted: list[Callable[[], None]] = []
    servicer, server = FetchServicer(), aio.server()
    servicer.served_fetches, servicer.post = SimpleNamespace(layout=_LAYOUT), posted.append  # type: ignore[assignment]
    worker_pb2_grpc.add_PrefixFetchServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    handoff = replace(_handoff(["127.0.0.1:1"]), max_tokens=24, **changes)
    hashes = bytes(3 * 16 - (field == "hashes"))
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = worker_pb2.FetchRequest(handoff=to_message(worker_pb2.Handoff, handoff), hashes=hashes)
        with pytest.raises(aio.AioRpcError) as raised:
            await anext(aiter(worker_pb2_grpc.PrefixFetchStub(channel).Fetch(request, timeout=10)))
    await server.stop(None)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in (raised.value.details() or "")
    assert posted == []


def test_rendezvous_store_is_bounded() -> None:
    rendezvous = Rendezvous(max_keys=3)
    for number in range(10):
        rendezvous.set(f"key/{number}", b"word")
    assert len(rendezvous) == 3 and rendezvous.get("key/9", timeout_s=1) == b"word"
    with pytest.raises(TimeoutError):
        rendezvous.get("key/0", timeout_s=0)
    rendezvous.set("key/9", b"another")
    assert rendezvous.get("key/9", timeout_s=1) == b"another"
    rendezvous.forget("key/")
    assert len(rendezvous) == 0
    # The watchdog of an NCCL group asks.
    assert not PrefixStore("link", local_store(rendezvous, timeout_s=1)).check(["exception_dump"])
