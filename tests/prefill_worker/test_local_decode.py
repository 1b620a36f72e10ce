"""Local decodes of a prefill worker, together with shipped prompts, step by step on one thread."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.types.errors import CapacityError
from engine.scheduler.prompts import KVSource, Prompt
from prefill_worker.worker import PrefillWorker
from tests.engine.steps import prompts
from tests.prefill_worker.test_worker import FakeListener
from tests.worker.answer_listeners import FakeAnswerListener, FakeMoveListener
from tests.worker.rank_of_one import RankOfOne, shipment
from worker import migrations

_PROMPT, _OTHER, _THIRD, _LARGE = prompts(20, 19, 18, 50)
_ROUTER = "router-0"
_MAX_LOCAL_DECODES, _BLOCKS = 2, 6  # limits of local decodes, of 4 rows and 12 blocks


def _worker(rank: RankOfOne, *, max_local_decodes: int = _MAX_LOCAL_DECODES) -> PrefillWorker:
    parts = rank.parts(decodes=False)
    limits = replace(parts.limits, max_local_decodes=max_local_decodes, max_local_decode_blocks=_BLOCKS)
    return PrefillWorker(replace(parts, limits=limits))


class LocalRequest:
    """One request for tokens on a separate stream."""

    def __init__(self, rank: RankOfOne, tokens: list[int], *, stream: int, max_tokens: int = 5, n: int = 1) -> None:
        self.prompt: Prompt = rank.prompt(tokens, id=f"r{stream}", max_tokens=max_tokens, n=n)
        self.prompt.sequence.request = replace(self.prompt.sequence.request, stream=stream)
        self.stream = stream
        self.listener = FakeAnswerListener()

    @property
    def is_over(self) -> bool:
        return self.listener.events[-1:] == ["ended"]

    def submit(self, worker: PrefillWorker) -> LocalRequest:
        worker.submit(self.prompt, _ROUTER, self.listener)
        return self


def _step(worker: PrefillWorker, output: dict[int, list[int]]) -> bool:
    did_work = worker.step()
    for stream, token in worker.answers.take_tokens().get(_ROUTER, []):
        output.setdefault(stream, []).append(token.token_id)
    return did_work


def _run(worker: PrefillWorker) -> dict[int, list[int]]:
    """Step until there is nothing to do. Returns the tokens of each stream."""
    output: dict[int, list[int]] = {}
    while _step(worker, output):
        pass
    return output


def _alone(rank: RankOfOne, tokens: list[int], *, max_tokens: int) -> list[int]:
    """Return the tokens of a request that runs alone."""
    fresh = RankOfOne(rank.runner)
    worker = _worker(fresh)
    LocalRequest(fresh, tokens, stream=1, max_tokens=max_tokens).submit(worker)
    return _run(worker)[1]


def test_local_decode_streams_its_answer_and_frees_everything(rank: RankOfOne) -> None:
    worker = _worker(rank)
    local_decode = LocalRequest(rank, _PROMPT, stream=1).submit(worker)
    assert worker.num_requests == 1 and worker.status().local_decodes.waiting == 1
    _step(worker, {})
    output_of = worker.status().local_decodes
    assert (output_of.running, output_of.waiting, output_of.blocks) == (1, 0, 3) and worker.status().running == 1
    output = _run(worker)
    assert local_decode.listener.events == ["reserved, 0 cached", "started at 20, epoch 0", "ended"]
    assert len(output[1]) == 5 and local_decode.listener.error is None
    assert (worker.num_requests, rank.num_held) == (0, 0) and not worker.status().HasField("local_decodes")


def test_choices_of_a_local_decode_have_separate_streams(rank: RankOfOne) -> None:
    worker = _worker(rank)
    LocalRequest(rank, _PROMPT, stream=1, n=2).submit(worker)
    output = _run(worker)
    assert sorted(output) == [1, 2] and output[1] == output[2] == _alone(rank, _PROMPT, max_tokens=5)
    assert rank.num_held == 0


def test_prompts_are_shipped_beside_local_decodes(rank: RankOfOne) -> None:
    worker, listener, handoff, output = _worker(rank), FakeListener(), rank.handoff(18), dict[int, list[int]]()
    local_decodes = [
        LocalRequest(rank, tokens, stream=i, max_tokens=20).submit(worker) for i, tokens in ((1, _PROMPT), (2, _OTHER))
    ]
    while len(output) < 2:
        _step(worker, output)
    worker.prefill(rank.prompt(_THIRD), handoff, listener)
    while not listener.tokens:
        _step(worker, output)
    assert rank.sender.transfers[handoff.key].committed == (18, listener.tokens)
    assert not any(local_decode.is_over for local_decode in local_decodes)
    worker.shipped(0, shipment(handoff))
    for stream, tokens in _run(worker).items():
        output[stream] += tokens
    assert output == {1: _alone(rank, _PROMPT, max_tokens=20), 2: _alone(rank, _OTHER, max_tokens=20)}
    assert (worker.num_requests, rank.num_held) == (0, 0)


def test_local_decode_beyond_the_share_waits_and_prompts_overtake_it(rank: RankOfOne) -> None:
    worker, listener = _worker(rank, max_local_decodes=1), FakeListener()
    first, second = (LocalRequest(rank, tokens, stream=i).submit(worker) for i, tokens in ((1, _PROMPT), (2, _OTHER)))
    worker.prefill(rank.prompt(_THIRD), None, listener)
    while not listener.ends:
        worker.step()
    assert not first.is_over and second.listener.events == [] and worker.status().local_decodes.waiting == 1
    _run(worker)
    assert first.is_over and second.is_over and rank.num_held == 0


@pytest.mark.parametrize("rejected", ["its KV is elsewhere", "too many choices", "too large"])
def test_request_beyond_local_capacity_is_rejected_at_once(rank: RankOfOne, rejected: str) -> None:
    worker = _worker(rank)
    local_decode = LocalRequest(
        rank, _LARGE if rejected == "too large" else _PROMPT, stream=1, n=3 if "choices" in rejected else 1
    )
    local_decode.prompt.source = KVSource.PREFILL if "elsewhere" in rejected else KVSource.HERE
    local_decode.submit(worker)
    assert isinstance(local_decode.listener.error, CapacityError) and worker.num_requests == 0


def test_local_decodes_that_outgrow_their_share_run_one_by_one(rank: RankOfOne) -> None:
    """Each needs six blocks at the end, but both together may have only six."""
    worker = _worker(rank)
    for stream, tokens in ((1, _PROMPT), (2, _OTHER)):
        LocalRequest(rank, tokens, stream=stream, max_tokens=28).submit(worker)
    most, output = 0, dict[int, list[int]]()
    while _step(worker, output):
        most = max(most, rank.num_held)
    assert output == {1: _alone(rank, _PROMPT, max_tokens=28), 2: _alone(rank, _OTHER, max_tokens=28)}
    assert worker.status().totals.preemptions and most <= _BLOCKS + 2, (
        "each may exceed the share by one before it is noticed"
    )
    assert (worker.num_requests, rank.num_held) == (0, 0)


def test_local_decodes_are_preempted_for_a_larger_prompt(rank: RankOfOne) -> None:
    worker, listener, handoff, output = _worker(rank), FakeListener(), rank.handoff(50), dict[int, list[int]]()
    for stream, tokens in ((1, _PROMPT), (2, _OTHER)):
        LocalRequest(rank, tokens, stream=stream, max_tokens=24).submit(worker)
    while len(output) < 2:
        _step(worker, output)
    worker.prefill(rank.prompt(_LARGE), handoff, listener)
    for _ in range(12):
        _step(worker, output)
    assert listener.tokens and worker.status().totals.preemptions and max(map(len, output.values())) < 24
    worker.shipped(0, shipment(handoff))
    while _step(worker, output):
        pass
    assert output == {1: _alone(rank, _PROMPT, max_tokens=24), 2: _alone(rank, _OTHER, max_tokens=24)}
    assert (worker.num_requests, rank.num_held) == (0, 0)


def test_preempted_local_decode_waits_until_the_prompt_has_its_blocks(rank: RankOfOne) -> None:
    """A preempted local decode runs alone and could take any number of blocks."""
    long, larger = prompts(36, 62)
    worker, listener, output = _worker(rank), FakeListener(), dict[int, list[int]]()
    LocalRequest(rank, long, stream=1, max_tokens=26).submit(worker)
    while 1 not in output:
        _step(worker, output)
    worker.prefill(rank.prompt(larger), None, listener)
    for _ in range(10):
        _step(worker, output)
    assert listener.tokens, "the local decode and the prompt preempt each other"
    while _step(worker, output):
        pass
    assert output == {1: _alone(rank, long, max_tokens=26)} and rank.num_held == 0


@pytest.mark.parametrize("why", ["it is larger than the share", "the prompt is scored"])
def test_single_local_decode_is_preempted_for_a_prompt_without_room(rank: RankOfOne, why: str) -> None:
    """A single local decode may exceed the share; a scored prompt cannot reuse the blocks of its prefix."""
    is_scored = "scored" in why
    worker, listener, output = _worker(rank), FakeListener(), dict[int, list[int]]()
    max_tokens = 30 if is_scored else 60
    local_decode = LocalRequest(rank, _PROMPT, stream=1, max_tokens=max_tokens).submit(worker)
    while rank.num_held < (6 if is_scored else 8):
        assert _step(worker, output)
    prompt = rank.prompt(_PROMPT[:16] + _LARGE[16:] if is_scored else _LARGE[:40])
    if is_scored:
        prompt.sequence.request = replace(prompt.sequence.request, num_prompt_logprobs=0)
        prompt.sequence.is_scored = True
    worker.prefill(prompt, None, listener)
    while not listener.tokens:
        assert _step(worker, output)
    assert not local_decode.is_over and worker.status().totals.preemptions == 1
    for stream, tokens in _run(worker).items():
        output[stream] += tokens
    assert output == {1: _alone(rank, _PROMPT, max_tokens=max_tokens)}
    assert (worker.num_requests, rank.num_held) == (0, 0)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_local_decode_whose_lease_ends_frees_its_blocks(rank: RankOfOne, steps: int) -> None:
    """The lease may end while the request waits, computes or decodes."""
    worker = _worker(rank)
    local_decode = LocalRequest(rank, _PROMPT, stream=1, max_tokens=20).submit(worker)
    for _ in range(steps):
        worker.step()
    worker.cancel(local_decode.prompt)
    assert not worker.step() and (worker.num_requests, rank.num_held) == (0, 0)
    assert worker.status().totals.cancelled == 1


def test_local_decode_migrates_to_a_decode_replica(rank: RankOfOne, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "is_quicker_to_ship", lambda **_: True)
    worker, moving, output = _worker(rank), FakeMoveListener(), dict[int, list[int]]()
    local_decode = LocalRequest(rank, _PROMPT, stream=1, max_tokens=20).submit(worker)
    while 1 not in output:
        _step(worker, output)
    handoff = replace(rank.handoff(20), max_tokens=40)
    worker.migrate(_ROUTER, 1, handoff, moving)
    _step(worker, output)
    _step(worker, output)
    assert not _step(worker, output), "the choice is paused and everything is shipped"
    transfer = rank.sender.transfers[handoff.key]
    num_tokens = len(local_decode.prompt.sequence.tokens)
    assert transfer.committed and transfer.committed[0] == num_tokens - 1 and rank.num_held
    worker.shipped(0, shipment(handoff))
    assert moving.num_tokens == num_tokens and local_decode.is_over and worker.status().totals.migrations == 1
    assert output[1] == _alone(rank, _PROMPT, max_tokens=20)[: len(output[1])]
    assert (worker.num_requests, rank.num_held) == (0, 0)


def test_local_decode_preempted_before_its_migration_stays(rank: RankOfOne, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are reused before the step that would ship them."""
    monkeypatch.setattr(migrations, "is_quicker_to_ship", lambda **_: True)
    worker, moving, listener, output = _worker(rank), FakeMoveListener(), FakeListener(), dict[int, list[int]]()
    long, larger = prompts(36, 62)
    LocalRequest(rank, long, stream=1, max_tokens=26).submit(worker)
    while 1 not in output:
        _step(worker, output)
    worker.prefill(rank.prompt(larger), None, listener)
    worker.migrate(_ROUTER, 1, replace(rank.handoff(36), max_tokens=64), moving)
    while _step(worker, output):
        pass
    assert moving.stayed == ["the choice was preempted"] and not rank.sender.transfers
    assert listener.tokens and output == {1: _alone(rank, long, max_tokens=26)}
    assert (worker.num_requests, rank.num_held) == (0, 0)


def test_prompts_do_not_wait_for_a_local_decode_beyond_the_share(rank: RankOfOne) -> None:
    """A single local decode grows to eight of twelve blocks; the prompt would fit if it had six."""
    worker, listener, output = _worker(rank), FakeListener(), dict[int, list[int]]()
    local_decode = LocalRequest(rank, _PROMPT, stream=1, max_tokens=40).submit(worker)
    while worker.status().local_decodes.blocks <= _BLOCKS:
        _step(worker, output)
    _, asked = prompts(20, 46)  # without a common prefix
    worker.prefill(rank.prompt(asked), None, listener)
    for _ in range(5):
        _step(worker, output)
    assert listener.tokens and not local_decode.is_over
    while _step(worker, output):
        pass
    assert output == {1: _alone(rank, _PROMPT, max_tokens=40)} and rank.num_held == 0


def test_handoff_is_used_once_by_moves_and_prompts(rank: RankOfOne, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two migrations and a prompt try to use one handoff; the ranks know one transfer per key."""
    monkeypatch.setattr(migrations, "is_quicker_to_ship", lambda **_: True)
    worker, output, handoff = _worker(rank), dict[int, list[int]](), replace(rank.handoff(18), max_tokens=60)
    for stream, tokens in ((1, _PROMPT), (2, _OTHER)):
        LocalRequest(rank, tokens, stream=stream, max_tokens=20).submit(worker)
    while len(output) < 2:
        _step(worker, output)
    first, second, prompt, late = FakeMoveListener(), FakeMoveListener(), FakeListener(), FakeMoveListener()
    other = rank.handoff(18, id="other")
    worker.prefill(rank.prompt(_THIRD), other, FakeListener())
    worker.migrate(_ROUTER, 1, handoff, first)
    worker.migrate(_ROUTER, 2, handoff, second)
    worker.migrate(_ROUTER, 2, replace(other, max_tokens=60), late)
    worker.prefill(rank.prompt(_THIRD), replace(handoff, max_tokens=18), prompt)
    assert second.stayed == ["choice is migrating already, or the handoff was used before"]
    assert late.stayed == ["handoff was used before"]
    assert len(prompt.ends) == 1 and "was used before" in str(prompt.ends[0])
    while _step(worker, output):
        pass
    worker.shipped(0, shipment(handoff))
    worker.shipped(0, shipment(other))
    while _step(worker, output):
        pass
    assert first.num_tokens and (worker.num_requests, rank.num_held) == (0, 0)
