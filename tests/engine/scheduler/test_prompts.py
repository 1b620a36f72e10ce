"""Prompts whose prefix is being fetched or computed: which prompts wait, and for how long."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from core.types.request import Sampling, SequenceRequest
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.scheduler.prompts import KVSource, Prompt, PromptQueue, allocate
from engine.scheduler.sequence import Sequence
from tests.engine.fake_model import FakeConnector, FakeModel, choose_zero

_BLOCK = 4
_SHARED = list(range(100, 140))


def _sequence(tokens: list[int], *, priority: int = 0) -> Sequence:
    request = SequenceRequest(
        id="r",
        token_ids=tuple(tokens),
        num_prompt_tokens=len(tokens),
        sampling=Sampling(max_tokens=8, temperature=0.0),
        priority=priority,
    )
    return Sequence(request, 0, model="m", block_size=_BLOCK, max_context=10_000)


def _prompt(tokens: list[int], *, offered: int = 0, priority: int = 0, fetch_only: bool = False) -> Prompt:
    return Prompt(_sequence(tokens, priority=priority), fetch_only=fetch_only, num_offered=offered)


class Queue:
    """Engine that records which prompts take part in its steps."""

    def __init__(self, blocks: BlockManager, *, max_batch_tokens: int, decodes: bool = False) -> None:
        config = SchedulerConfig(max_batch_tokens=max_batch_tokens, max_running=8, max_waiting=100, decodes=decodes)
        self.model, self.connector = FakeModel(), FakeConnector()
        self.engine = Engine(self.model, choose_zero, blocks, config, block_size=_BLOCK, connector=self.connector)
        self.prompts = self.engine.prompts

    def run(self) -> tuple[list[Prompt], list[Prompt]]:
        """Run one step; return the prompts admitted before it, and those that took part in it."""
        step = self.engine.launch()
        self.engine.complete(step)
        return self.connector.admitted, [prompt for prompt, _ in step.prompts]


@pytest.fixture
def blocks() -> BlockManager:
    return BlockManager(32)


@pytest.fixture
def queue(blocks: BlockManager) -> Queue:
    return Queue(blocks, max_batch_tokens=16)


def test_other_prompts_are_computed_during_a_fetch(queue: Queue, blocks: BlockManager) -> None:
    first, second = _prompt(_SHARED, offered=32), _prompt(list(range(20)))
    queue.engine.add(first)
    queue.engine.add(second)
    assert queue.engine.num_queued_tokens == 8 + 20
    assert queue.run() == ([first], [second])
    assert (first.sequence.num_computed, first.fetch_end, len(first.sequence.blocks)) == (0, 32, 10)
    queue.prompts.fetched(first, 32)
    assert first.num_fetched == 32 and queue.engine.num_queued_tokens == 8 + 4
    assert queue.run() == ([], [first, second]), "the fetched prompt must keep its place in the queue"
    assert (queue.engine.num_running, blocks.match(_sequence(_SHARED).hashes())) == (0, 10)
    blocks.check_integrity()


def test_a_state_that_is_cached_before_admission_is_not_loaded() -> None:
    blocks = BlockManager(32, num_states=3)
    prompts, computed = PromptQueue(blocks, max_waiting=1), _sequence(_SHARED)
    states = blocks.states
    assert states
    prompt = _prompt(_SHARED, offered=36)
    prompt.is_loaded = True
    prompts.add(prompt)
    assert allocate(computed, blocks)
    computed.computed(36, blocks)
    computed.checkpoint_fetched(states)
    computed.release(blocks)
    states.take_copies()
    assert prompts.admit(prompt) and prompts.computing == [prompt]
    assert prompt.num_cached == 36 and states.take_copies() == [(1, prompt.sequence.state_index)]


def test_prompts_with_a_common_prefix_wait_for_its_fetch(queue: Queue, blocks: BlockManager) -> None:
    first, sibling, other = _prompt(_SHARED, offered=32), _prompt([*_SHARED, 1, 2]), _prompt([1] * 6)
    for prompt in (first, sibling, other):
        queue.engine.add(prompt)
    assert queue.run() == ([first], [other]), "only the prompt with the common prefix may wait"
    queue.prompts.fetched(first, 32)
    assert queue.run() == ([], [first])
    assert queue.run() == ([], [sibling]) and sibling.num_cached == 40
    blocks.check_integrity()


class CountingBlocks(BlockManager):
    """BlockManager that counts the blocks looked up."""

    num_looked_for = 0

    def match(self, hashes: Seq[bytes], *, after: int = 0) -> int:
        depth = super().match(hashes, after=after)
        self.num_looked_for += depth - after
        return depth


@pytest.mark.parametrize("decodes", [False, True])
def test_waiting_prompt_does_not_look_up_whole_prefix_each_step(decodes: bool) -> None:
    num_blocks, num_siblings = 256, 8
    shared = list(range(num_blocks * _BLOCK))
    blocks = CountingBlocks(num_blocks + 4 * num_siblings)
    queue = Queue(blocks, max_batch_tokens=2 * _BLOCK, decodes=decodes)
    for i in range(1 + num_siblings):
        queue.engine.add(_prompt([*shared, -i]))
    queue.run()
    blocks.num_looked_for, num_steps = 0, 0
    while queue.prompts.waiting:
        queue.run()
        num_steps += 1
    assert num_steps >= num_blocks // 2
    assert blocks.num_looked_for <= 8 * num_siblings * num_blocks, (
        "each prompt may walk the prefix a few times, but not in each step"
    )
    blocks.check_integrity()


def test_prompt_is_computed_after_failed_fetch(blocks: BlockManager) -> None:
    queue = Queue(blocks, max_batch_tokens=100)
    prompt, later = _prompt(_SHARED, offered=32), _prompt([1] * 6)
    queue.engine.add(prompt)
    assert queue.run() == ([prompt], [])
    exposed, prompt.sequence.blocks = prompt.sequence.blocks[:8], prompt.sequence.blocks[8:]
    blocks.quarantine(exposed)
    queue.engine.add(later)
    queue.prompts.fetch_failed(prompt)
    assert queue.run() == ([], [prompt, later]), "expected the old place in the queue, without the offer"
    blocks.release(exposed)
    blocks.check_integrity()
    assert blocks.num_available == blocks.num_blocks


def test_cached_prefix_is_not_fetched(blocks: BlockManager) -> None:
    queue = Queue(blocks, max_batch_tokens=100)
    queue.engine.add(_prompt(_SHARED))
    queue.run()
    again, longer = _prompt(_SHARED, offered=40), _prompt([*_SHARED, *range(20)], offered=56)
    queue.engine.add(again)
    queue.engine.add(longer)
    assert queue.engine.num_queued_tokens == 4 + 4, "cached and offered tokens must not count as queued"
    assert queue.run() == ([longer], [again])
    assert (longer.num_cached, longer.fetch_end, again.num_cached) == (40, 56, 36)


def test_fetch_only_prompt_is_never_computed(queue: Queue, blocks: BlockManager) -> None:
    comes, fails = (_prompt(tokens, offered=36, fetch_only=True) for tokens in (_SHARED, [9, *_SHARED]))
    other = _prompt([1] * 6)
    for prompt in (comes, fails, other):
        queue.engine.add(prompt)
    assert queue.engine.num_queued_tokens == 6
    assert queue.run() == ([comes, fails], [other])
    queue.prompts.fetched(comes, 36)
    queue.prompts.fetch_failed(fails)
    assert queue.engine.step().fetched == [comes, fails]
    again = _prompt(_SHARED, offered=36, fetch_only=True)
    queue.engine.add(again)
    assert queue.engine.step().fetched == [again], "a cached prefix must not be fetched"
    assert queue.engine.num_running == queue.engine.num_waiting == 0
    assert blocks.num_available == blocks.num_blocks and blocks.match(comes.sequence.hashes()) == 9
    blocks.check_integrity()


def test_fetch_does_not_overtake_prompt_that_needs_the_blocks(queue: Queue) -> None:
    running, large, small = _prompt([1] * 80), _prompt([2] * 60), _prompt(_SHARED[:20], offered=16)
    queue.engine.add(running)
    queue.run()
    queue.engine.add(large)
    queue.engine.add(small)
    for _ in range(4):
        assert queue.run() == ([], [running])
    assert queue.run() == ([small], [large]), "free and cached blocks must suffice for both"


def test_decode_replica_fetches_prefix(blocks: BlockManager) -> None:
    queue = Queue(blocks, max_batch_tokens=16, decodes=True)
    first, sibling = _prompt(_SHARED, offered=32), _prompt([*_SHARED, 1])
    other = Prompt(_sequence([1] * 6), source=KVSource.PREFILL)
    for prompt in (first, sibling, other):
        queue.engine.add(prompt)
    assert queue.run() == ([first, other], []) and first.fetch_end == 32
    assert queue.engine.num_running == 2
    queue.prompts.fetched(first, 32)
    assert queue.run() == ([], [first])
    assert queue.run() == ([sibling], [sibling]) and sibling.num_cached == 40
    for prompt in (first, sibling, other):
        queue.engine.end(prompt.sequence)
        queue.engine.cancel(prompt)
    blocks.check_integrity()
    assert blocks.num_available == blocks.num_blocks


def test_decode_replica_computes_prompt_after_failed_fetch(blocks: BlockManager) -> None:
    queue, prompt = Queue(blocks, max_batch_tokens=100, decodes=True), _prompt(_SHARED, offered=32)
    queue.engine.add(prompt)
    assert queue.run() == ([prompt], [])
    queue.prompts.fetch_failed(prompt)
    assert queue.run() == ([prompt], [prompt])
