"""Engine over a fake pool that remembers writes: each sequence reads its own tokens, and each block has one owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from numpy.typing import NDArray

from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import OFFLINE, Sampling, SequenceRequest, choice_seed
from engine import engine as engine_module
from engine.batch.batch import Batch, KeptRows
from engine.batch.rows import RowChanges
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.kv.state_manager import StateManager
from engine.sampling.params import Sampled, SamplingRow
from engine.scheduler import async_steps
from engine.scheduler.prompts import KVSource, Prompt
from engine.scheduler.sequence import Sequence as TokenSequence
from engine.scheduler.step import Prefilled, ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.spec_decode import speculation as speculation_module
from engine.spec_decode import verify as verify_module
from engine.spec_decode.proposer import NUM_KINDS, Proposal
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.verify import Choose, Draft
from engine.tiers.commands import TierOrders
from tests.engine.spec_decode.proposers import FakeProposer

_BLOCK = 4
_NUM_BLOCKS = 24
_NUM_TEMPERS = 5  # of HostileProposer
POISON = 99  # a token that no token can follow
UNSCORABLE = 98  # a token without scores


def _next(tokens: Sequence[int], seed: int) -> int:
    """Return the token that follows these."""
    return hash((tuple(tokens), seed if _depends(tokens) else 0)) % 50


def _depends(tokens: Sequence[int]) -> bool:
    """Return True if the next token depends on the choice, so that it cannot be known before."""
    return hash(tuple(tokens)) % 4 == 0


def _continued(tokens: Sequence[int], count: int, seed: int = choice_seed(7, 0)) -> list[int]:
    """Return the next tokens of a choice; by default of the first."""
    found = list(tokens)
    for _ in range(count):
        found.append(_next(found, seed))
    return found[len(tokens) :]


class FakeMask:
    """TokenMask for `choose` below, which ignores `allowed`."""

    failure = ""

    def may_forbid(self, tokens: Sequence[int], start: int, num_in_flight: int, /) -> bool:
        return True

    def allowed(self, tokens: Sequence[int], start: int, /) -> NDArray[np.int32]:
        raise NotImplementedError

    def only(self, tokens: Sequence[int], start: int, /) -> int | None:
        return None if _depends(tokens) else _next(tokens, 0)

    def fork(self) -> FakeMask:
        return self


class FakePool:
    """Runner whose logits are the tokens that a row's blocks hold up to its last position."""

    def __init__(self, *, has_states: bool = False) -> None:
        self.has_states = has_states
        self.tokens: dict[int, int] = {}  # by slot
        self.states: dict[int, tuple[int, ...]] = {}  # by index of the state slot: all tokens so far
        self._follower = KeptRows(_BLOCK)

    def execute(self, step: ScheduledStep | None, orders: Orders, /) -> list[tuple[int, ...]] | None:
        for source, target in orders.copies:
            for i in range(_BLOCK):
                self.tokens[target * _BLOCK + i] = self.tokens.get(source * _BLOCK + i, -1)
        for source, target in orders.state_copies:
            self.states[target] = self.states[source]
        if step is None:
            return None
        batch = step.batch
        self._check_follower(step.changes, batch)
        if batch.device_tokens:
            batch.device_tokens.fill(batch.token_ids)
        for slot, token in zip(batch.slots.tolist(), batch.token_ids.tolist(), strict=True):
            self.tokens[slot] = token
        if self.has_states:
            self._advance(batch)
        self._score(step, batch)
        return self._read(batch, batch.logits_rows.tolist())

    def _advance(self, batch: Batch) -> None:
        """Advance the states. A row's state is the tokens up to its start."""
        writes, at = dict(batch.state_writes.tolist()), 0
        read = [self.states.get(slot, ()) for slot in batch.state_indices.tolist()]
        for row, end in enumerate(batch.context_lens.tolist()):
            num_tokens, table = int(batch.query_lens[row]), batch.block_tables[row].tolist()
            start = end - num_tokens
            state = read[row] if start else ()
            assert state == tuple(self.tokens[_slot(table, position)] for position in range(start)), (
                "the slot has another state"
            )
            for index in range(at, at + num_tokens):
                state = (*state, int(batch.token_ids[index]))
                if index in writes:
                    self.states[writes[index]] = state
            self.states[int(batch.state_indices[row])] = state
            at += num_tokens

    def _read(self, batch: Batch, places: list[int]) -> list[tuple[int, ...]]:
        """Return what the pool holds for each token of the step, from position 0 to its own."""
        row_of = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
        ends = (batch.positions[places] + 1).tolist()
        return [
            tuple(self.tokens[_slot(batch.block_tables[row_of[i]].tolist(), position)] for position in range(end))
            for i, end in zip(places, ends, strict=True)
        ]

    def _score(self, step: ScheduledStep, batch: Batch) -> None:
        """Score each token by its position; UNSCORABLE has no scores."""
        found = iter(self._read(batch, batch.scored_rows.tolist()))
        scores: list[PromptLogprobs | None] = []
        for row in step.scored:
            read = [next(found) for _ in row.next_tokens]
            results = PromptLogprobs(
                logprobs_P=np.array([-len(tokens) for tokens in read], np.float32),
                ranks_P=np.array([hash(tokens) % 50 for tokens in read], np.int32),
                top_ids_PK=np.array(row.next_tokens, np.int32)[:, None],
                top_logprobs_PK=np.zeros((len(read), 1), np.float32),
            )
            scores.append(None if UNSCORABLE in row.next_tokens else results)
        assert next(found, None) is None
        if step.scored:
            step.scores = lambda: scores

    def _check_follower(self, changes: RowChanges, batch: Batch) -> None:
        """Check that a rank that only receives the changes makes the same batch, even if it has received nothing
        before."""
        assert changes.is_whole or changes.number == self._follower.number + 1
        if device_tokens := batch.device_tokens:
            rows = np.repeat(np.arange(len(changes.kept)), changes.query_lens)[device_tokens.places]
            assert (
                len(device_tokens.token_ids) == len(self._follower)
                and (changes.kept[rows] == device_tokens.sources).all()
            )
            assert (changes.query_lens[rows] == 1).all()
        theirs = self._follower.apply(RowChanges.decode(changes.encode()))
        for name, numbers in vars(batch).items():
            if name != "device_tokens":
                np.testing.assert_array_equal(getattr(theirs, name), numbers)

    def write(self, sequence: TokenSequence, end: int, tokens: Sequence[int]) -> None:
        """Write what a peer ships: KV of the positions up to `end`, and the state after them."""
        for position in range(sequence.num_computed, end):
            self.tokens[_slot(sequence.blocks, position)] = tokens[position]
        if sequence.state_slots:
            self.states[sequence.state_index] = tuple(tokens[:end])


def _slot(blocks: Sequence[int], position: int) -> int:
    return blocks[position // _BLOCK] * _BLOCK + position % _BLOCK


def choose(logits: list[tuple[int, ...]], rows: Sequence[SamplingRow], positions: Sequence[int] | None) -> Sampled:
    """Sampler that finds no token behind POISON."""
    found = [logits[i] for i in (range(len(rows)) if positions is None else positions)]
    for tokens, row in zip(found, rows, strict=True):
        assert row.position == len(tokens) and not (row.reads_tokens and row.num_in_flight)
    return Sampled.known(
        [None if POISON in tokens else (_next(tokens, row.seed), None) for tokens, row in zip(found, rows, strict=True)]
    )


def make_prompt(
    tokens: Sequence[int],
    *,
    max_tokens: int = 8,
    choices: int = 1,
    is_scored: bool = False,
    stops: tuple[int, ...] = (),
    tenant: str = "",
    priority: int = 0,
    mask: FakeMask | None = None,
    **fields: object,
) -> Prompt:
    request = SequenceRequest(
        id="r",
        token_ids=tuple(tokens),
        num_prompt_tokens=len(tokens),
        sampling=Sampling(max_tokens=max_tokens, seed=7, stop_token_ids=stops),
        choices=tuple(range(choices)),
        num_prompt_logprobs=1 if is_scored else None,
        tenant=tenant,
        priority=priority,
    )
    sequence = TokenSequence(request, 0, model="m", block_size=_BLOCK, max_context=_NUM_BLOCKS * _BLOCK)
    sequence.sampling_row.mask = mask
    return Prompt(sequence, **fields)  # type: ignore[arg-type]


def make_engine(
    blocks: BlockManager | None = None,
    pool: FakePool | None = None,
    *,
    by: Any = choose,
    is_async: bool = False,
    connector: Any = None,
    speculation: Speculation | None = None,
    **limits: Any,
) -> Engine[list[tuple[int, ...]]]:
    """Return an engine over a fake pool. limits: of SchedulerConfig; those left out are ample."""
    config = SchedulerConfig(**{"max_batch_tokens": 40, "max_running": 20, "max_waiting": 20} | limits)
    return Engine(
        pool or FakePool(),
        by,
        blocks or BlockManager(_NUM_BLOCKS),
        config,
        block_size=_BLOCK,
        connector=connector,
        is_async=is_async,
        speculation=speculation,
    )


def finish(engine: Engine[list[tuple[int, ...]]]) -> None:
    """Run an engine until it has no work; then it holds nothing."""
    while engine.step().did_work:
        engine.blocks.check_integrity()
    assert (engine.blocks.num_available, engine.num_running, engine.num_waiting) == (_NUM_BLOCKS, 0, 0)


def check_tokens(sequence: TokenSequence, num_tokens: int | None = None) -> None:
    """Check that the last tokens, or all that were generated, follow from those before them."""
    tokens, count = sequence.tokens, sequence.num_generated if num_tokens is None else num_tokens
    for end in range(len(tokens) - count, len(tokens)):
        assert tokens[end] == _next(tokens[:end], sequence.sampling_row.seed), (
            "the token does not follow from the sequence's own tokens"
        )


@pytest.mark.parametrize("is_scored", [True, False])
@pytest.mark.parametrize("decodes", [True, False])
def test_prompt_without_next_token_fails_alone_and_is_uncached(decodes: bool, is_scored: bool) -> None:
    """The same holds for a prompt with a token that has no scores."""
    engine, last = make_engine(max_batch_tokens=20, decodes=decodes), UNSCORABLE if is_scored else POISON
    good, bad = make_prompt(range(9)), make_prompt([*range(20, 28), last], choices=2, is_scored=is_scored)
    engine.add(good)
    engine.add(bad)
    result = engine.step()
    assert result.failed == [bad.sequence] and [prefilled.prompt for prefilled in result.prefilled] == [good]
    assert engine.blocks.match(bad.sequence.hashes()) == 0 < engine.blocks.match(good.sequence.hashes())
    finish(engine)


def test_computing_prompt_counts_as_all_its_choices() -> None:
    engine = make_engine(max_batch_tokens=5, max_running=4)
    engine.add(make_prompt(range(9), choices=3))
    engine.step()
    engine.add(make_prompt([3] * 9, choices=2))
    assert engine.num_running == 3
    most = 0
    while engine.step().did_work:
        most = max(most, len(engine.decoding.running))
    assert most == 3, "the second prompt must wait for the first one's choices"


def test_preempted_sequence_waits_for_reserved_prompts() -> None:
    engine = make_engine(max_batch_tokens=9, max_running=1)
    engine.add(make_prompt(range(9)))
    (prefilled,) = engine.step().prefilled
    (paused,) = prefilled.sequences
    engine.pause(paused)  # before a transfer
    paused.release(engine.blocks)
    received = make_prompt([3] * 9, source=KVSource.PREFILL)
    engine.add(received)
    engine.step()
    engine.resume(paused)  # the transfer failed
    engine.step()
    assert list(engine.prompts.reserved) == [received] and list(engine.decoding.preempted) == [paused]
    engine.cancel(received)
    assert engine.step().num_computed > 0 and not engine.decoding.preempted


def test_forced_tokens_are_in_the_result_of_their_step() -> None:
    """Also with async scheduling, where their sequences may end before the next step does."""
    pool = FakePool()
    engine = make_engine(pool=pool, is_async=True)
    engine.add(make_prompt(range(9), max_tokens=30))
    tokens = next([kind] * 9 for kind in range(50) if not _depends([kind] * 9 + [_next([kind] * 9, 7)]))
    masked = make_prompt(tokens, source=KVSource.PREFILL, mask=FakeMask(), max_tokens=20)
    engine.add(masked)
    run(engine, 3)
    pool.write(masked.sequence, 9, tokens)
    engine.landed(masked, 9, [_next(tokens, 7)])
    result = engine.step()
    results = [token.token_id for sequence, token in result.sampled if sequence is masked.sequence]
    assert results and masked.sequence.tokens[10:] == results and result.num_known == len(results)


def run(engine: Engine[list[tuple[int, ...]]], num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


def _add_greedy(engine: Engine[list[tuple[int, ...]]], *, max_tokens: int = 60) -> list[Prompt]:
    """Add five short prompts of one tenant."""
    prompts = [make_prompt([number] * 3, max_tokens=max_tokens, tenant="greedy") for number in range(5)]
    for prompt in prompts:
        engine.add(prompt)
    return prompts


def test_preemption_spares_tenants_with_fewer_blocks() -> None:
    engine = make_engine()
    _add_greedy(engine)
    run(engine, 2)
    modest = make_prompt([9] * 3, max_tokens=30, tenant="modest")  # the youngest
    engine.add(modest)
    run(engine, 31)
    assert engine.decoding.num_preemptions > 0, "the test needs a shortage of blocks"
    assert modest.sequence.num_generated == 30 and not modest.sequence.blocks, (
        "the tenant with fewer blocks must not be delayed"
    )
    finish(engine)


def test_admission_preempts_the_tenant_with_most_blocks() -> None:
    engine = make_engine()
    greedy = _add_greedy(engine)
    while not engine.decoding.preempted:
        engine.step()
    same = make_prompt([8] * 3, max_tokens=4, tenant="greedy")
    modest = make_prompt([9] * 12, max_tokens=4, tenant="modest")
    engine.add(same)
    engine.add(modest)
    run(engine, 5)
    assert modest.sequence.num_generated == 4 and not modest.sequence.blocks
    assert same in engine.prompts.waiting, "preempted sequences of the same tenant come first"
    finish(engine)
    for prompt in (*greedy, same):
        check_tokens(prompt.sequence)


def test_shared_blocks_do_not_count_as_freed() -> None:
    """Choices share the blocks of their prompt, which only the last one frees."""
    engine = make_engine()
    engine.add(make_prompt([1] * 60, max_tokens=60, choices=4, tenant="one"))
    run(engine, 3)
    other = make_prompt([9] * 4 * (engine.blocks.num_available + 3), max_tokens=4, tenant="other")
    engine.add(other)
    for _ in range(20):
        num_preempted = engine.decoding.num_preemptions
        engine.step()
        assert engine.decoding.num_preemptions - num_preempted <= 1, "at most one preemption per step"
        if other not in engine.prompts.waiting:
            break
    assert engine.decoding.num_preemptions <= 4


def test_offline_prompt_preempts_no_sequence() -> None:
    engine = make_engine()
    _add_greedy(engine, max_tokens=12)
    run(engine, 8)
    offline = make_prompt([9] * 20, max_tokens=4, tenant="modest", priority=OFFLINE)
    engine.add(offline)
    while offline in engine.prompts.waiting:
        engine.step()
        assert engine.decoding.num_preemptions == 0
    assert not engine.decoding.running or offline.sequence.blocks


def test_no_preemption_if_it_cannot_free_enough() -> None:
    engine = make_engine()
    for number in range(2):
        engine.add(make_prompt([number] * 40, max_tokens=4, tenant="one"))
    engine.step()
    engine.add(make_prompt([9] * 60, max_tokens=4, tenant="other"))
    engine.step()
    assert engine.decoding.num_preemptions == 0


@pytest.mark.parametrize("is_scored", [True, False])
def test_checkpoint_planned_behind_a_prompt_holds_up_no_other(is_scored: bool) -> None:
    """A prompt without a block left to save plans the first checkpoint of its answer, while it is still computed."""
    blocks = BlockManager(_NUM_BLOCKS, num_states=6)
    engine = make_engine(blocks, FakePool(has_states=True), max_batch_tokens=1, max_running=4)
    assert blocks.states
    blocks.states.interval = 4 * _BLOCK
    engine.add(make_prompt([3] * 11, is_scored=is_scored))
    run(engine, 10)
    assert engine.prompts.computing
    engine.add(make_prompt([3] * 30))
    finish(engine)
    assert blocks.states.num_available == 6


@pytest.mark.parametrize("num_states", [0, 6])
def test_a_local_decode_makes_room_for_a_prompt_that_cannot_share_its_prefix(num_states: int) -> None:
    """Without a checkpoint the prompt computes its first 16 tokens into blocks of its own."""
    blocks = BlockManager(_NUM_BLOCKS, num_states=num_states)
    limits = {"max_running": 4, "decodes": False, "max_local_decodes": 2, "max_local_decode_blocks": 6}
    engine = make_engine(blocks, FakePool(has_states=num_states > 0), **limits)
    local = make_prompt([3] * 20, max_tokens=40, is_local_decode=True)
    engine.add(local)
    engine.step()
    if blocks.states:
        for prefix_hash in local.sequence.hashes():
            blocks.states.forget(prefix_hash)
    prompt = make_prompt([3] * 16 + [5] * 60)
    engine.add(prompt)
    results = [engine.step() for _ in range(4)]
    assert [one.prompt for result in results for one in result.prefilled] == [prompt], "it waits for the whole answer"
    assert engine.decoding.num_preemptions == bool(num_states) and local.sequence.num_generated < 40


@pytest.mark.parametrize("num_drafted", [0, 3, 5])
def test_an_answer_keeps_its_checkpoints_however_it_is_drafted(num_drafted: int) -> None:
    """Steps of four or six tokens from position 9 on end at no multiple of 8."""
    blocks = BlockManager(_NUM_BLOCKS, num_states=9)
    right = FakeProposer(lambda tokens, most: _continued(tokens, min(num_drafted, most)))
    speculation = Speculation({"right": right}, max_tokens=5, vocab_size=UNSCORABLE, backs_off=False)
    engine = make_engine(blocks, FakePool(has_states=True), max_batch_tokens=20, max_running=2, speculation=speculation)
    assert blocks.states
    blocks.states.interval = 2 * _BLOCK
    prompt = make_prompt(range(9), max_tokens=25)
    engine.add(prompt)
    found = set[int]()
    while engine.step().did_work:
        found |= {number * _BLOCK for number, one in enumerate(prompt.sequence.hashes(), 1) if one in blocks.states}
    kept = sum(prefix_hash in blocks.states for prefix_hash in prompt.sequence.hashes())
    assert found == {8, 16, 24, 32} and kept == 2, "the last one replaces those of the answer"
    assert blocks.states.num_available == 9


def test_failed_sequence_discards_its_row_of_the_step_in_flight() -> None:
    """Its row in the step in flight is discarded, and the KV written by it cannot be found."""

    def choose_but_one(logits: list[tuple[int, ...]], rows: Sequence[SamplingRow], places: Seq[int] | None) -> Sampled:
        chosen = choose(logits, rows, places).wait()
        is_bad = [row.tokens[0] == 20 and row.position == 15 for row in rows]
        return Sampled.known([None if bad else one for one, bad in zip(chosen, is_bad, strict=True)])

    engine = make_engine(by=choose_but_one, max_batch_tokens=20, is_async=True)
    for prompt in (make_prompt(range(9), max_tokens=20), make_prompt(range(20, 29), max_tokens=20)):
        engine.add(prompt)
    [good], [bad] = (prefilled.sequences for prefilled in engine.step().prefilled)
    while not (result := engine.step()).failed:
        assert [sequence for sequence, _ in result.sampled] == [good, bad]
    assert result.failed == [bad] and [sequence for sequence, _ in result.sampled] == [good]
    assert bad.num_generated == 6 and engine.blocks.match(bad.hashes()) == 0 < engine.blocks.match(good.hashes())
    behind = engine.step()
    assert not behind.failed and [sequence for sequence, _ in behind.sampled] == [good] and behind.num_rows == 2
    finish(engine)
    assert good.num_generated == 20
    check_tokens(good)


def test_dropped_row_is_recomputed_at_its_position() -> None:
    """Only the end of the row differs in the next step. Random runs rarely reach this case."""
    engine = make_engine(max_batch_tokens=20, is_async=True)
    engine.add(make_prompt(range(9), max_tokens=9))
    run(engine, 2)
    (sequence,) = engine.decoding.running
    engine.pause(sequence)  # while a step with it is in flight
    num_told = len(sequence.tokens)
    assert not engine.step().sampled and len(sequence.tokens) == num_told
    engine.resume(sequence)
    finish(engine)
    assert sequence.num_generated == 9
    check_tokens(sequence)


class EngineMachine(RuleBasedStateMachine):
    """State machine: prompts arrive, are fetched, shipped, cancelled, paused and computed in any order."""

    decodes = True
    is_async = False
    max_batch_tokens = 7
    max_running = 5
    drafts = False
    num_states = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.pool = self.make_blocks()
        limits = {"max_batch_tokens": self.max_batch_tokens, "max_running": self.max_running, "max_waiting": 20}
        config = SchedulerConfig(**limits, decodes=self.decodes)
        self.hostile = HostileProposer()
        self.speculation = Speculation({"hostile": self.hostile}, max_tokens=5, vocab_size=UNSCORABLE)
        self.engine = Engine(
            self.pool,
            choose,
            self.blocks,
            config,
            block_size=_BLOCK,
            connector=self,
            tier_orders=self.tier_orders,
            is_async=self.is_async,
            speculation=self.speculation if self.drafts else None,
        )
        self.prompts: list[Prompt] = []  # not complete yet
        self.running: list[TokenSequence] = []
        self.paused: list[TokenSequence] = []
        self.read_blocks: dict[TokenSequence, list[int]] = {}
        self.num_preempted = 0

    def make_blocks(self) -> tuple[BlockManager, FakePool]:
        return BlockManager(_NUM_BLOCKS, num_states=self.num_states), FakePool(has_states=self.num_states > 0)

    def begin_step(self, admitted: Sequence[Prompt]) -> None:
        pass

    def tier_orders(self) -> list[TierOrders]:
        return []

    def offer(self, prompt: Prompt) -> None:
        """Offer a new prompt what lower tiers hold."""

    def orders(self, step: ScheduledStep) -> Orders:
        assert step.num_tokens <= max(self.max_batch_tokens, len(step.decoding)), (
            "only decoding rows may exceed the token limit"
        )
        return Orders()

    @rule(
        kind=st.integers(0, 2),
        length=st.integers(2, 40),
        max_tokens=st.integers(1, 12),
        choices=st.integers(1, 3),
        offered=st.integers(0, 40),
        source=st.sampled_from(KVSource),
        fetch_only=st.booleans(),
        is_scored=st.booleans(),
        tenant=st.sampled_from("ab"),
        is_masked=st.booleans(),
        stops=st.sampled_from([(), tuple(range(0, 50, 4))]),
    )
    def add(
        self,
        kind: int,
        length: int,
        max_tokens: int,
        choices: int,
        offered: int,
        source: KVSource,
        fetch_only: bool,
        is_scored: bool,
        tenant: str,
        is_masked: bool,
        stops: tuple[int, ...],
    ) -> None:
        source = source if self.decodes else KVSource.HERE
        is_here = source is KVSource.HERE
        choices = 1 if source is KVSource.DECODE else choices
        fields = {"source": source, "num_offered": min(offered, length) if is_here else 0}
        fields["fetch_only"] = fetch_only and not self.decodes
        is_scored &= not fields["fetch_only"]
        fields["tenant"], fields["stops"] = tenant, stops
        fields["mask"] = FakeMask() if is_masked else None
        prompt = make_prompt([kind] * length, max_tokens=max_tokens, choices=choices, is_scored=is_scored, **fields)
        if len(self.prompts) < 20:
            self.offer(prompt)
            self.engine.add(prompt)
            self.prompts.append(prompt)

    @rule()
    def step(self) -> None:
        held = {sequence: len(sequence.blocks) for sequence in self.running}
        result = self.engine.step()
        for sequence, num_blocks in held.items():
            if sequence in self.engine.decoding.running and not self.is_async:
                assert sequence.num_missing == 1, "only the last token's KV may be missing"
                assert len(sequence.blocks) <= max(num_blocks, sequence.num_blocks_for(sequence.num_computed))
        outputs: dict[TokenSequence, list[int]] = {}
        for sequence, token in result.sampled:
            outputs.setdefault(sequence, []).append(token.token_id)
        for sequence, tokens in outputs.items():
            assert sequence in self.running and tokens == sequence.tokens[-len(tokens) :]
            check_tokens(sequence, len(tokens))
        for prefilled in result.prefilled:
            self._start(prefilled)
        for prompt in result.fetched:
            self.prompts.remove(prompt)
        self.running = [sequence for sequence in self.running if not self._is_over(sequence)]

    @precondition(lambda self: self.engine.prompts.fetching)
    @rule(data=st.data(), comes=st.booleans())
    def fetch(self, data: st.DataObject, comes: bool) -> None:
        prompt = data.draw(st.sampled_from(self.engine.prompts.fetching))
        sequence = prompt.sequence
        if comes:
            end = prompt.fetch_end
            self._flush_copies()
            self.pool.write(sequence, end, sequence.tokens)
            self.engine.prompts.fetched(prompt, end - sequence.num_computed)
        else:
            self.engine.prompts.fetch_failed(prompt)

    @precondition(lambda self: self.engine.prompts.reserved)
    @rule(data=st.data(), more=st.integers(1, 4))
    def land(self, data: st.DataObject, more: int) -> None:
        prompt = data.draw(st.sampled_from(list(self.engine.prompts.reserved)))
        sequence, tokens = prompt.sequence, list(prompt.sequence.tokens)
        num_known = len(tokens)
        if prompt.is_running_elsewhere:
            tokens += _continued(tokens, more, sequence.sampling_row.seed)
            num_tokens, next_tokens = len(tokens) - 1, tokens[num_known:]
        else:
            num_tokens = num_known
            next_tokens = [_next(tokens, choice_seed(7, choice)) for choice in prompt.choices]
        self._flush_copies()
        self.pool.write(sequence, num_tokens, tokens)
        self._start(self.engine.landed(prompt, num_tokens, next_tokens))

    def _flush_copies(self) -> None:
        """Make the copies of states, as a worker does before another replica may write."""
        if self.blocks.states:
            self.pool.execute(None, Orders(state_copies=self.blocks.states.take_copies()))

    @invariant()
    def checkpoints_hold_their_states(self) -> None:
        if (states := self.blocks.states) is None:
            return
        self._flush_copies()
        for sequence in self._alive():
            for number, prefix_hash in enumerate(sequence.hashes(), 1):
                if prefix_hash in states:
                    slot = states.hold(prefix_hash)
                    states.free([slot])
                    found = self.pool.states[states.index(slot)]
                    assert found == tuple(sequence.tokens[: number * _BLOCK]), "the checkpoint has another state"

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(self.prompts))
        self.prompts.remove(prompt)
        self.engine.cancel(prompt)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), pauses=st.booleans())
    def end_or_pause(self, data: st.DataObject, pauses: bool) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        if pauses:
            self.engine.pause(sequence)
            self.paused.append(sequence)
        else:
            self.engine.end(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def pause_in_step(self, data: st.DataObject) -> None:
        """Pause a sequence as a migration does, which ships the state behind its last computed position."""
        sequence = data.draw(st.sampled_from(self.running))
        self.engine.in_step.add(sequence)
        self.step()
        if sequence in self.engine.decoding.running:
            self.running.remove(sequence)
            self.paused.append(sequence)
            self.engine.pause(sequence)
            if self.blocks.states:
                state = self.pool.states[sequence.state_index]
                assert sequence.state_slots and state == tuple(sequence.tokens[: sequence.num_computed]), (
                    "the paused sequence has another state"
                )
        self.engine.in_step.remove(sequence)

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        sequence = self.paused.pop()
        self.running.append(sequence)
        self.engine.resume(sequence)

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        self.blocks.check_integrity()
        assert self.engine.num_queued_tokens >= 0
        held = {block for sequence in self._alive() for block in sequence.blocks}
        assert self.blocks.num_blocks - self.blocks.num_available == len(held), "leaked or double-freed blocks"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def ship_blocks(self, data: st.DataObject) -> None:
        self.read(data.draw(st.sampled_from(self.running)))

    def read(self, sequence: TokenSequence) -> None:
        """Start shipping the blocks of a sequence, which must stay in place from then on."""
        if sequence.blocks and sequence not in self.read_blocks:
            self.num_preempted = self.engine.decoding.num_preemptions
            self.read_blocks[sequence] = list(sequence.blocks[: sequence.num_blocks_for(sequence.num_computed)])

    @invariant()
    def shipped_blocks_stay_in_place(self) -> None:
        for sequence, blocks in list(self.read_blocks.items()):
            if sequence in self.engine.decoding.running and self.num_preempted == self.engine.decoding.num_preemptions:
                assert sequence.blocks[: len(blocks)] == blocks
            else:  # it may have been preempted and resumed
                del self.read_blocks[sequence]

    @invariant()
    def cached_blocks_hold_their_tokens(self) -> None:
        for sequence in self._alive():
            assert sequence.num_computed <= len(sequence.tokens)
            for number, prefix_hash in enumerate(sequence.hashes()):
                if prefix_hash in self.blocks:
                    begin = self.blocks.block_of(prefix_hash) * _BLOCK
                    found = [self.pool.tokens.get(slot) for slot in range(begin, begin + _BLOCK)]
                    assert found == sequence.tokens[number * _BLOCK : (number + 1) * _BLOCK], (
                        "a cached block does not hold its tokens"
                    )

    @rule(temper=st.integers(0, _NUM_TEMPERS - 1))
    def guess(self, temper: int) -> None:
        self.hostile.temper = temper

    def teardown(self) -> None:
        for prompt in self.prompts:
            self.engine.cancel(prompt)
        for sequence in (*self.running, *self.paused):
            self.engine.end(sequence)
        self.blocks.check_integrity()
        assert self.blocks.num_available == _NUM_BLOCKS
        assert not self.blocks.states or self.blocks.states.num_available == self.num_states
        assert (self.engine.num_running, self.engine.num_waiting) == (0, 0)

    def _alive(self) -> list[TokenSequence]:
        return [*(prompt.sequence for prompt in self.prompts), *self.running, *self.paused]

    def _start(self, prefilled: Prefilled) -> None:
        prompt = prefilled.prompt
        self.prompts.remove(prompt)
        self._check_scores(prompt)
        for choice, token in zip(prompt.choices, prefilled.tokens, strict=False):
            tokens = prompt.sequence.request.token_ids
            assert token.token_id == _next(tokens, choice_seed(7, choice))
        self.running += [sequence for sequence in prefilled.sequences if not self._is_over(sequence)]

    def _check_scores(self, prompt: Prompt) -> None:
        """Check that each token is scored once, from all tokens before it, unless another replica computes the
        prompt."""
        request, results = prompt.sequence.request, prompt.take_scores()
        is_told = request.num_prompt_logprobs is not None and not prompt.is_received
        tokens = request.token_ids if is_told else ()
        assert results.top_ids_PK.ravel().tolist() == list(tokens[1:])
        assert results.ranks_P.tolist() == [hash(tokens[:end]) % 50 for end in range(1, len(tokens))]
        assert results.logprobs_P.tolist() == [-end for end in range(1, len(tokens))]

    def _is_over(self, sequence: TokenSequence) -> bool:
        return not (sequence in self.engine.decoding.running or sequence in self.engine.decoding.preempted) and not any(
            prompt.sequence is sequence for prompt in self.engine.prompts.computing
        )


class PrefillingMachine(EngineMachine):
    """State machine of an engine that only prefills."""

    decodes = False


class AheadMachine(EngineMachine):
    """State machine with async scheduling."""

    is_async = True


class SpeculatingMachine(EngineMachine):
    """State machine with drafts of random quality."""

    max_running = 12
    drafts = True


class SpeculatingAheadMachine(SpeculatingMachine):
    """State machine with drafts and async scheduling."""

    is_async = True


class StatesMachine(SpeculatingMachine):
    """State machine of a model with recurrent layers, with drafts and few state slots."""

    num_states = 9

    def __init__(self) -> None:
        super().__init__()
        assert self.blocks.states
        self.blocks.states.interval = 2 * _BLOCK


class PrefillingStatesMachine(StatesMachine):
    """State machine of an engine with states that only prefills."""

    decodes = False


class SpeculatingStatesAheadMachine(StatesMachine):
    """State machine of an engine with states, drafts and async scheduling."""

    is_async = True


class StatesAheadMachine(SpeculatingStatesAheadMachine):
    """The same without drafts, so that most steps run ahead."""

    drafts = False


class HostileProposer:
    """Proposer whose proposals are right, nearly right, or invalid."""

    temper = 0

    def propose(self, sequences: Seq[TokenSequence], max_tokens: int) -> list[Proposal]:
        return [self._propose(sequence, max_tokens) for sequence in sequences]

    def _propose(self, sequence: TokenSequence, max_tokens: int) -> Proposal:
        # More than requested, and beyond any end.
        guess = _continued(sequence.tokens, max_tokens + 2, sequence.sampling_row.seed)
        dice = hash((*sequence.tokens, *guess))
        if self.temper == 1:
            guess[dice % len(guess)] += 1
        elif self.temper == 2:
            guess = [POISON - 2] * len(guess)
        elif self.temper == 3:
            guess[dice % len(guess)] = (-1, UNSCORABLE, POISON, 1 << 40)[dice % 4]
        elif self.temper == 4:
            guess = guess[: dice % 3]
        kinds = [dice % NUM_KINDS] * len(guess)
        return Proposal(guess, kinds)

    def finished(self, sequence: TokenSequence) -> None:
        assert sequence.num_generated > 0, "finished without a last token"  # a choice may get it before it gets blocks


SETTINGS = settings(
    max_examples=settings.default.max_examples // 3,
    stateful_step_count=40,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
SEARCH = settings(SETTINGS, max_examples=1000, phases=[Phase.generate], derandomize=True)  # any failure is enough


@pytest.mark.parametrize(
    "machine",
    [
        *(EngineMachine, PrefillingMachine, AheadMachine, SpeculatingMachine, SpeculatingAheadMachine),
        *(StatesMachine, PrefillingStatesMachine, StatesAheadMachine, SpeculatingStatesAheadMachine),
    ],
)
def test_random_runs_keep_sequences_and_blocks_consistent(machine: type[EngineMachine]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)


def _forget_the_copies(self: FakePool, step: ScheduledStep | None, orders: Orders, /) -> object:
    return _execute(self, step, Orders())


def _one_position_late(self: TokenSequence, num_tokens: int, states: StateManager) -> list[tuple[int, int]]:
    slots = _take_checkpoint_slots(self, num_tokens, states)
    return [(min(offset + 1, num_tokens - 1), slot) for offset, slot in slots]


def _always(step: ScheduledStep, running: Collection[TokenSequence]) -> bool:
    return not step.prompts and any(sequence in running for sequence, _ in step.decoding)


def _run_ahead_always(self: Engine[object], step: ScheduledStep) -> bool:
    return async_steps.may_be_followed(step, self.decoding.running) and not self._drafting.awaits(self.decoding.running)


_execute, _take_checkpoint_slots = FakePool.execute, TokenSequence.take_checkpoint_slots


@pytest.mark.parametrize(
    ("machine", "owner", "name", "fault"),
    [
        (EngineMachine, FakePool, "execute", _forget_the_copies),
        (EngineMachine, Engine, "end", Engine.pause),
        (StatesMachine, TokenSequence, "take_checkpoint_slots", _one_position_late),
        (AheadMachine, engine_module, "may_be_followed", _always),
        (StatesAheadMachine, Engine, "_can_run_ahead", _run_ahead_always),
    ],
)
def test_state_machine_finds_planted_faults(
    machine: type[EngineMachine],
    owner: object,
    name: str,
    fault: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, LookupError, ValueError, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=SEARCH)


def _one_too_many(
    draft: Draft, sequence: TokenSequence, num_tokens: int, choose: Choose, blocks: BlockManager
) -> object:
    """Fault: accept the token chosen behind the first drafted token, although that is not the sequence's next token."""
    first = choose(0)
    draft.tokens = [first[0] if first else -1, *draft.tokens[1:]]
    return _verify(draft, sequence, num_tokens, choose, blocks)


_verify = verify_module.verify


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (None, "", None),
        (engine_module, "verify", _one_too_many),
        (Draft, "give_back", lambda self, sequence, blocks, num_right: None),
        (speculation_module, "take_room", lambda sequence, num_tokens, blocks: num_tokens),
    ],
)
def test_any_drafts_keep_sequences_and_blocks_consistent(
    owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a few requests with drafts to the end, once with each temper; each fault must be noticed."""
    if fault:
        monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, LookupError, ValueError)) if fault else nullcontext():
        for temper, length, max_tokens in product(range(_NUM_TEMPERS), (3, 6), (5, 11)):
            machine = SpeculatingMachine()
            machine.hostile.temper = temper
            for kind in range(2):
                mask = FakeMask() if kind else None
                prompt = make_prompt([kind] * (length + kind), max_tokens=max_tokens, choices=2, mask=mask)
                machine.engine.add(prompt)
                machine.prompts.append(prompt)
            while machine.prompts or machine.running:
                machine.step()
                if temper % 2 and machine.running:
                    machine.read(machine.running[0])
                machine.every_block_is_in_one_state()
                machine.shipped_blocks_stay_in_place()
                machine.cached_blocks_hold_their_tokens()
            machine.teardown()
