"""Links on a fake device whose streams are ordered by events only: no access is out of order, and the checker works."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.cpu import library
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.runner import streams
from engine.runner.streams import Event
from kvtransfer.links.backends import LINKS
from kvtransfer.links.link import StagingRing, stream_event
from kvtransfer.protocol.frames import Opening
from kvtransfer.transfer import codec, incoming, outgoing_link
from kvtransfer.transfer.receiver import Receiver
from tests.kvtransfer.replicas import END_S, Replica, handoff_to, replica
from tests.kvtransfer.transfer.fake_stream_link import FakeWires
from tests.support.fake_streams import FakeStreams

LAYOUT = KVLayout(model="m", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 8
HERE, THERE = "prefill computes", "decode computes"


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
            for receiver in ranks.receivers:
                await asyncio.to_thread(receiver.close, handoff.id)
            for layer in range(LAYOUT.num_layers):
                here.compute(layer, list(range(16)))
                there.compute(layer, list(range(16, 32)))


Mutate = Callable[[pytest.MonkeyPatch, FakeStreams], None]


def races(plan: Plan, mutate: Mutate = lambda patch, device: None) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        device = FakeStreams(num_streams=plan.num_streams)
        patch.setattr(streams, "streams_of", device.streams_of)
        patch.setattr(library, "load_kernels", lambda: None)
        wires = FakeWires(device, num_buffers=plan.num_buffers)
        patch.setitem(LINKS, "fake", wires.open)
        mutate(patch, device)
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


# Faults that the checker must find. Each function injects one.


def event_without(wait: str) -> Callable[[torch.device], Event]:
    """Return a `stream_event` that omits `hold_up` or `wait`."""

    def event(device: torch.device) -> Event:
        event = stream_event(device)
        setattr(event, wait, lambda: None)
        return event

    return event


def pack_without_waiting_for_the_layer(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    patch.setattr(outgoing_link, "stream_event", event_without("hold_up"))


def mark_the_layer_on_another_stream(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    def mark(of: torch.device) -> Event:
        with device.watched("another"):
            return stream_event(of)

    patch.setattr(outgoing_link, "stream_event", mark)


def unpack_without_waiting_for_who_had_the_blocks(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    patch.setattr(incoming, "stream_event", event_without("hold_up"))


def mark_before_the_blocks_are_written(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    """Make `close` wait for the previous write instead of the last one."""
    before = [device.mark()]
    unpack = codec.Codec.unpack

    def unpacked(self: codec.Codec, *arguments: Any, **windows: Any) -> None:
        before[0] = device.mark()
        unpack(self, *arguments, **windows)

    def event(of: torch.device) -> Event:
        event: Any = stream_event(of)
        event.wait = lambda: before[0].wait()
        return event  # type: ignore[no-any-return]

    patch.setattr(codec.Codec, "unpack", unpacked)
    patch.setattr(incoming, "stream_event", event)


def close_without_waiting_for_the_write(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    patch.setattr(incoming, "stream_event", event_without("wait"))


def use_a_staging_buffer_that_is_on_the_wire(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    patch.setattr(StagingRing, "make_room", lambda ring: None if ring.has_room else ring.release())


def hand_out_one_staging_buffer_twice(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    start = StagingRing.start

    def started(ring: StagingRing, operation: Any, **options: Any) -> None:
        start(ring, operation, **options)
        ring.put_back()

    patch.setattr(StagingRing, "start", started)


def say_that_it_landed_before_it_is_written(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    patch.setattr(KVPool, "synchronize", lambda pool: None)


def upload_slots_on_another_stream(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    def slots_of(*place: Any) -> torch.Tensor:
        with device.watched("another"):
            return codec.slots_of(*place)

    patch.setattr(incoming, "slots_of", slots_of)


def open_before_who_had_the_blocks_is_through(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    """Run a step that writes to the blocks after the event is recorded, as on a rank that lags behind."""
    opened = Receiver.open

    def too_early(receiver: Receiver, opening: Opening) -> None:
        opened(receiver, opening)
        slots = torch.tensor([block * 4 for block in opening.block_ids])
        numbers = torch.zeros(2, len(slots), *receiver.config.pool.layout.heads[0])
        for layer in range(LAYOUT.num_layers):
            receiver.config.pool.write(layer, slots, *numbers)

    patch.setattr(Receiver, "open", too_early)


def wait_for_one_of_two_ranks(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    """Write from each source on its own stream, without waiting for the others."""
    written = incoming.Incoming.write

    def write(arriving: incoming.Incoming, *arguments: Any, **options: Any) -> None:
        written(arriving, *arguments, **options)
        with arriving._lock:
            marks, source = arriving._written, options["copy"].sender
            arriving._written = {source: marks[source]} if source in marks else marks

    patch.setattr(incoming.Incoming, "write", write)


MUTATIONS: list[Mutate] = [
    pack_without_waiting_for_the_layer,
    mark_the_layer_on_another_stream,
    unpack_without_waiting_for_who_had_the_blocks,
    mark_before_the_blocks_are_written,
    close_without_waiting_for_the_write,
    use_a_staging_buffer_that_is_on_the_wire,
    hand_out_one_staging_buffer_twice,
    say_that_it_landed_before_it_is_written,
    upload_slots_on_another_stream,
    open_before_who_had_the_blocks_is_through,
    wait_for_one_of_two_ranks,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_fault_is_found(mutate: Mutate) -> None:
    sources = 2 if mutate is wait_for_one_of_two_ranks else 1
    assert races(replace(REVEALING, sources=sources), mutate)
