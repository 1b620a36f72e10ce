"""Stream ordering between a link and the computation, checked by the recorded calls; needs no GPU."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch.distributed import PrefixStore

from engine.kv.checksum import checksum
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.runner import streams
from kvtransfer.links.device_stream import StreamEvent, own_stream
from kvtransfer.protocol.frames import Opening, SegmentFrame
from kvtransfer.protocol.plan import plan_heads
from kvtransfer.protocol.segment import Segment
from kvtransfer.transfer import incoming
from kvtransfer.transfer.codec import codec_for, slots_of
from kvtransfer.transfer.incoming import Incoming
from kvtransfer.transfer.rendezvous import Rendezvous, local_store

CPU = torch.device("cpu")


def test_cpu_events_are_no_ops() -> None:
    with own_stream(CPU):
        mark = StreamEvent(CPU)
    mark.hold_up()
    mark.wait()


def test_write_waits_for_earlier_uses_and_close_waits_for_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an earlier step, or a write of a closed handoff, could overwrite the blocks."""
    calls: list[tuple[str, int]] = []

    class FakeMark:
        def __init__(self, device: torch.device) -> None:
            self.number = sum(name == "mark" for name, _ in calls)
            calls.append(("mark", self.number))

        def hold_up(self) -> None:
            calls.append(("hold up", self.number))

        def wait(self) -> None:
            calls.append(("wait", self.number))

    layout = KVLayout(model="m", num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    pool, codec = KVPool(layout, num_blocks=3, device=CPU), codec_for(layout, "raw")
    segment = Segment(first_layer=0, num_layers=1, first_token=0, num_tokens=4)
    (copy,) = plan_heads(sender=layout, receiver=layout)
    payload = torch.zeros(codec.num_bytes(segment, copy.sender_heads), dtype=torch.uint8)
    codec.pack(pool, segment, copy.sender_heads, slots_of(pool, [0], 0, 4), payload)
    frame = SegmentFrame(
        handoff="h", epoch=1, number=0, segment=segment, num_bytes=len(payload), checksum=checksum(payload)
    )

    monkeypatch.setattr(incoming, "StreamEvent", FakeMark)
    opened = Opening(handoff="h", num_tokens=4, max_tokens=4, block_ids=(2,))
    receiving = Incoming(opened, pool=pool, codec=codec)
    receiving.write(frame, payload, sender="prefill-0", copy=copy)
    receiving.close()
    assert calls == [("mark", 0), ("hold up", 0), ("mark", 1), ("wait", 1)]


def test_store_check_returns_false_for_the_nccl_watchdog() -> None:
    assert not PrefixStore("link", local_store(Rendezvous(), timeout_s=1)).check(["exception_dump"])


def test_streams_are_not_shared_and_hanging_streams_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has a pool of 32 streams: with it, the 33rd link would share the first one's stream."""
    handles, hanging = itertools.count(1), set[int]()

    class FakeStream:
        def __init__(self, handle: int, device: torch.device) -> None:
            self._handle = handle

        def query(self) -> bool:
            return self._handle not in hanging

    monkeypatch.setattr(streams, "new_driver_stream", lambda device: next(handles))
    monkeypatch.setattr(torch.cuda, "ExternalStream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    device = torch.device("cuda", 77)  # not used by other tests
    with ExitStack() as lanes:
        assert len({lanes.enter_context(own_stream(device)) for _ in range(100)}) == 100
    with own_stream(device) as ended:
        assert ended <= 100, "streams of ended links are reused"
        hanging.add(ended)
    with ExitStack() as lanes:
        assert ended not in {lanes.enter_context(own_stream(device)) for _ in range(100)}
