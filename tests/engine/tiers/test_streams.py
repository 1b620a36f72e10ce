"""Saves and loads overlapped with compute, on a fake device whose streams are ordered only by events."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.types.tier import Tier
from engine.cpu import library
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.runner import streams
from engine.tiers.commands import LoadOrder, LoadResult, LoadSource, Save, Spill, TierOrders
from engine.tiers.host_store import HostStore
from engine.tiers.rank_tiers import BATCH, BlockCopies, RankTiers
from tests.support.fake_streams import FakeEvent, FakeStreams

CPU = torch.device("cpu")
LAYOUT = KVLayout(model="m", num_layers=2, num_kv_heads=(1, 2), head_dim=4, block_size=2, dtype="float32")
NUM_BLOCKS, NUM_PLACES = BATCH + 4, BATCH + 6
DOWN, UP = "lane 0", "lane 1"
END_S = 10.0


class FakeDisk:
    """Implements BlockStore in memory."""

    num_places = NUM_PLACES

    def __init__(self) -> None:
        self.blocks: dict[int, Tensor] = {}

    def put(self, place: int, prefix_hash: bytes, payload: Tensor) -> bool:
        self.blocks[place] = payload.to("cpu", copy=True)
        return True

    def get(self, place: int, prefix_hash: bytes) -> Tensor | None:
        return self.blocks.get(place)

    def close(self) -> None:
        pass


class Rank:
    """Pool and tiers of one rank with a compute thread. The content of a place is named after the place."""

    def __init__(self, device: FakeStreams) -> None:
        self.device = device
        self.pool = KVPool(LAYOUT, num_blocks=NUM_BLOCKS, device=CPU)
        host = HostStore(num_places=NUM_PLACES, place_bytes=LAYOUT.place_bytes, device=CPU)
        self.loaded: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        disk: Any = FakeDisk()
        self.tiers = RankTiers(self.pool, host=host, disk=None, on_loaded=self.loaded.put)
        self.below = RankTiers(self.pool, host=host, disk=disk, on_loaded=self.loaded.put)
        self.loading: dict[int, tuple[int, int]] = {}  # by order: block, place
        self.saved: set[int] = set()

    def compute(self, *blocks: int) -> None:
        if not blocks:
            return
        slots = torch.tensor([block * 2 + i for block in blocks for i in range(2)])
        for layer, heads in enumerate(LAYOUT.heads):
            self.pool.read(layer, torch.tensor(blocks), torch.float32)
            self.pool.write(layer, slots, *torch.randn(2, len(slots), *heads))

    def save(self, pairs: list[tuple[int, int]]) -> None:
        """Save blocks to places, skipping those in use by a load."""
        blocks, places = ({ends[i] for ends in self.loading.values()} for i in range(2))
        # Each place once.
        free = {block: place for block, place in pairs if block not in blocks and place not in places}
        saves = [Save(Tier.HOST, block, place, bytes([place])) for block, place in free.items()]
        self.saved.update(free.values())
        self.tiers.carry_out(TierOrders(saves=saves))

    def spill(self, place: int) -> None:
        if place in self.saved:
            self.below.carry_out(TierOrders(spills=[Spill(place, place, bytes([place]))]))

    def load(self, place: int, block: int) -> None:
        taken = {end for ends in self.loading.values() for end in ends[:1]}
        if place in self.saved and block not in taken:
            number = len(self.loading) + 1000 * place
            if number not in self.loading:
                self.loading[number] = block, place
                source = LoadSource(Tier.HOST, place, bytes([place]), block)
                self.tiers.start_loads(TierOrders(loads=[LoadOrder(number, [source])]))

    def attend(self) -> None:
        """Read all blocks that were ordered to be loaded."""
        for _ in range(len(self.loading)):
            answer = self.loaded.get(timeout=END_S)
            block, _ = self.loading.pop(answer.id)
            assert answer.num_blocks == 1
            self.compute(block)

    def idle_blocks(self, blocks: list[int]) -> list[int]:
        taken = {block for block, _ in self.loading.values()}
        return [block for block in blocks if block not in taken]


@contextmanager
def rank(mutate: Mutate | None = None) -> Iterator[Rank]:
    with pytest.MonkeyPatch.context() as patch:
        device = FakeStreams()
        patch.setattr(streams, "streams_of", device.streams_of)
        patch.setattr(library, "load_kernels", lambda: None)
        if mutate:
            mutate(patch, device)
        with device.watched("compute"):
            made = Rank(device)
            yield made
            made.attend()
            made.tiers.close()
            made.below.close()


Mutate = Callable[[pytest.MonkeyPatch, FakeStreams], None]
block, place = st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_PLACES - 1)
acts = st.one_of(
    st.tuples(st.just("compute"), st.lists(block, min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("save"), st.dictionaries(place, block, min_size=1, max_size=NUM_BLOCKS)),
    st.tuples(st.just("load"), place, block),
    st.tuples(st.just("spill"), place),
    st.tuples(st.just("attend")),
)


@settings(max_examples=25)
@given(steps=st.lists(acts, max_size=12))
def test_random_orders_have_no_races(steps: list[Any]) -> None:
    with rank() as made:
        for what, *values in steps:
            if what == "compute":
                made.compute(*made.idle_blocks(values[0]))
            elif what == "save":
                made.save([(block, place) for place, block in values[0].items()])
            else:
                getattr(made, what)(*values)
    assert made.device.races == []


def everything(made: Rank) -> None:
    """Issue every kind of order between all others, with blocks that are reused at once."""
    every = list(range(NUM_BLOCKS))
    made.compute(*every)
    # More than the staging buffers hold.
    for _ in range(3):
        made.save(list(zip(every, every, strict=True)))
        made.compute(*every)
    made.spill(1)
    made.load(3, 7)
    made.load(4, 8)
    made.attend()


def test_all_kinds_of_orders_have_no_races() -> None:
    with rank() as made:
        everything(made)
    assert made.device.races == []


# Faults that the test must detect.


def _ignore_events(patch: pytest.MonkeyPatch, device: FakeStreams, stream: str) -> None:
    """Make this stream ignore events."""
    hold_up = FakeEvent.hold_up
    patch.setattr(FakeEvent, "hold_up", lambda event: None if device.current == stream else hold_up(event))


def fill_staging_that_is_being_copied(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    _ignore_events(patch, device, "compute")


def copy_down_before_the_gather(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    _ignore_events(patch, device, DOWN)


def load_into_blocks_in_use(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    _ignore_events(patch, device, UP)


def report_blocks_before_they_are_loaded(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    patch.setattr(FakeEvent, "wait", lambda event: None)


def read_rows_before_they_are_saved(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    is_saved = HostStore.is_saved
    at_once = streams.AtOnce()
    patch.setattr(HostStore, "is_saved", lambda store, place, name, when: is_saved(store, place, name, at_once))


def gather_on_the_copy_stream(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    copy_out = KVPool.copy_out

    def elsewhere(pool: KVPool, blocks: list[int], **options: Any) -> Tensor:
        with device.watched(DOWN):
            return copy_out(pool, blocks, **options)

    patch.setattr(KVPool, "copy_out", elsewhere)


def record_previous_use_too_early(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    early, load = device.mark(), BlockCopies.load
    patch.setattr(BlockCopies, "load", lambda copies, rows, blocks, behind: load(copies, rows, blocks, behind=early))


def fill_locked_memory_that_is_being_read(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    page_locked, memory = device.page_locked, dict[Any, Tensor]()

    def the_same(size: int, dtype: torch.dtype) -> Tensor:
        return memory.setdefault((size, dtype), page_locked(size, dtype))

    patch.setattr(device, "page_locked", the_same)


def unlock_rows_that_are_being_written(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    def close(store: HostStore) -> None:
        device.unlock_pages(store._rows)

    patch.setattr(HostStore, "close", close)


def free_rows_that_are_being_written(patch: pytest.MonkeyPatch, device: FakeStreams) -> None:
    def close(store: HostStore) -> None:
        store._rows = torch.empty(0)

    patch.setattr(HostStore, "close", close)


MUTATIONS: list[Mutate] = [
    fill_staging_that_is_being_copied,
    copy_down_before_the_gather,
    load_into_blocks_in_use,
    report_blocks_before_they_are_loaded,
    read_rows_before_they_are_saved,
    gather_on_the_copy_stream,
    record_previous_use_too_early,
    fill_locked_memory_that_is_being_read,
    unlock_rows_that_are_being_written,
    free_rows_that_are_being_written,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_race_is_detected(mutate: Mutate) -> None:
    with rank(mutate) as made:
        everything(made)
    assert made.device.races


@pytest.mark.gpu
def test_gpu_blocks_round_trip() -> None:
    """Blocks are overwritten at once, and more are saved than staging buffers hold."""
    gpu, every = torch.device("cuda"), list(range(NUM_BLOCKS))
    layout = KVLayout(model="m", num_layers=8, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    pool = KVPool(layout, num_blocks=2 * NUM_BLOCKS, device=gpu)
    host = HostStore(num_places=NUM_PLACES, place_bytes=layout.place_bytes, device=gpu)
    loaded: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
    tiers = RankTiers(pool, host=host, disk=None, on_loaded=loaded.put)
    other = [block + NUM_BLOCKS for block in every]
    for seed in range(4):
        generator = torch.Generator(gpu).manual_seed(seed)
        size = (NUM_BLOCKS, layout.block_bytes)
        content = torch.randint(0, 256, size, dtype=torch.uint8, device=gpu, generator=generator)
        pool.copy_in(content, every)
        tiers.carry_out(TierOrders(saves=[Save(Tier.HOST, block, block, bytes([block])) for block in every]))
        pool.copy_in(torch.zeros_like(content), every)
        pool.copy_in(torch.zeros_like(content), other)
        sources = [LoadSource(Tier.HOST, block, bytes([block]), block + NUM_BLOCKS) for block in every]
        tiers.start_loads(TierOrders(loads=[LoadOrder(seed, sources)]))
        assert loaded.get(timeout=END_S).num_blocks == NUM_BLOCKS
        assert torch.equal(pool.copy_out(other), content)
    tiers.close()
