"""Block manager as a state machine: each block is in one state, and shared content stays intact."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from core.types.prefix_hash import block_hashes, root_hash
from engine.kv.block_manager import BlockManager
from engine.kv.eviction import EVICTIONS, make_eviction

NUM_BLOCKS = 12
ROOT = root_hash("model")
# Prefixes that share beginnings, so that matches of every depth occur.
PROMPTS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9], [1, 2, 7], [8]]


def hashes_of(prompt: list[int]) -> list[bytes]:
    return block_hashes(ROOT, prompt, block_size=1)


class Table:
    """Blocks of one sequence, and the number of them that are registered."""

    def __init__(self, prompt: list[int], blocks: list[int], num_full: int) -> None:
        self.hashes = hashes_of(prompt)
        self.blocks = blocks
        self.num_full = num_full


class BlockManagerMachine(RuleBasedStateMachine):
    """Runs operations on the manager beside a model of each block's content."""

    def __init__(self, eviction: str) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, make_eviction(eviction, num_blocks=NUM_BLOCKS))
        self.tables: list[Table] = []
        self.quarantined: list[int] = []
        # Block -> hash of its registered content; removed when overwritten.
        self.content: dict[int, bytes] = {}
        # Hashes that a follower of `take_changes` considers present.
        self.findable: set[bytes] = set()

    def pick(self, data: st.DataObject) -> Table:
        return data.draw(st.sampled_from(self.tables))

    def overwrite(self, blocks: list[int]) -> None:
        for block in blocks:
            self.content.pop(block, None)

    @rule(prompt=st.sampled_from(PROMPTS), extra=st.integers(0, 4))
    def allocate(self, prompt: list[int], extra: int) -> None:
        hashes, room = hashes_of(prompt), self.manager.num_available
        matched = self.manager.match(hashes)
        taken = self.manager.allocate(hashes, len(prompt) + extra)
        if taken is None:
            # Matched blocks may be cached or held.
            assert len(prompt) + extra - matched > room - matched
            return
        blocks, num_cached = taken
        assert num_cached == matched and len(blocks) == len(set(blocks)) == len(prompt) + extra
        assert [self.content[block] for block in blocks[:num_cached]] == hashes[:num_cached]
        held = {block for table in self.tables for block in table.blocks}
        assert not held & set(blocks[num_cached:]) and not set(self.quarantined) & set(blocks)
        self.overwrite(blocks[num_cached:])
        self.tables.append(Table(prompt, blocks, num_cached))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(0, 5))
    def extend(self, data: st.DataObject, count: int) -> None:
        table, room = self.pick(data), self.manager.num_available
        before = list(table.blocks)
        done = self.manager.extend(table.blocks, len(before) + count)
        assert done == (count <= room)
        assert table.blocks[: len(before)] == before and len(table.blocks) == len(before) + (count if done else 0)
        self.overwrite(table.blocks[len(before) :])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = self.pick(data)
        self.manager.share(table.blocks)
        twin = Table([], list(table.blocks), table.num_full)
        twin.hashes = table.hashes
        self.tables.append(twin)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def register_the_next(self, data: st.DataObject) -> None:
        table = self.pick(data)
        if table.num_full == min(len(table.hashes), len(table.blocks)):
            return
        block, prefix_hash = table.blocks[table.num_full], table.hashes[table.num_full]
        self.manager.fill_block(block, prefix_hash)
        self.content.setdefault(block, prefix_hash)
        table.num_full += 1
        # Present in this or another block; its head may be gone.
        assert self.manager.match([prefix_hash]) == 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), by_quarantine=st.booleans())
    def end(self, data: st.DataObject, by_quarantine: bool) -> None:
        table = self.pick(data)
        self.tables.remove(table)
        if by_quarantine:
            still_held = {block for other in self.tables for block in other.blocks}
            self.quarantined += [block for block in table.blocks if block not in still_held]
            self.manager.quarantine(table.blocks)
        else:
            self.manager.free(table.blocks)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.quarantined), unique=True))
        self.manager.release(blocks)
        self.quarantined = [block for block in self.quarantined if block not in blocks]

    @rule()
    def follow_changes(self) -> None:
        for prefix_hash, is_there in self.manager.take_changes().items():
            (self.findable.add if is_there else self.findable.discard)(prefix_hash)
        assert self.findable == set(self.manager.full_hashes())

    @invariant()
    def everything_adds_up(self) -> None:
        self.manager.check_integrity()
        held = {block for table in self.tables for block in table.blocks}
        assert self.manager.num_available == NUM_BLOCKS - len(held) - len(self.quarantined)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_eviction" in metafunc.fixturenames:
        metafunc.parametrize("any_eviction", [*EVICTIONS, *metafunc.config.getoption("eviction")])


def test_unregistered_block_is_never_matched() -> None:
    manager = BlockManager(2)
    taken = manager.allocate([], 2)
    assert taken
    [first, second], _ = taken
    for block, prefix_hash in ((first, b"a"), (second, b"b")):
        manager.fill_block(block, prefix_hash)
    manager.free([second])
    for prefix_hash in (b"a", b"b", b"never seen"):
        manager.unfill(prefix_hash)
        manager.check_integrity()
    assert manager.num_full == 0 and manager.num_free == 1
    manager.free([first])
    manager.check_integrity()
    assert manager.num_free == 2 and manager.match([b"a"]) == 0


def test_operations_preserve_all_blocks(any_eviction: str) -> None:
    run_state_machine_as_test(
        partial(BlockManagerMachine, any_eviction), settings=settings(max_examples=100, stateful_step_count=40)
    )


def test_lru_evicts_oldest_prefix_tail_first() -> None:
    manager = BlockManager(4)
    for prompt in ([1, 2], [3, 4]):
        taken = manager.allocate([], 2)
        assert taken is not None
        for block, prefix_hash in zip(taken[0], hashes_of(prompt), strict=True):
            manager.fill_block(block, prefix_hash)
        manager.free(taken[0])
    manager.allocate([], 1)
    assert (manager.match(hashes_of([1, 2])), manager.match(hashes_of([3, 4]))) == (1, 2)


def test_check_integrity_detects_errors() -> None:
    manager = BlockManager(3)
    manager._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        manager.check_integrity()
