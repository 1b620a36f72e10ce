"""Table and stores of a replica together: a matched block always has its own content."""

from __future__ import annotations

import queue
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import engine.tiers.sources
import engine.tiers.table
from core.model.recurrent import DeltaNetShape
from core.types.prefix_hash import block_hashes, checkpoint_hash, root_hash
from core.types.tier import Tier
from engine.kv.block_allocator import BlockAllocator
from engine.kv.block_manager import BlockManager
from engine.kv.eviction import make_eviction
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.tiers.block_file import Stamp
from engine.tiers.commands import Load, LoadOrder, LoadResult, LoadSource, Save, TierOrders, worth_loading
from engine.tiers.disk_store import DiskStore
from engine.tiers.host_store import HostStore
from engine.tiers.rank_tiers import RankTiers
from engine.tiers.table import TierTable

_CPU = torch.device("cpu")
_LAYOUT = KVLayout(
    model="m", num_layers=2, num_kv_heads=2, head_dim=4, block_size=1, dtype="float32", tensor_parallel=2
)
DELTA_NET = DeltaNetShape(
    hidden_size=8,
    num_key_heads=2,
    num_value_heads=2,
    key_dim=4,
    value_dim=8,
    conv_width=4,
    norm_eps=1e-6,
    is_fused=False,
)
# Of each rank: matrices of 128 bytes and inputs of a convolution of 96, in pieces of 64 bytes.
_WITH_STATES = replace(_LAYOUT, recurrent_layers=(DELTA_NET,))
_NUM_STATES = 3
# The first layer sees three positions. Of each rank: parts of 48 bytes, in pieces of 32, as long as the other layer.
_WITH_WINDOWS = replace(_LAYOUT, head_dim=(6, 4), windows=(3, 0))
_NUM_PARTS = 6
_ROOT = root_hash("m")
_NUM_BLOCKS = 6
_WAIT_S = 10.0
# Prompts with common beginnings, one token per block.
_PROMPTS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9], [1, 2, 7], [8], [11, 12, 13, 14], [21, 22, 23, 24, 25]]


def _content(prefix_hash: bytes, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(prefix_hash[:6], "little") + rank)
    return torch.randint(0, 256, (1, _LAYOUT.block_bytes), dtype=torch.uint8, generator=generator)


class _Rank:
    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        rank: int,
        places: dict[Tier, int],
        directory: Path,
        answers: queue.SimpleQueue,
    ) -> None:
        self.rank = rank
        num_parts = _NUM_PARTS if layout.windows else None
        self.pool = KVPool(
            layout, num_blocks=num_blocks, num_states=_NUM_STATES, num_window_parts=num_parts, device=_CPU
        )
        host = self.disk = None
        if count := places.get(Tier.HOST):
            host = HostStore(num_places=count, place_bytes=layout.place_bytes, device=_CPU)
        if count := places.get(Tier.DISK):
            directory.mkdir(exist_ok=True)
            self.disk = DiskStore(directory, Stamp(layout, rank, bytes(32)), num_places=count)
            assert self.disk.wait_until_written(timeout_s=_WAIT_S)
        self.tiers = RankTiers(
            self.pool, host=host, disk=self.disk, on_loaded=lambda loaded: answers.put((rank, loaded))
        )


class _Replica:
    """Two ranks, and a record of each block's expected content."""

    def __init__(self, directory: Path, *, host: int, disk: int, eviction: str = "lru") -> None:
        self.directory = directory
        places = {tier: count for tier, count in ((Tier.HOST, host), (Tier.DISK, disk)) if count}
        self.answers: queue.SimpleQueue[tuple[int, LoadResult]] = queue.SimpleQueue()
        self.ranks = [
            _Rank(_LAYOUT, _NUM_BLOCKS, rank, places, directory / str(rank), self.answers) for rank in range(2)
        ]
        policy = make_eviction(eviction, num_blocks=_NUM_BLOCKS)
        self.blocks = BlockManager(_NUM_BLOCKS, policy)
        lower = {tier: BlockAllocator(count) for tier, count in self.ranks[0].tiers.num_places.items()}
        self.table: TierTable[str] = TierTable(self.blocks, lower, num_ranks=2, place_bytes=_LAYOUT.place_bytes)
        # Tiers according to a follower of `take_changes`.
        self.known: dict[bytes, Tier] = {}
        if found := self.ranks[0].tiers.take_found():
            self.table.found(found)

    def begin(self, prompt: list[int]) -> tuple[list[bytes], list[int], int, Load[str] | None]:
        """Take blocks for a prompt and load missing ones. Returns hashes, blocks, number cached, load."""
        hashes = block_hashes(_ROOT, prompt, block_size=1)
        end = self.table.offer(hashes, compute_block_s=0.0)
        taken = self.blocks.allocate(hashes, len(prompt))
        assert taken
        blocks, num_cached = taken
        self.check(hashes[:num_cached], blocks)
        self.carry_out()
        load = self.table.begin("it", hashes[num_cached:end], blocks[num_cached:], expires_at=0.0)
        self.carry_out()
        return hashes, blocks, num_cached, load

    def serve(self, prompt: list[int]) -> tuple[int, int]:
        """Return the numbers of blocks that were cached and loaded."""
        hashes, blocks, num_cached, load = self.begin(prompt)
        num_loaded = self.finish(load).num_loaded if load else 0  # type: ignore[union-attr]
        num_here = num_cached + num_loaded
        self.check(hashes[:num_here], blocks)
        for rank in self.ranks:
            for prefix_hash, block in zip(hashes[num_here:], blocks[num_here:], strict=True):
                rank.pool.copy_in(_content(prefix_hash, rank.rank), [block])
        for prefix_hash, block in zip(hashes[num_cached:], blocks[num_cached:], strict=True):
            self.blocks.fill_block(block, prefix_hash)
        self.blocks.free(blocks)
        self.note()
        return num_cached, num_loaded

    def give_up(self, prompt: list[int]) -> None:
        """Cancel a prompt while its blocks are loading."""
        _, blocks, num_cached, load = self.begin(prompt)
        if load:
            self.table.give_up(load)
            rest = blocks[num_cached + len(load.blocks) :]
            self.blocks.free([*blocks[:num_cached], *rest])
            self.table.check_integrity()
            assert self.finish(load) is None
        else:
            self.blocks.free(blocks)
        self.note()

    def idle(self) -> None:
        self.table.save_ahead(4)
        self.carry_out()
        self.note()

    def finish(self, load: Load[str]) -> Load[str] | None:
        ended = [self.table.loaded(*self.answers.get(timeout=_WAIT_S)) for _ in self.ranks]
        assert ended[0] is None and ended[1] in (None, load)
        return ended[1]

    def carry_out(self) -> None:
        for orders in self.table.take_orders():
            for rank in self.ranks:
                rank.tiers.carry_out(orders)
                rank.tiers.start_loads(orders)

    def check(self, hashes: list[bytes], blocks: list[int]) -> None:
        for rank in self.ranks:
            for prefix_hash, block in zip(hashes, blocks, strict=False):
                assert torch.equal(rank.pool.copy_out([block]), _content(prefix_hash, rank.rank))

    def note(self) -> None:
        for tier, prefix_hash in self.ranks[0].tiers.take_lost():
            self.table.lost(tier, prefix_hash)
        for prefix_hash, tier in self.table.take_changes().items():
            if tier is None:
                self.known.pop(prefix_hash, None)
            else:
                self.known[prefix_hash] = tier
        self.table.check_integrity()
        assert self.known == self.table.held()

    def settle(self) -> None:
        for rank in self.ranks:
            if rank.disk:
                assert rank.disk.wait_until_written(timeout_s=_WAIT_S)

    def harm(self, rank: int, how: Callable[[Path], None]) -> None:
        self.settle()
        for path in sorted((self.directory / str(rank)).glob("*.kv")):
            how(path)

    def close(self) -> None:
        for rank in self.ranks:
            rank.tiers.close()


_steps = st.lists(
    st.tuples(st.sampled_from(["serve", "serve", "serve", "idle", "give_up", "harm"]), st.sampled_from(_PROMPTS)),
    max_size=25,
)


@settings(max_examples=60)
@given(_steps, st.integers(0, 4), st.integers(0, 5), st.sampled_from(["lru", "reuse_value"]))
def test_matched_blocks_have_their_own_content(
    steps: list[tuple[str, list[int]]], host: int, disk: int, eviction: str
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        _play(_Replica(Path(directory), host=host, disk=disk, eviction=eviction), steps, has_disk=disk > 0)


def _play(replica: _Replica, steps: list[tuple[str, list[int]]], *, has_disk: bool) -> None:
    for name, prompt in steps:
        if name == "serve":
            replica.serve(prompt)
        elif name == "give_up":
            replica.give_up(prompt)
        elif name == "idle":
            replica.idle()
        elif has_disk:
            replica.harm(len(prompt) % 2, lambda path: path.write_bytes(b"no block"))  # type: ignore[arg-type, return-value]
    replica.close()


def test_evicted_blocks_load_from_host_and_disk(tmp_path: Path) -> None:
    replica = _Replica(tmp_path, host=5, disk=20)
    for prompt in (_PROMPTS[0], _PROMPTS[5], _PROMPTS[4], [31, 32, 33, 34, 35, 36]):
        assert replica.serve(prompt) == (0, 0)
    assert replica.serve(_PROMPTS[0]) == (0, 6)
    hits = replica.table.num_hits
    assert hits[Tier.HOST] + hits[Tier.DISK] >= 6 and hits[Tier.DISK]
    replica.close()


@pytest.mark.parametrize("layout", [_WITH_STATES, _WITH_WINDOWS])
def test_pieces_of_states_and_of_windows_return(layout: KVLayout, tmp_path: Path) -> None:
    """Beside a block, from both tiers in one load, with a copy on the device."""
    answers: queue.SimpleQueue[tuple[int, LoadResult]] = queue.SimpleQueue()
    rank = _Rank(layout, _NUM_BLOCKS, 0, {Tier.HOST: 9, Tier.DISK: 9}, tmp_path / "disk", answers)
    blocks = [3, *(_NUM_BLOCKS + i for i in range(2 * layout.num_pieces))]
    hashes = block_hashes(_ROOT, blocks, block_size=1)
    rank.pool.copy_in(torch.cat([_content(one, 0)[:, : layout.place_bytes] for one in hashes]), blocks)
    before, tiers = rank.pool.copy_out(blocks), [Tier.HOST] * 3 + [Tier.DISK] * (len(blocks) - 3)
    places = [*zip(tiers, blocks, range(len(blocks)), hashes, strict=True)]
    rank.tiers.carry_out(TierOrders(saves=[Save(*place) for place in places]))
    assert rank.disk and rank.disk.wait_until_written(timeout_s=_WAIT_S)
    rank.pool.copy_in(before[:1], [2])
    rank.pool.copy_in(torch.zeros_like(before), blocks)
    assert not rank.pool.copy_out(blocks).any()
    sources = [LoadSource(tier, place, prefix_hash, block) for tier, block, place, prefix_hash in places]
    rank.tiers.start_loads(TierOrders(loads=[LoadOrder(1, sources, copies=[(2, 5)])]))
    assert answers.get(timeout=_WAIT_S)[1].num_blocks == len(blocks)
    assert torch.equal(rank.pool.copy_out(blocks), before) and len(before.unique(dim=0)) == len(blocks)
    assert torch.equal(rank.pool.copy_out([5]), before[:1])
    rank.tiers.close()


def _table_with_checkpoint(num_pieces: int = 2) -> tuple[TierTable[str], BlockManager, list[bytes]]:
    """Return a table whose host tier has three blocks and the checkpoint after them, if the model has checkpoints."""
    device, host = BlockManager(_NUM_BLOCKS, num_states=min(1, num_pieces)), BlockAllocator(8)
    table: TierTable[str] = TierTable(device, {Tier.HOST: host}, num_ranks=1, place_bytes=1, num_pieces=num_pieces)
    hashes = block_hashes(_ROOT, [1, 2, 3], block_size=1)
    host.adopt(dict(enumerate([*hashes, *(checkpoint_hash(hashes[-1], piece=i) for i in range(num_pieces))])))
    return table, device, hashes


def _begin(table: TierTable[str], device: BlockManager, hashes: list[bytes]) -> Load[str] | None:
    taken = device.allocate([], len(hashes))
    assert taken
    state = (hashes[-1], device.states.take()) if device.states else None
    return table.begin("it", hashes, taken[0], expires_at=0.0, state=state)


@pytest.mark.parametrize("num_read", range(6))
def test_a_state_is_used_only_if_all_of_it_was_loaded(num_read: int) -> None:
    table, device, hashes = _table_with_checkpoint()
    load = _begin(table, device, hashes)
    assert load and len(load.order.sources) == 5
    assert table.loaded(0, LoadResult(load.order.id, num_read, {}, {})) is load
    assert (load.is_usable, load.num_loaded) == ((True, 3) if num_read == 5 else (False, 0))


@pytest.mark.parametrize("missing", range(5))
def test_a_prefix_without_its_state_is_not_loaded(missing: int) -> None:
    table, device, hashes = _table_with_checkpoint()
    assert table.offer(hashes, compute_block_s=0.0) == 3
    table.lost(Tier.HOST, [*hashes, *(checkpoint_hash(hashes[-1], piece=i) for i in range(2))][missing])
    assert table.offer(hashes, compute_block_s=0.0) == 0
    assert _begin(table, device, hashes) is None


@pytest.mark.parametrize("num_pieces", [0, 2])
def test_slow_loads_are_measured_again_after_sixteen_others(num_pieces: int) -> None:
    """For a model without checkpoints, and for one with them."""
    table, device, hashes = _table_with_checkpoint(num_pieces)
    load = _begin(table, device, hashes)
    assert load
    num_read = len(load.order.sources)
    table.loaded(0, LoadResult(load.order.id, num_read, {Tier.HOST: num_read}, {Tier.HOST: float(num_read)}))
    offered = [table.offer(hashes, compute_block_s=1e-3) for _ in range(34)]
    assert offered == [*[0] * 16, 3, *[0] * 16, 3]
    assert table.offer(hashes, compute_block_s=1e3) == 3


def test_blocks_without_a_checkpoint_cost_one_hash_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of large models have hundreds of pieces."""
    device, host = BlockManager(_NUM_BLOCKS, num_states=1), BlockAllocator(50)
    table: TierTable[str] = TierTable(device, {Tier.HOST: host}, num_ranks=1, place_bytes=1, num_pieces=200)
    hashes, made = block_hashes(_ROOT, list(range(50)), block_size=1), list[bytes]()

    def counted(prefix_hash: bytes, *, piece: int = 0) -> bytes:
        made.append(prefix_hash)
        return checkpoint_hash(prefix_hash, piece=piece)

    for module in (engine.tiers.table, engine.tiers.sources):
        monkeypatch.setattr(module, "checkpoint_hash", counted)
    host.adopt(dict(enumerate(hashes)))
    assert device.states and table.offer(hashes, compute_block_s=0.0) == 0 and len(made) == 50
    device.states.fill_slot(device.states.take(), hashes[0])
    assert table.take_changes()[checkpoint_hash(hashes[0])] is Tier.DEVICE and len(made) == 51, "no disk to save it to"


def test_a_checkpoint_is_not_saved_before_its_copy_is_made() -> None:
    device, host, disk = BlockManager(_NUM_BLOCKS, num_states=2), BlockAllocator(8), BlockAllocator(8)
    lower = {Tier.HOST: host, Tier.DISK: disk}
    table: TierTable[str] = TierTable(device, lower, num_ranks=1, place_bytes=1, num_pieces=2)
    states = device.states
    assert states
    slot = states.take()
    states.checkpoint(slot, b"first")
    table.take_changes()
    table.save_ahead(8)
    states.take()  # evicts the checkpoint
    assert table.take_orders() == []
    states.free([states.first + 1])
    states.take_copies()
    states.checkpoint(slot, b"second")
    states.take_copies()
    states.take()
    [orders] = table.take_orders()
    assert [save.block for save in orders.saves] == [_NUM_BLOCKS + 2, _NUM_BLOCKS + 3], "pieces of the second slot"


def test_later_process_serves_from_disk(tmp_path: Path) -> None:
    replica = _Replica(tmp_path, host=0, disk=20)
    replica.serve(_PROMPTS[0])
    while replica.table.has_unsaved:
        replica.idle()
    replica.settle()
    replica.close()
    replica = _Replica(tmp_path, host=0, disk=20)
    replica.note()
    assert set(replica.known.values()) == {Tier.DISK}
    assert replica.serve(_PROMPTS[0]) == (0, 6)
    replica.close()


def test_block_lost_on_one_rank_is_a_miss(tmp_path: Path) -> None:
    replica = _Replica(tmp_path, host=0, disk=20)
    replica.serve(_PROMPTS[0])
    replica.serve([31, 32, 33, 34, 35, 36])
    replica.harm(1, lambda path: path.unlink())  # type: ignore[arg-type]
    assert replica.serve(_PROMPTS[0]) == (0, 0)
    replica.close()


@pytest.mark.parametrize(
    ("tiers", "compute_s", "expected"),
    [
        ([Tier.HOST] * 3, 1.0, 3),
        ([Tier.HOST] * 3, 0.05, 0),
        ([Tier.HOST, Tier.DISK, Tier.DISK], 1.0, 1),
        # The first block costs 2.0, which the others do not recover.
        ([Tier.DISK, Tier.HOST, Tier.HOST], 1.0, 0),
        ([Tier.DISK, *[Tier.HOST] * 3], 1.0, 4),
        # The compute time is unknown.
        ([Tier.DISK, Tier.HOST], 0.0, 2),
    ],
)
def test_loading_that_takes_longer_than_computing_is_not_done(
    tiers: list[Tier], compute_s: float, expected: int
) -> None:
    assert worth_loading(tiers, {Tier.HOST: 0.5 if compute_s == 1.0 else 0.1, Tier.DISK: 2.0}, compute_s) == expected


def test_a_load_that_fails_is_answered_and_the_next_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
    pool = KVPool(_LAYOUT, num_blocks=_NUM_BLOCKS, device=_CPU)
    host = HostStore(num_places=1, place_bytes=_LAYOUT.place_bytes, device=_CPU)
    tiers = RankTiers(pool, host=host, disk=None, on_loaded=answers.put)
    saved, source = Save(Tier.HOST, 0, 0, b"hash"), LoadSource(Tier.HOST, 0, b"hash", 1)
    copy_in = pool.copy_in

    def out_of_memory(*arguments: object) -> None:
        monkeypatch.setattr(pool, "copy_in", copy_in)
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(pool, "copy_in", out_of_memory)
    try:
        tiers.carry_out(TierOrders(saves=[saved]))
        tiers.start_loads(TierOrders(loads=[LoadOrder(1, [source]), LoadOrder(2, [source])]))
        results = [answers.get(timeout=_WAIT_S) for _ in range(2)]
    finally:
        tiers.close()
    assert [(result.id, result.num_blocks) for result in results] == [(1, 0), (2, 1)]
