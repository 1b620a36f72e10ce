"""Engine with parts of layers with a window, over a fake pool: every query finds the positions that it sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from core.model.kv_memory import least_parts
from core.types.handoff import Handoff
from engine.engine import Engine
from engine.kv.block_manager import BlockManager
from engine.kv.layout import KVLayout
from engine.kv.window_manager import HeldParts, WindowManager
from engine.scheduler.sequence import Sequence as TokenSequence
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from kvtransfer.protocol.outgoing_transfers import OutgoingTransfer, OutgoingTransfers, parts_of_handoff
from kvtransfer.protocol.rank_transfer import Shipment
from tests.engine.test_engine import SEARCH, SETTINGS, EngineMachine, FakePool, finish, make_engine, make_prompt, run

_BLOCK, _NUM_BLOCKS = 4, 24
_WINDOW = 6
_SPAN = 2  # blocks before a block that a query at its start sees
_LAYOUT = KVLayout(model="m", num_layers=1, num_kv_heads=1, head_dim=8, block_size=_BLOCK, dtype="float32")


class FakeWindowPool(FakePool):
    """Pool that also remembers what the parts hold, and checks that each query finds its window there."""

    def __init__(self) -> None:
        super().__init__()
        self.part_of: dict[int, int] = {}
        self.part_tokens: dict[int, int] = {}  # by slot in layers with a window

    def execute(self, step: ScheduledStep | None, orders: Orders, /) -> list[tuple[int, ...]] | None:
        self.part_of.update(orders.parts)
        for source, target in orders.copies:
            for i in range(_BLOCK):
                token = self.part_tokens.get(self.part_slot(source * _BLOCK + i), -1)
                self.part_tokens[self.part_slot(target * _BLOCK + i)] = token
        found = super().execute(step, orders)
        if step is not None:
            self._check_windows(step)
        return found

    def _check_windows(self, step: ScheduledStep) -> None:
        batch, token = step.batch, 0
        for slot, token_id in zip(batch.slots.tolist(), batch.token_ids.tolist(), strict=True):
            assert self.part_of.get(slot // _BLOCK), "a position is computed in a block without a part"
            self.part_tokens[self.part_slot(slot)] = token_id
        for row, num_tokens in enumerate(batch.query_lens.tolist()):
            table = batch.block_tables[row].tolist()
            for position in batch.positions[token : token + num_tokens].tolist():
                for seen in range(max(0, position - _WINDOW + 1), position + 1):
                    slot = table[seen // _BLOCK] * _BLOCK + seen % _BLOCK
                    found = self.part_tokens.get(self.part_slot(slot))
                    assert self.part_of.get(slot // _BLOCK) and found == self.tokens[slot], (
                        "a query sees a position whose part is gone"
                    )
            token += num_tokens

    def write(self, sequence: TokenSequence, end: int, tokens: Sequence[int]) -> None:
        """Write what a peer ships: in layers with a window, only what the query after the prompt sees."""
        super().write(sequence, end, tokens)
        first = sequence.parts.first * _BLOCK
        for position in range(max(first, sequence.num_computed), end):
            block = sequence.blocks[position // _BLOCK]
            assert self.part_of.get(block), "a position is received in a block without a part"
            # A peer that decodes while it ships has freed some of them.
            is_freed = position // _BLOCK < max(0, end - _WINDOW + 1) // _BLOCK
            self.part_tokens[self.part_slot(block * _BLOCK + position % _BLOCK)] = -1 if is_freed else tokens[position]

    def part_slot(self, slot: int) -> int:
        return self.part_of[slot // _BLOCK] * _BLOCK + slot % _BLOCK


class WindowsMachine(EngineMachine):
    """State machine of a model that frees parts, few enough that sequences wait for them."""

    # Fewer than there are blocks, or nothing is scarce. Room for a sequence that decodes while it is shipped.
    num_parts = 1 + 2 + 16 + _SPAN + 2

    def make_blocks(self) -> tuple[BlockManager, FakePool]:
        windows = WindowManager(
            self.num_parts,
            num_blocks=_NUM_BLOCKS,
            window=_WINDOW,
            block_size=_BLOCK,
            max_batch_tokens=self.max_batch_tokens,
        )
        return BlockManager(_NUM_BLOCKS, windows=windows), FakeWindowPool()

    def _flush_copies(self) -> None:
        assert self.blocks.windows
        self.pool.execute(None, Orders(parts=self.blocks.windows.take_changes()))

    @invariant()
    def parts_are_held_within_reservations(self) -> None:
        windows = self.blocks.windows
        assert windows
        assert windows.num_held <= windows.num_reserved, "more parts are held than were reserved"

    @invariant()
    def cached_parts_hold_their_tokens(self) -> None:
        self._flush_copies()
        pool, windows = self.pool, self.blocks.windows
        assert windows and isinstance(pool, FakeWindowPool)
        for sequence in self._alive():
            for number, prefix_hash in enumerate(sequence.hashes()):
                if prefix_hash in self.blocks and (block := self.blocks.block_of(prefix_hash)) in windows:
                    found = [pool.part_tokens.get(pool.part_slot(block * _BLOCK + i)) for i in range(_BLOCK)]
                    assert found == sequence.tokens[number * _BLOCK : (number + 1) * _BLOCK], (
                        "a cached part does not hold its tokens"
                    )

    def teardown(self) -> None:
        super().teardown()
        windows = self.blocks.windows
        assert windows and (windows.num_reserved, windows.num_available) == (0, self.num_parts - 1)


class PrefillingWindowsMachine(WindowsMachine):
    decodes = False


class AheadWindowsMachine(WindowsMachine):
    is_async = True
    num_parts = least_parts(window=_WINDOW, block_size=_BLOCK, max_batch_tokens=WindowsMachine.max_batch_tokens)


class SpeculatingWindowsMachine(WindowsMachine):
    max_batch_tokens = 16
    num_parts = 1 + 4 + 15
    max_running = 12
    drafts = True


class SpeculatingAheadWindowsMachine(SpeculatingWindowsMachine):
    is_async = True


class ShippingWindowsMachine(WindowsMachine):
    """State machine whose running sequences are shipped, and whose cancelled transfers leave blocks in quarantine."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: OutgoingTransfers[TokenSequence] = OutgoingTransfers(self.blocks, _LAYOUT)
        self.shipping: list[OutgoingTransfer[TokenSequence]] = []
        # Transfers of paused or ended sequences, with the tokens whose KV they ship.
        self.committed: list[tuple[OutgoingTransfer[TokenSequence], list[int]]] = []
        self.quarantined: list[list[int]] = []
        self.num_begun = 0

    @precondition(lambda self: self.engine.decoding.running)
    @rule(data=st.data(), since=st.integers(1, 6))
    def begin_shipping(self, data: st.DataObject, since: int) -> None:
        """Ship to a replica that reserved room for the sequence `since` tokens ago."""
        sequence, windows = data.draw(st.sampled_from(list(self.engine.decoding.running))), self.blocks.windows
        num_tokens = max(1, sequence.num_computed - since)
        self.num_begun += 1
        handoff = Handoff(
            id=str(self.num_begun),
            epoch=1,
            replica="r",
            ranks=("a:1",),
            layout="l",
            num_tokens=num_tokens,
            max_tokens=sequence.num_computed + 8,
            first_token=data.draw(st.integers(0, (num_tokens - 1) // _BLOCK)) * _BLOCK,
            ttl_s=1.0,
        )
        if windows and parts_of_handoff(handoff, windows) <= windows.num_unreserved:
            self.shipping.append(self.transfers.begin(handoff, sequence.blocks, owner=sequence))

    @precondition(lambda self: self.shipping)
    @rule(data=st.data(), ends=st.booleans())
    def commit(self, data: st.DataObject, ends: bool) -> None:
        """Pause the sequence and ship the rest, or abort if it has ended or was preempted meanwhile.

        ends: the sequence ends while it is shipped.
        """
        outgoing = data.draw(st.sampled_from(self.shipping))
        self.shipping.remove(outgoing)
        sequence = outgoing.owner
        is_whole = sequence.blocks[: len(outgoing.blocks)] == outgoing.blocks
        if is_whole and sequence in self.running and sequence in self.engine.decoding.running:
            self.running.remove(sequence)
            self.engine.pause(sequence)
            self.transfers.grow(outgoing, sequence.blocks)
            self.committed.append((outgoing, sequence.tokens[: sequence.num_computed]))
            if ends:
                self.engine.end(sequence)
            else:
                self.paused.append(sequence)
        else:
            self._end_transfer(outgoing)

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def end_shipping(self, data: st.DataObject) -> None:
        committed = data.draw(st.sampled_from(self.committed))
        self.committed.remove(committed)
        self._end_transfer(committed[0])

    @precondition(lambda self: self.engine.prompts.reserved)
    @rule(data=st.data())
    def cancel_transfer(self, data: st.DataObject) -> None:
        """Cancel a prompt whose blocks a peer may still write."""
        prompt = data.draw(st.sampled_from(list(self.engine.prompts.reserved)))
        opened = prompt.sequence.blocks[prompt.num_cached // _BLOCK :]
        self.blocks.quarantine(opened)
        prompt.sequence.leave_out(opened)
        self.quarantined.append(opened)
        self.prompts.remove(prompt)
        self.engine.cancel(prompt)

    @precondition(lambda self: self.quarantined)
    @rule()
    def release(self) -> None:
        self.blocks.release(self.quarantined.pop())

    @invariant()
    def shipped_parts_stay(self) -> None:
        pool = self.pool
        assert isinstance(pool, FakeWindowPool)
        self._flush_copies()
        for outgoing, tokens in self.committed:
            first = max(0, len(tokens) - _WINDOW + 1) // _BLOCK * _BLOCK
            for position in range(max(first, outgoing.handoff.first_token), len(tokens)):
                block = outgoing.blocks[position // _BLOCK]
                assert pool.part_of.get(block), "a position is shipped from a block without a part"
                found = pool.part_tokens.get(pool.part_slot(block * _BLOCK + position % _BLOCK))
                assert found == tokens[position], "a shipped part was overwritten"

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        self.blocks.check_integrity()

    def teardown(self) -> None:
        for outgoing in (*self.shipping, *(outgoing for outgoing, _ in self.committed)):
            self._end_transfer(outgoing)
        for opened in self.quarantined:
            self.blocks.release(opened)
        super().teardown()

    def _end_transfer(self, outgoing: OutgoingTransfer[TokenSequence]) -> None:
        self.transfers.ended(0, Shipment(handoff=outgoing.handoff.id, epoch=1, wire_bytes=0, seconds=0.0, link_s=0.0))


@pytest.mark.parametrize(
    "machine",
    [
        *(WindowsMachine, PrefillingWindowsMachine, AheadWindowsMachine),
        *(SpeculatingWindowsMachine, SpeculatingAheadWindowsMachine, ShippingWindowsMachine),
    ],
)
def test_random_runs_keep_windows(machine: type[WindowsMachine]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)


def _one_block_early(self: HeldParts, first: int, windows: WindowManager) -> None:
    _advance(self, first + 1, windows)


def _hold_nothing(self: HeldParts, table: Sequence[int], windows: WindowManager) -> None:
    pass


_advance = HeldParts.advance


@pytest.mark.parametrize(
    ("name", "fault", "machine"),
    [("advance", _one_block_early, WindowsMachine), ("keep", _hold_nothing, ShippingWindowsMachine)],
)
def test_state_machine_finds_planted_faults(
    name: str, fault: Callable[..., object], machine: type[WindowsMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldParts, name, fault)
    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=SEARCH)


def _engine(num_parts: int, **limits: Any) -> tuple[Engine[list[tuple[int, ...]]], WindowManager]:
    windows = WindowManager(num_parts, num_blocks=_NUM_BLOCKS, window=_WINDOW, block_size=_BLOCK, max_batch_tokens=8)
    blocks = BlockManager(_NUM_BLOCKS, windows=windows)
    return make_engine(blocks, FakeWindowPool(), max_batch_tokens=8, max_running=8, **limits), windows


def test_fetch_leaves_parts_to_earlier_prompts() -> None:
    """Without this, prompts with a prefix to fetch would pass a prompt that waits for parts again and again."""
    engine, _ = _engine(least_parts(window=_WINDOW, block_size=_BLOCK, max_batch_tokens=8), decodes=False)
    first, second = make_prompt([1] * 20), make_prompt([2] * 20, num_offered=16)
    engine.add(first)
    engine.add(second)
    engine.step()
    assert (engine.prompts.computing, engine.prompts.waiting) == ([first], [second])
    while first in engine.prompts.computing:
        engine.step()
    engine.step()
    assert engine.prompts.fetching == [second]


@pytest.mark.parametrize(("num_parts", "choices"), [(7, 1), (11, 4)])
def test_local_decodes_make_room_for_the_parts_of_a_prompt(num_parts: int, choices: int) -> None:
    """Otherwise the prompts of a prefill replica would wait for whole answers."""
    engine, windows = _engine(num_parts, decodes=False, max_local_decodes=4, max_local_decode_blocks=16)
    local, prompt = make_prompt([3] * 9, max_tokens=40, choices=choices, is_local_decode=True), make_prompt([5] * 18)
    engine.add(local)
    run(engine, 4)
    engine.add(prompt)
    computed = [one.prompt for _ in range(4) for one in engine.step().prefilled]
    assert computed == [prompt] and engine.decoding.num_preemptions
    finish(engine)
    assert local.sequence.num_generated == 40 and windows.num_reserved == 0


def test_admission_preempts_the_tenant_with_most_parts() -> None:
    engine, windows = _engine(11)
    for number in range(2):
        engine.add(make_prompt([number] * 17, max_tokens=20, tenant="greedy"))
    while len(engine.decoding.running) < 2:
        engine.step()
    same = make_prompt([8] * 9, max_tokens=4, tenant="greedy")
    modest = make_prompt([9] * 12, max_tokens=4, tenant="modest")
    engine.add(same)
    engine.add(modest)
    run(engine, 6)
    assert modest.sequence.num_generated == 4 and engine.decoding.num_preemptions == 1
    assert same in engine.prompts.waiting, "preempted sequences of the same tenant come first"
    finish(engine)
    assert windows.num_reserved == 0


def test_blocks_and_parts_are_evicted_apart() -> None:
    windows = WindowManager(5, num_blocks=8, window=5, block_size=2, max_batch_tokens=0)
    blocks = BlockManager(8, windows=windows)
    taken = blocks.allocate([], 5)
    assert taken
    table, _ = taken
    held = HeldParts()
    held.reserve(2, windows)
    for end, prefix_hash in enumerate((b"a", b"b", b"c", b"d", b"e"), 1):
        held.advance(end - 2, windows)
        held.extend(table, end, windows)
        blocks.fill_block(table[end - 1], prefix_hash)
    # Four parts for five blocks: the first one's is reused.
    assert [block in windows for block in table] == [False, True, True, True, True]
    assert blocks.match([b"a", b"b", b"c", b"d"]) == 4 == blocks.match_reusable([b"a", b"b", b"c", b"d"])
    # A query behind the second block sees the first one.
    assert blocks.match_reusable([b"a", b"b"]) == blocks.match_reusable([b"a"]) == 0
    assert blocks.match_reusable([b"a", b"b", b"c"]) == 3
    held.release(windows)
    blocks.free(table)
    blocks.check_integrity()
    blocks.discard(b"d")
    blocks.check_integrity()
    assert table[3] not in windows and windows.num_available == 4


def test_block_with_its_part_replaces_one_without() -> None:
    """A prefix computed again, because its parts were evicted, is reusable again."""
    windows = WindowManager(7, num_blocks=8, window=5, block_size=2, max_batch_tokens=0)
    blocks = BlockManager(8, windows=windows)
    first, again = (blocks.allocate([], 1) for _ in range(2))
    assert first and again
    blocks.fill_block(first[0][0], b"a")
    assert blocks.match([b"a"]) == 1 and blocks.match_reusable([b"a"]) == 0
    held = HeldParts()
    held.reserve(1, windows)
    held.extend(again[0], 1, windows)
    blocks.fill_block(again[0][0], b"a")
    assert blocks.block_of(b"a") == again[0][0] and blocks.match_reusable([b"a"]) == 1
    held.release(windows)
    blocks.free(first[0] + again[0])
    blocks.check_integrity()
    assert blocks.num_free == 7 and blocks.match_reusable([b"a"]) == 1
