"""Decode worker between its engine and its listeners, step by step on one thread."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core.types.errors import ContextLengthExceeded, HandoffExpired, LogitsNotFinite, TransferError
from decode_worker.worker import DecodeWorker
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.scheduler import jump_forward
from engine.scheduler.prompts import KVSource
from engine.spec_decode.speculation import Speculation
from engine.timing.pace import Pace
from tests.engine.spec_decode.proposers import FakeProposer
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import DELTA_NET
from tests.worker.answer_listeners import FakeAnswerListener, FakeMoveListener
from tests.worker.rank_of_one import BLOCK_SIZE, FakeTransfer, RankOfOne, shipment
from worker import migrations
from worker.gang_runner import GangRunner

_PROMPT = prompts(20)[0]


def _worker(
    rank: RankOfOne,
    *,
    handoff_s: float = 60.0,
    addresses: Sequence[str] = ("here",),
    speculation: Speculation | None = None,
) -> DecodeWorker:
    return DecodeWorker(
        rank.parts(),
        rank.receiver,
        name="decode-0",
        addresses=list(addresses),
        handoff_s=handoff_s,
        close_handoff=rank.receiver.close_elsewhere,
        speculation=speculation,
    )


def _run(worker: DecodeWorker, router: str = "router-0") -> dict[int, list[int]]:
    """Step until there is nothing to do. Returns the tokens of each stream."""
    tokens: dict[int, list[int]] = {}
    while worker.step():
        for stream, token in worker.answers.take_tokens().get(router, []):
            tokens.setdefault(stream, []).append(token.token_id)
    return tokens


def test_locally_computed_prompt_streams_its_answer_and_frees_everything(rank: RankOfOne) -> None:
    worker, listener = _worker(rank), FakeAnswerListener()
    worker.submit(rank.prompt(_PROMPT), "router-0", listener)
    assert worker.num_requests == 1
    tokens = _run(worker)
    assert listener.events == ["reserved, 0 cached", "started at 20, epoch 0", "ended"] and listener.error is None
    assert [len(ids) for ids in tokens.values()] == [5] and list(tokens) == [1]
    assert (worker.num_requests, rank.num_held) == (0, 0)
    totals = worker.status().totals
    assert (totals.prompt_tokens, totals.computed_tokens, totals.generated_tokens) == (20, 20, 5)


def test_repeated_prompt_hits_the_cache_and_gets_the_same_tokens(rank: RankOfOne) -> None:
    worker = _worker(rank)
    answers = []
    for cached in (0, 16):
        listener = FakeAnswerListener()
        worker.submit(rank.prompt(_PROMPT), "router-0", listener)
        answers.append(_run(worker))
        assert listener.events[0] == f"reserved, {cached} cached"
    assert answers[0] == answers[1]


@pytest.mark.parametrize("step", [0, 2])
def test_request_with_non_finite_logits_fails_alone(
    rank: RankOfOne, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The failure may occur in its first step or while it decodes."""
    good = _PROMPT[:8]
    worker, alone = _worker(rank), FakeAnswerListener()
    worker.submit(rank.prompt(good), "router-0", alone)
    expected = _run(worker)

    rank = RankOfOne(rank.runner)
    worker, forward, steps = _worker(rank), rank.runner.forward, itertools.count()

    def poison(batch: Batch, **others: Any) -> Tensor:
        logits = forward(batch, **others).clone()
        if next(steps) == step:
            logits[0] = math.nan
        return logits

    monkeypatch.setattr(rank.runner, "forward", poison)
    bad, beside = FakeAnswerListener(), FakeAnswerListener()
    poisoned = rank.prompt(_PROMPT[8:16], id="bad", n=2)
    poisoned.sequence.request = replace(poisoned.sequence.request, stream=8)
    worker.submit(poisoned, "router-0", bad)
    worker.submit(rank.prompt(good), "router-0", beside)
    tokens = _run(worker)
    assert isinstance(bad.error, LogitsNotFinite) and bad.events[-1] == "ended" == beside.events[-1]
    assert beside.error is None and {1: tokens[1]} == expected
    assert len(tokens.get(8, [])) == step
    assert rank.blocks.match(poisoned.sequence.hashes()) == 0, "its KV must not be cached"
    assert worker.num_requests == 0


def test_blocks_from_own_lower_tiers_do_not_count_as_fetched(rank: RankOfOne) -> None:
    worker, listener, prompt = _worker(rank), FakeAnswerListener(), rank.prompt(_PROMPT)
    worker.submit(prompt, "router-0", listener)
    prompt.num_fetched, prompt.num_loaded = 16, 8  # the other block came from a peer
    _run(worker)
    assert listener.num_from_peers == 8 and worker.status().totals.prefix_hit_tokens == 8


def test_choices_have_separate_streams(rank: RankOfOne) -> None:
    worker = _worker(rank)
    worker.submit(rank.prompt(_PROMPT, n=3), "router-0", FakeAnswerListener())
    tokens = _run(worker)
    assert sorted(tokens) == [1, 2, 3] and {len(ids) for ids in tokens.values()} == {5}
    assert rank.num_held == 0


def test_decoding_starts_after_the_kv_has_landed(rank: RankOfOne) -> None:
    worker, listener = _worker(rank), FakeAnswerListener()
    worker.submit(rank.prompt(_PROMPT, source=KVSource.PREFILL), "router-0", listener)
    assert not worker.step(), "nothing to compute before the KV has landed"
    assert listener.opening and listener.handoff
    assert (listener.opening.first_token, listener.opening.num_tokens, listener.handoff.num_tokens) == (0, 20, 20)
    assert rank.receiver.opened == {listener.handoff.id: listener.opening}
    worker.landed(0, listener.landing(7))
    tokens = _run(worker)
    assert listener.events == ["reserved, 0 cached", "started at 21, epoch 1", "ended"]
    assert len(tokens[1]) == 4, "the first token is the prefill replica's"
    assert (worker.num_requests, rank.num_held) == (0, 0)


@pytest.mark.parametrize("next_tokens", [(7,), (7, 1 << 20), (-1, 7)])
def test_kv_with_invalid_first_tokens_is_rejected(rank: RankOfOne, next_tokens: tuple[int, ...]) -> None:
    worker, listener = _worker(rank), FakeAnswerListener()
    worker.submit(rank.prompt(_PROMPT, source=KVSource.PREFILL, n=2), "router-0", listener)
    worker.step()
    worker.landed(0, listener.landing(*next_tokens))
    assert isinstance(listener.error, TransferError) and listener.events[-1] == "ended"
    assert worker.status().totals.transfer_failures == 1
    rank.receiver.others_have_closed()
    assert (worker.num_requests, rank.num_held) == (0, 0)


def test_lease_that_ends_before_landing_closes_the_handoff_before_freeing_blocks(rank: RankOfOne) -> None:
    worker, listener = _worker(rank, addresses=["here", "another rank"]), FakeAnswerListener()
    prompt = rank.prompt(_PROMPT, source=KVSource.PREFILL)
    worker.submit(prompt, "router-0", listener)
    worker.step()
    worker.cancel(prompt)
    assert listener.handoff and rank.receiver.closed_here == [listener.handoff.id]
    assert (worker.num_requests, rank.num_held) == (0, 3), "a peer may still be writing on another rank"
    worker.landed(0, listener.landing(7))  # too late
    rank.receiver.others_have_closed()
    assert rank.num_held == 0 and "started" not in " ".join(listener.events)
    assert worker.status().totals.cancelled == 1


def test_unfilled_handoff_expires(rank: RankOfOne) -> None:
    worker, listener = _worker(rank, handoff_s=0.0), FakeAnswerListener()
    worker.submit(rank.prompt(_PROMPT, source=KVSource.PREFILL), "router-0", listener)
    worker.step()
    worker.step()
    assert isinstance(listener.error, HandoffExpired)
    rank.receiver.others_have_closed()
    assert rank.num_held == 0


def test_stream_stopped_before_it_starts_gets_no_token(rank: RankOfOne) -> None:
    worker, listener = _worker(rank), FakeAnswerListener()
    worker.submit(rank.prompt(_PROMPT, source=KVSource.PREFILL, n=2), "router-0", listener)
    worker.step()
    worker.answers.stop_streams("router-0", [2])
    worker.answers.stop_streams("router-1", [1])  # another router's stream
    worker.landed(0, listener.landing(7, 8))
    assert set(_run(worker)) == {1} and listener.events[-1] == "ended"
    assert rank.num_held == 0


def test_prompt_that_can_never_fit_is_rejected_at_once(rank: RankOfOne) -> None:
    worker, listener = _worker(rank), FakeAnswerListener()
    worker.submit(rank.prompt(prompts(64)[0]), "router-0", listener)
    assert isinstance(listener.error, ContextLengthExceeded) and worker.num_requests == 0


def test_only_a_decoding_choice_can_migrate(rank: RankOfOne) -> None:
    worker, moving = _worker(rank), FakeMoveListener()
    worker.submit(rank.prompt(_PROMPT, source=KVSource.PREFILL), "router-0", FakeAnswerListener())
    worker.step()
    worker.migrate("router-0", 1, rank.handoff(20), moving)
    worker.migrate("router-0", 9, rank.handoff(20), moving)
    assert moving.stayed == ["choice is not decoding on this replica"] * 2 and not rank.sender.transfers


@pytest.fixture(scope="module")
def model_with_states(tmp_path_factory: pytest.TempPathFactory) -> RankOfOne:
    return RankOfOne.of_random_model(tmp_path_factory.mktemp("states"), "qwen3_5", **DELTA_NET)


@pytest.mark.parametrize("fails", [False, True])
def test_migration_ships_the_state_that_the_last_draft_left(
    model_with_states: RankOfOne, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Every rejected draft moves the state of a choice to another slot."""
    monkeypatch.setattr(migrations, "is_quicker_to_ship", lambda **_: True)
    monkeypatch.setattr(FakeTransfer, "is_idle", False)  # so that the copy never catches up
    monkeypatch.setattr(Pace, "timing", None)  # drafting must not depend on the machine's speed
    rank, listener, moving = RankOfOne(model_with_states.runner), FakeAnswerListener(), FakeMoveListener()
    wrong = FakeProposer(lambda tokens, max_tokens: [0] * min(3, max_tokens))
    speculation = Speculation({"wrong": wrong}, max_tokens=3, vocab_size=VOCAB_SIZE, backs_off=False)
    worker, prompt = _worker(rank, speculation=speculation), rank.prompt(_PROMPT, max_tokens=40)
    worker.submit(prompt, "router-0", listener)
    while len(prompt.sequence.tokens) < 23:
        worker.step()
    handoff = replace(rank.handoff(21), max_tokens=35)
    worker.migrate("router-0", 1, handoff, moving)
    slots = set[int]()
    while not (transfer := rank.sender.transfers.get(handoff.key)) or not transfer.committed:
        worker.step()
        slots.add(prompt.sequence.state_slots[0])
    assert len(slots) > 1, "the proposer never drafted"
    assert (
        transfer.committed[0] == prompt.sequence.num_computed and [transfer.state_slot] == prompt.sequence.state_slots
    )
    worker.shipped(0, shipment(handoff, TransferError("the link is closed") if fails else None))
    assert bool(moving.stayed) == fails
    _run(worker)
    assert len(prompt.sequence.tokens) == (60 if fails else 36) and worker.is_whole


def _answer(rank: RankOfOne, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the tokens of a request that no step runs ahead of."""
    monkeypatch.setattr(GangRunner, "is_async", False)
    worker, prompt = _worker(rank), rank.prompt(_PROMPT, max_tokens=40)
    worker.submit(prompt, "router-0", FakeAnswerListener())
    _run(worker)
    return prompt.sequence.tokens


def _state_after(rank: RankOfOne, tokens: list[int]) -> list[Tensor]:
    """Compute a prompt, and return its state in every recurrent layer."""
    blocks = range(-(-len(tokens) // BLOCK_SIZE))
    rank.runner.forward(Batch.of([Row(tokens, 0, blocks, num_logits=1, state_index=0)], block_size=BLOCK_SIZE))
    return [part[0].clone() for layer in rank.runner.pool.states for part in layer.tensors]


@pytest.mark.parametrize("runs_ahead_always", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_migration_ships_the_state_behind_its_last_position_if_steps_run_ahead(
    model_with_states: RankOfOne, monkeypatch: pytest.MonkeyPatch, fails: bool, runs_ahead_always: bool
) -> None:
    """No step runs ahead while a state is about to be shipped. runs_ahead_always: fault."""
    rank, moving = RankOfOne(model_with_states.runner), FakeMoveListener()
    expected = _answer(rank, monkeypatch)
    monkeypatch.setattr(GangRunner, "is_async", True)
    monkeypatch.setattr(migrations, "is_quicker_to_ship", lambda **_: True)
    monkeypatch.setattr(FakeTransfer, "is_idle", False)  # so that the copy never catches up
    rank = RankOfOne(model_with_states.runner)
    worker, prompt = _worker(rank), rank.prompt(_PROMPT, max_tokens=40)
    worker.submit(prompt, "router-0", FakeAnswerListener())
    sequence = prompt.sequence
    while len(sequence.tokens) < 23:
        worker.step()
    assert sequence.num_missing == 1
    handoff = replace(rank.handoff(21), max_tokens=35)
    worker.migrate("router-0", 1, handoff, moving)
    assert worker.engine.in_step == {sequence}
    if runs_ahead_always:
        worker.engine.in_step = _Nothing()
    while not (transfer := rank.sender.transfers.get(handoff.key)) or not transfer.committed:
        worker.step()
    assert transfer.committed[0] == sequence.num_computed and not worker.engine.in_step
    if runs_ahead_always:
        assert not sequence.state_slots, "the state has run ahead"
    else:
        index = worker.engine.blocks.states.index(transfer.state_slot)
        shipped = [part[index].clone() for layer in rank.runner.pool.states for part in layer.tensors]
    worker.shipped(0, shipment(handoff, TransferError("the link is closed") if fails else None))
    assert bool(moving.stayed) == fails
    _run(worker)
    assert sequence.tokens == (expected if fails else expected[:36]) and worker.is_whole
    if not runs_ahead_always:
        for ours, theirs in zip(shipped, _state_after(rank, expected[:35]), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


class _Nothing(set[Any]):
    """Set that stays empty."""

    def add(self, element: Any) -> None:
        pass


class AlwaysSeven:
    """Grammar that forces every token; implements TokenMask."""

    failure = ""

    def may_forbid(self, tokens: Sequence[int], start: int, num_coming: int, /) -> bool:
        return True

    def allowed(self, tokens: Sequence[int], start: int, /) -> Any:
        return np.array([1 << 7, 0, 0, 0, 0], dtype=np.int32)

    def only(self, tokens: Sequence[int], start: int, /) -> int | None:
        return 7

    def fork(self) -> AlwaysSeven:
        return self


@pytest.mark.parametrize("fails", [False, True])
def test_migrating_choice_gets_no_more_forced_tokens_than_the_receiver_holds(
    rank: RankOfOne, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A grammar may force more tokens in one step than the receiver has room for. After a failed move they continue."""
    monkeypatch.setattr(migrations, "is_quicker_to_ship", lambda **_: True)
    monkeypatch.setattr(FakeTransfer, "is_idle", False)  # so that the copy never catches up
    monkeypatch.setattr(jump_forward, "MAX_KNOWN", 3)
    worker, listener, moving = _worker(rank), FakeAnswerListener(), FakeMoveListener()
    prompt = rank.prompt(_PROMPT, max_tokens=40)
    prompt.sequence.sampling_row.mask = AlwaysSeven()
    worker.submit(prompt, "router-0", listener)
    while len(prompt.sequence.tokens) < 23:
        worker.step()
    small = replace(rank.handoff(21, id="small"), max_tokens=21)
    worker.migrate("router-0", 1, small, moving)
    assert "room for 21" in moving.stayed.pop()
    handoff = replace(rank.handoff(21), max_tokens=35)
    worker.migrate("router-0", 1, handoff, moving)
    for _ in range(9):
        worker.step()
    assert prompt.sequence.num_computed == 35 == len(prompt.sequence.tokens) - 1
    transfer = rank.sender.transfers[handoff.key]
    assert transfer.committed == (35, [7] * 14) and max(end for _, _, end in transfer.spans) == 35
    worker.shipped(0, shipment(handoff, TransferError("the link is closed") if fails else None))
    assert (bool(moving.stayed), moving.num_tokens) == (fails, None if fails else 36)
    said = _run(worker)
    assert len(prompt.sequence.tokens) == (60 if fails else 36) and not rank.num_held
    assert listener.events[-1] == "ended" and (not fails or said[1] == [7] * 40)
    assert (worker.status().totals.forced_tokens > 25) == fails
