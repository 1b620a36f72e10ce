"""On a device a link works beside the computation: what comes behind what there. The order of a GPU's streams is not
tested here, but that the right things are asked of them."""

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
from kvtransfer.protocol.segment import Segment
from kvtransfer.transfer import incoming
from kvtransfer.transfer.codec import codec_for, slots_of
from kvtransfer.transfer.incoming import Incoming
from kvtransfer.transfer.rendezvous import Rendezvous, local_store

CPU = torch.device("cpu")


def test_on_a_cpu_marks_are_of_nothing() -> None:
    with own_stream(CPU):
        mark = StreamEvent(CPU)
    mark.hold_up()
    mark.wait()


def test_a_write_comes_behind_what_was_there_and_closing_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step that was started before the blocks were given away, or a write of a handoff that is closed, would
    still change them."""
    asked: list[tuple[str, int]] = []

    class FakeMark:
        def __init__(self, device: torch.device) -> None:
            self.number = sum(what == "mark" for what, _ in asked)
            asked.append(("mark", self.number))

        def hold_up(self) -> None:
            asked.append(("hold up", self.number))

        def wait(self) -> None:
            asked.append(("wait", self.number))

    layout = KVLayout(model="m", num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    pool, codec = KVPool(layout, num_blocks=3, device=CPU), codec_for(layout, "raw")
    segment = Segment(first_layer=0, num_layers=1, first_token=0, num_tokens=4, first_head=0, num_heads=1)
    payload = torch.zeros(codec.num_bytes(segment), dtype=torch.uint8)
    codec.pack(pool, segment, slots_of(pool, [0], 0, 4), payload)
    frame = SegmentFrame(
        handoff="h", epoch=1, number=0, segment=segment, num_bytes=len(payload), checksum=checksum(payload)
    )

    monkeypatch.setattr(incoming, "StreamEvent", FakeMark)
    opened = Opening(handoff="h", num_tokens=4, max_tokens=4, block_ids=(2,))
    receiving = Incoming(opened, pool=pool, codec=codec)
    receiving.write(frame, payload, sender="prefill-0", source=0)
    receiving.close()
    assert asked == [("mark", 0), ("hold up", 0), ("mark", 1), ("wait", 1)]


def test_what_watches_over_a_group_finds_no_word() -> None:
    assert not PrefixStore("link", local_store(Rendezvous(), timeout_s=1)).check(["exception_dump"])


def test_no_two_lanes_share_a_stream_and_one_that_hangs_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own streams are 32, in turn: the 33rd link would come behind the first."""
    handles, hanging = itertools.count(1), set[int]()

    class FakeStream:
        def __init__(self, handle: int, device: torch.device) -> None:
            self._handle = handle

        def query(self) -> bool:
            return self._handle not in hanging

    monkeypatch.setattr(streams, "new_driver_stream", lambda device: next(handles))
    monkeypatch.setattr(torch.cuda, "ExternalStream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    device = torch.device("cuda", 77)  # whose streams no other test has
    with ExitStack() as lanes:
        assert len({lanes.enter_context(own_stream(device)) for _ in range(100)}) == 100
    with own_stream(device) as ended:
        assert ended <= 100, "what an ended lane has left is taken again"
        hanging.add(ended)
    with ExitStack() as lanes:
        assert ended not in {lanes.enter_context(own_stream(device)) for _ in range(100)}
