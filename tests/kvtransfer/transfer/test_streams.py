"""Links on a fake device whose streams are ordered by events only: no access is out of order, and the checker works."""

from __future__ import annotations

import asyncio
import queue
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.types.errors import LinkClosed
from engine.cpu import library
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.runner import streams
from engine.runner.streams import Event
from kvtransfer.links.backends import LINKS
from kvtransfer.links.link import LinkEnd, StagingRing, stream_event
from kvtransfer.protocol.frames import Opening
from kvtransfer.transfer import codec, outgoing_link, receiver
from kvtransfer.transfer.receiver import Incoming, Receiver
from tests.kvtransfer.replicas import END_S, Replica, handoff_to, replica
from tests.support.fake_streams import Clock, FakeStreams

LAYOUT = KVLayout(model="m", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 8
HERE, THERE = "prefill computes", "decode computes"


_POLL_S = 0.02


class FakeWires:
    """Operations in flight of all fake links. Bytes move on a separate stream, as with NCCL."""

    def __init__(self, streams: FakeStreams, *, num_buffers: int = 2) -> None:
        self.streams = streams
        self.num_buffers = num_buffers
        self.sent: defaultdict[str, queue.SimpleQueue[tuple[Tensor, Clock]]] = defaultdict(queue.SimpleQueue)
        self.held: list[_Operation] = []  # of failed links, while the device may use their payloads

    def open(self, end: LinkEnd) -> FakeStreamLink:
        return FakeStreamLink(self, end)

    def let_go(self) -> None:
        """Wait until the device has finished the operations of closed links."""
        for operation in self.held:
            operation.event.wait()


class FakeStreamLink:
    """Fake link; implements Link.

    A sent payload is read from the start of the send until its operation was waited for; a received one is written from
    the start of the receive. A closed link holds its operations in flight, as NcclLink does.
    """

    backend = "fake"
    device = torch.device("cpu")

    def __init__(self, wires: FakeWires, end: LinkEnd) -> None:
        self.num_buffers = wires.num_buffers
        self.wires = wires
        self.name = f"{end.prefix} {'out' if end.is_sender else 'in'}"
        self.sent = wires.sent[end.prefix]
        self.is_closed = False
        self.under_way: list[_Operation] = []

    def meet(self) -> None:
        """Do nothing, because both ends are in one process."""

    def send(self, payload: Tensor) -> _Operation:
        return _Operation(self, payload, is_sending=True)

    def recv(self, payload: Tensor) -> _Operation:
        return _Operation(self, payload, is_sending=False)

    def close(self) -> None:
        self.is_closed = True
        self.hold()

    def hold(self) -> None:
        """Keep the operations in flight."""
        self.wires.held += self.under_way

    def take(self, timeout_s: float) -> tuple[Tensor, Clock]:
        """Return the next payload that was sent. Raises LinkClosed."""
        for _ in range(int(timeout_s / _POLL_S) + 1):
            if self.is_closed:
                break
            try:
                return self.sent.get(timeout=_POLL_S)
            except queue.Empty:
                continue
        raise LinkClosed("the link is closed, or the receive timed out")


class _Operation:
    def __init__(self, link: FakeStreamLink, payload: Tensor, *, is_sending: bool) -> None:
        self._link, self._payload, self._is_sending = link, payload, is_sending
        self._streams = streams = link.wires.streams
        if link.is_closed:
            raise LinkClosed("the link is closed")
        behind = streams.mark()
        with streams.watched(link.name):
            behind.hold_up()
            # In flight from here on: any access to the payload before the wait is a race.
            streams.launch("wire", **{"reads" if is_sending else "writes": [payload]})
            self.event = streams.mark()
        link.under_way.append(self)
        if link.is_closed:  # closed by another thread
            link.hold()
        if is_sending:
            link.sent.put((torch.from_numpy(payload.numpy().copy()), self.event.clock))

    def wait(self, *, timeout_s: float) -> None:
        if not self._is_sending:
            data, sent = self._link.take(timeout_s)
            self._streams.join(self._link.name, sent)
            self._payload.numpy()[:] = data.numpy()
            self.event.clock |= sent
        self.event.wait()
        self._link.under_way.remove(self)


@dataclass(frozen=True)
class Plan:
    """Handoffs shipped one after the other, with their outcomes."""

    # Tokens and outcome: complete, or cancelled before the last chunk, while the others are in flight or written.
    handoffs: list[tuple[int, str]]
    chunk: int = 8
    ranks: int = 1  # receiver
    sources: int = 1  # sender ranks
    num_streams: int | None = None
    num_buffers: int = 2


class Side:
    """A replica, and the stream on which it computes."""

    def __init__(self, device: FakeStreams, stream: str, ranks: Replica) -> None:
        self.device, self.stream, self.ranks = device, stream, ranks

    def compute(self, layer: int, slots: list[int]) -> None:
        """Write KV as a step does."""
        with self.device.watched(self.stream):
            for pool in self.ranks.pools:
                pool.write(layer, torch.tensor(slots), *torch.randn(2, len(slots), *pool.layout.heads[layer]))

    def attend(self, blocks: list[int]) -> None:
        with self.device.watched(self.stream):
            for pool in self.ranks.pools:
                for layer in range(LAYOUT.num_layers):
                    pool.read(layer, torch.tensor(blocks), torch.float32)


async def ship(device: FakeStreams, plan: Plan, patch: pytest.MonkeyPatch) -> None:
    """Compute prompts by chunk, ship them by layer, and read them at the receiver.

    Blocks are reused on both sides as early as allowed.
    """
    written: queue.SimpleQueue[None] = queue.SimpleQueue()
    unpack = codec.Codec.unpack

    def unpacked(self: codec.Codec, *arguments: Any, **windows: Any) -> None:
        unpack(self, *arguments, **windows)
        written.put(None)

    patch.setattr(codec.Codec, "unpack", unpacked)
    fake = {"num_blocks": NUM_BLOCKS, "link": "fake", "group_bytes": 1}
    async with (
        replica(LAYOUT, plan.sources, **fake) as source_ranks,
        replica(LAYOUT, plan.ranks, name="decode-0", **fake) as ranks,
    ):
        here, there = Side(device, HERE, source_ranks), Side(device, THERE, ranks)
        for number, (num_tokens, end_as) in enumerate(plan.handoffs):
            is_given_up = end_as != "whole"
            num_sent = written.qsize()
            sources, targets = [0, 1, 2, 3], [4, 5, 6, 7]
            handoff = handoff_to(ranks.addresses, num_tokens, id=f"h{number}")
            with device.watched(THERE):  # another sequence used these blocks before
                for layer in range(LAYOUT.num_layers):
                    there.compute(layer, [block * 4 for block in targets])
                ranks.open(handoff, targets[: -(-num_tokens // 4)])
            with device.watched(HERE):
                transfers = [one for sender in source_ranks.senders if (one := sender.begin(handoff, sources))]
                assert len(transfers) == plan.sources
            ends = [*range(plan.chunk, num_tokens, plan.chunk), num_tokens]
            for start, end in zip([0, *ends], ends, strict=False):
                if end == num_tokens and is_given_up:
                    break
                num_sent += LAYOUT.num_layers * max(plan.ranks, plan.sources)
                for layer in range(LAYOUT.num_layers):
                    here.compute(layer, list(range(start, end)))
                    with device.watched(HERE):
                        for transfer in transfers:
                            transfer.layer_ready(layer, start, end)
            async with asyncio.timeout(END_S):
                while end_as == "written" and num_sent > written.qsize():
                    await asyncio.sleep(0)
            with device.watched(HERE):
                for transfer in transfers:
                    if is_given_up:
                        transfer.abort()
                    else:
                        transfer.commit(num_tokens, [1])
            if not is_given_up:
                for _ in ranks.receivers:
                    await ranks.landed()
                there.attend(targets)
            for _ in transfers:
                shipment = await source_ranks.shipped()
                assert is_given_up or shipment.error is None, shipment.error
            for rank in ranks.receivers:
                await asyncio.to_thread(rank.close, handoff.id)
            for layer in range(LAYOUT.num_layers):
                here.compute(layer, list(range(16)))
                there.compute(layer, list(range(16, 32)))


def races(plan: Plan, fault: str = "") -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        device = FakeStreams(num_streams=plan.num_streams)
        patch.setattr(streams, "streams_of", device.streams_of)
        patch.setattr(library, "load_kernels", lambda: None)
        wires = FakeWires(device, num_buffers=plan.num_buffers)
        patch.setitem(LINKS, "fake", wires.open)
        if fault:
            patch.setattr(*_faults(device)[fault])
        asyncio.run(ship(device, plan, patch))
        wires.let_go()
        return device.races


plans = st.builds(
    Plan,
    handoffs=st.lists(
        st.tuples(st.integers(1, 16), st.sampled_from(["whole", "on its way", "written"])), min_size=1, max_size=3
    ),
    chunk=st.sampled_from([3, 4, 8, 16]),
    ranks=st.sampled_from([1, 2]),
    sources=st.sampled_from([1, 2]),
    num_streams=st.sampled_from([None, 1, 2, 3]),
    num_buffers=st.sampled_from([1, 2]),
)


# Every fault below shows in this plan.
REVEALING = Plan([(13, "whole"), (16, "written")], chunk=4)


@settings(max_examples=8)
@example(plan=REVEALING)
@example(plan=replace(REVEALING, sources=2))
@given(plan=plans)
def test_link_accesses_are_ordered(plan: Plan) -> None:
    assert races(plan) == []


def _faults(device: FakeStreams) -> dict[str, tuple[Any, str, Any]]:
    """Return faults that the checker must find: what each replaces, and by what."""
    return {
        "pack without waiting for the layer": (outgoing_link, "stream_event", _event_without("hold_up")),
        "mark the layer on another stream": (outgoing_link, "stream_event", _on_another_stream(device, stream_event)),
        "unpack without waiting for who had the blocks": (receiver, "stream_event", _event_without("hold_up")),
        "close without waiting for the write": (receiver, "stream_event", _event_without("wait")),
        "use a staging buffer that is on the wire": (StagingRing, "make_room", _make_room_at_once),
        "hand out one staging buffer twice": (StagingRing, "start", _then(StagingRing.start, _put_back)),
        "say that it landed before it is written": (KVPool, "synchronize", lambda pool: None),
        "upload slots on another stream": (receiver, "slots_of", _on_another_stream(device, codec.slots_of)),
        "open before who had the blocks is through": (Receiver, "open", _then(Receiver.open, _step_late)),
        "wait for one of two ranks": (Incoming, "write", _then(Incoming.write, _keep_one_mark)),
    }


def _event_without(wait: str) -> Callable[[torch.device], Event]:
    """Return a `stream_event` that omits `hold_up` or `wait`."""

    def event(device: torch.device) -> Event:
        event = stream_event(device)
        setattr(event, wait, lambda: None)
        return event

    return event


def _on_another_stream(device: FakeStreams, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        with device.watched("another"):
            return function(*arguments)

    return called


def _then(function: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
    """Return a method that calls `then` after `function`, with its positional arguments."""

    def called(*arguments: Any, **options: Any) -> None:
        function(*arguments, **options)
        then(*arguments)

    return called


def _make_room_at_once(ring: StagingRing) -> None:
    if not ring.has_room:
        ring.release()


def _put_back(ring: StagingRing, operation: Any) -> None:
    ring.put_back()


def _step_late(of: Receiver, opening: Opening) -> None:
    """Write to the blocks after the opening, as a step does on a rank that lags behind."""
    pool, slots = of.config.pool, torch.tensor([block * 4 for block in opening.block_ids])
    for layer in range(LAYOUT.num_layers):
        pool.write(layer, slots, *torch.zeros(2, len(slots), *pool.layout.heads[0]))


def _keep_one_mark(arriving: Incoming, *frame: Any) -> None:
    """Forget the writes of all sources but the last."""
    with arriving._lock:
        arriving._written = dict([*arriving._written.items()][-1:])


@pytest.mark.parametrize("fault", _faults(FakeStreams()))
def test_planted_fault_is_found(fault: str) -> None:
    sources = 2 if fault == "wait for one of two ranks" else 1
    assert races(replace(REVEALING, sources=sources), fault)
