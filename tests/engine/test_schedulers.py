"""Prompts whose prefixes are on their way into this pool: who waits for whom, and for how long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.words.request import Sampling, SequenceRequest
from engine import decode_scheduler, prefill_scheduler
from engine.group import Choice, Group, Source
from engine.kv.block_manager import BlockManager
from engine.prefill_scheduler import Job
from engine.sequence import Sequence

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
    return Sequence(request, 0, model="m", block_size=_BLOCK, max_context=1000)


def _job(tokens: list[int], *, offered: int = 0, priority: int = 0, fetch_only: bool = False) -> Job:
    return Job(_sequence(tokens, priority=priority), None, fetch_only=fetch_only, num_offered=offered)


@pytest.fixture
def blocks() -> BlockManager:
    return BlockManager(32)


@pytest.fixture
def scheduler(blocks: BlockManager) -> Callable[..., prefill_scheduler.Scheduler]:
    def make(*, max_batch_tokens: int = 16, max_running: int = 8) -> prefill_scheduler.Scheduler:
        return prefill_scheduler.Scheduler(
            blocks, max_batch_tokens=max_batch_tokens, max_running=max_running, max_waiting=100
        )

    return make


def _run(scheduler: prefill_scheduler.Scheduler, blocks: BlockManager) -> list[Job]:
    """One step; the jobs that took part."""
    chosen = scheduler.schedule()
    for job, count in chosen:
        job.sequence.computed(count, blocks)
        if not job.sequence.num_missing:
            scheduler.remove(job)
            job.sequence.release(blocks)
    return [job for job, _ in chosen]


def test_others_are_computed_while_a_prefix_is_on_its_way(
    scheduler: Callable[..., prefill_scheduler.Scheduler], blocks: BlockManager
) -> None:
    queue, first, second = scheduler(), _job(_SHARED, offered=32), _job(list(range(20)))
    queue.add(first)
    queue.add(second)
    assert queue.fetch() == [first] and queue.fetch() == []
    assert (first.sequence.num_computed, first.fetch_end, len(first.sequence.blocks)) == (0, 32, 10)
    assert queue.num_queued_tokens == 8 + 20
    assert _run(queue, blocks) == [second]
    queue.fetched(first, 32)
    assert first.num_fetched == 32 and queue.num_queued_tokens == 8 + 4
    assert _run(queue, blocks) == [first, second], "it has kept its place"
    assert (queue.num_running, blocks.match(_sequence(_SHARED).hashes())) == (0, 10)
    blocks.check_integrity()


def test_siblings_wait_for_blocks_that_are_on_their_way(
    scheduler: Callable[..., prefill_scheduler.Scheduler], blocks: BlockManager
) -> None:
    queue, first, sibling, other = scheduler(), _job(_SHARED, offered=32), _job([*_SHARED, 1, 2]), _job([1] * 6)
    for job in (first, sibling, other):
        queue.add(job)
    assert queue.fetch() == [first]
    assert _run(queue, blocks) == [other], "nobody else waits for a sibling"
    queue.fetched(first, 32)
    assert _run(queue, blocks) == [first]
    assert _run(queue, blocks) == [sibling] and sibling.num_cached == 40
    blocks.check_integrity()


def test_what_does_not_come_is_computed(
    scheduler: Callable[..., prefill_scheduler.Scheduler], blocks: BlockManager
) -> None:
    queue, job, later = scheduler(max_batch_tokens=100), _job(_SHARED, offered=32), _job([1] * 6)
    queue.add(job)
    assert queue.fetch() == [job]
    exposed, job.sequence.blocks = job.sequence.blocks[:8], job.sequence.blocks[8:]
    blocks.quarantine(exposed)
    queue.add(later)
    queue.fetch_failed(job)
    assert queue.fetch() == []
    assert _run(queue, blocks) == [job, later], "the old place, and the old offer is forgotten"
    blocks.release(exposed)
    blocks.check_integrity()
    assert blocks.num_available == blocks.num_blocks


def test_nothing_is_fetched_that_is_here(
    scheduler: Callable[..., prefill_scheduler.Scheduler], blocks: BlockManager
) -> None:
    queue = scheduler(max_batch_tokens=100)
    queue.add(_job(_SHARED))
    _run(queue, blocks)
    again, longer = _job(_SHARED, offered=40), _job([*_SHARED, *range(20)], offered=56)
    queue.add(again)
    queue.add(longer)
    assert queue.num_queued_tokens == 4 + 4, "what is here or offered is not to be computed"
    assert queue.fetch() == [longer] and (longer.num_cached, longer.fetch_end) == (40, 56)
    assert _run(queue, blocks) == [again] and again.num_cached == 36


def test_who_only_fetches_is_never_computed(
    scheduler: Callable[..., prefill_scheduler.Scheduler], blocks: BlockManager
) -> None:
    queue = scheduler()
    comes, fails, other = (
        _job(_SHARED, offered=36, fetch_only=True),
        _job([9, *_SHARED], offered=36, fetch_only=True),
        _job([1] * 6),
    )
    for job in (comes, fails, other):
        queue.add(job)
    assert queue.fetch() == [comes, fails] and queue.take_fetched() == []
    assert queue.num_queued_tokens == 6 and _run(queue, blocks) == [other]
    queue.fetched(comes, 36)
    queue.fetch_failed(fails)
    assert queue.take_fetched() == [comes, fails] and not comes.sequence.num_computed % _BLOCK
    comes.sequence.release(blocks)
    again = _job(_SHARED, offered=36, fetch_only=True)
    queue.add(again)
    assert queue.fetch() == [] and queue.take_fetched() == [again], "it is here already"
    assert not _run(queue, blocks) and queue.num_running == queue.num_waiting == 0
    assert blocks.num_available == blocks.num_blocks and blocks.match(comes.sequence.hashes()) == 9
    blocks.check_integrity()


def test_a_fetch_overtakes_nobody_who_needs_the_room(
    scheduler: Callable[..., prefill_scheduler.Scheduler], blocks: BlockManager
) -> None:
    queue, running, large, small = scheduler(), _job([1] * 80), _job([2] * 60), _job(_SHARED[:20], offered=16)
    queue.add(running)
    _run(queue, blocks)
    queue.add(large)
    queue.add(small)
    assert queue.fetch() == []
    while queue.num_running:
        _run(queue, blocks)
    assert queue.fetch() == [small], "12 blocks hold nothing, and the cached ones give way"


def _group(tokens: list[int], *, offered: int = 0, source: Source = Source.HERE) -> Group:
    return Group(_sequence(tokens), router="", source=source, num_offered=offered)


def test_a_decode_replica_fetches_too(blocks: BlockManager) -> None:
    queue = decode_scheduler.Scheduler(blocks, max_batch_tokens=16, max_running=8, max_waiting=10)
    first, sibling, other = _group(_SHARED, offered=32), _group([*_SHARED, 1]), _group([1] * 6, source=Source.PREFILL)
    for group in (first, sibling, other):
        queue.add(group)
    assert queue.admit() == [first, other] and first.fetch_end == 32
    assert queue.schedule() == [] and queue.num_running == 2
    queue.fetched(first, 32)
    ((choice, count),) = queue.schedule()
    assert (choice.group, count) == (first, 8)
    first.root.computed(count, blocks)
    queue.ready(first)
    assert queue.admit() == [sibling] and sibling.num_cached == 40
    for group in (first, sibling, other):
        queue.remove(group)
        group.root.release(blocks)
    blocks.check_integrity()
    assert blocks.num_available == blocks.num_blocks


def test_what_does_not_come_to_a_decode_replica_is_computed(blocks: BlockManager) -> None:
    queue = decode_scheduler.Scheduler(blocks, max_batch_tokens=100, max_running=8, max_waiting=10)
    group = _group(_SHARED, offered=32)
    queue.add(group)
    assert queue.admit() == [group] and queue.schedule() == []
    queue.fetch_failed(group)
    assert queue.admit() == [group]
    assert [(c.group, count) for c, count in queue.schedule()] == [(group, 40)]
    assert isinstance(queue.schedule()[0][0], Choice)
