"""Prefill worker between its engine and its listeners, step by step on one thread."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor

from core.types.errors import ClusterError, HandoffExpired, LinkClosed, LogitsNotFinite, RequestError
from core.types.request import SampledToken
from engine.batch.batch import Batch
from kvtransfer.protocol.rank_transfer import Shipment
from prefill_worker.worker import PrefillWorker
from tests.engine.steps import prompts
from tests.worker.rank_of_one import RankOfOne, shipment

_PROMPT = prompts(20)[0]


class FakeListener:
    """Recording listener; implements prefill_worker.worker.PromptListener."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[tuple[Shipment | None, ClusterError | None]] = []

    def first_tokens(self, tokens: list[SampledToken]) -> None:
        self.tokens += [token.token_id for token in tokens]

    def ended(self, shipment: Shipment | None, error: ClusterError | None) -> None:
        self.ends.append((shipment, error))


def _worker(rank: RankOfOne) -> PrefillWorker:
    return PrefillWorker(rank.parts(decodes=False))


def _run(worker: PrefillWorker) -> None:
    while worker.step():
        pass


def test_prompt_without_a_handoff_ships_nothing(rank: RankOfOne) -> None:
    worker, listener = _worker(rank), FakeListener()
    worker.prefill(rank.prompt(_PROMPT), None, listener)
    _run(worker)
    assert len(listener.tokens) == 1 and listener.ends == [(None, None)]
    assert (worker.num_requests, rank.num_held, rank.sender.transfers) == (0, 0, {})


def test_prompt_timing_is_reported_with_first_tokens(rank: RankOfOne) -> None:
    worker, listener, prompt = _worker(rank), FakeListener(), rank.prompt(_PROMPT)
    worker.prefill(prompt, None, listener)
    _run(worker)
    spent = prompt.spent
    assert spent and spent.waited_s > 0 and spent.computed_s > 0 and spent.fetched_s == 0


def test_layers_are_shipped_as_computed_and_the_last_chunk_commits(rank: RankOfOne) -> None:
    worker, listener, handoff = _worker(rank), FakeListener(), rank.handoff(20)
    worker.prefill(rank.prompt(_PROMPT), handoff, listener)
    assert worker.step()
    transfer = rank.sender.transfers[handoff.key]
    layers = range(rank.runner.layout.num_layers)
    assert transfer.spans == [(layer, 0, 16) for layer in layers], "a chunk, layer by layer"
    assert transfer.committed is None and not listener.tokens
    _run(worker)
    assert transfer.spans == [(layer, start, end) for start, end in ((0, 16), (16, 20)) for layer in layers]
    assert transfer.committed == (20, listener.tokens) and len(listener.tokens) == 1
    assert listener.ends == [], "its KV has not landed yet"
    assert (worker.num_requests, rank.num_held) == (2, 3), "the prompt, and its outgoing transfer"

    landed = shipment(handoff)
    worker.shipped(0, landed)
    assert [end[1] for end in listener.ends] == [None] and listener.ends[0][0]
    assert (worker.num_requests, rank.num_held) == (0, 0)
    totals = worker.status().totals
    assert (totals.transfers, totals.transfer_bytes, totals.computed_tokens) == (1, 100, 20)


def test_prompt_with_non_finite_logits_fails_alone(rank: RankOfOne, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other prompts are unaffected, and its handoff is aborted."""
    worker, forward = _worker(rank), rank.runner.forward

    def poison(batch: Batch, *on_layer: Any) -> Tensor:
        logits = forward(batch, *on_layer).clone()
        logits[0] = math.nan
        return logits

    monkeypatch.setattr(rank.runner, "forward", poison)
    bad, beside, handoff = FakeListener(), FakeListener(), rank.handoff(8)
    poisoned = rank.prompt(_PROMPT[:8], id="bad")
    worker.prefill(poisoned, handoff, bad)
    worker.prefill(rank.prompt(_PROMPT[8:16]), None, beside)
    _run(worker)
    assert isinstance(bad.ends[0][1], LogitsNotFinite) and not bad.tokens
    assert beside.ends == [(None, None)] and len(beside.tokens) == 1
    assert rank.sender.transfers[handoff.key].is_aborted and rank.sender.transfers[handoff.key].committed is None
    worker.shipped(0, shipment(handoff, HandoffExpired("aborted")))
    assert (worker.num_requests, rank.num_held) == (0, 0)
    assert rank.blocks.match(poisoned.sequence.hashes()) == 0, "its KV must not be cached"


def test_every_choice_gets_its_first_token(rank: RankOfOne) -> None:
    worker, listener = _worker(rank), FakeListener()
    worker.prefill(rank.prompt(_PROMPT, n=3), rank.handoff(20), listener)
    _run(worker)
    assert len(listener.tokens) == 3


def test_a_handoff_serves_one_prompt(rank: RankOfOne) -> None:
    worker, first, second = _worker(rank), FakeListener(), FakeListener()
    worker.prefill(rank.prompt(_PROMPT), rank.handoff(20), first)
    worker.prefill(rank.prompt(_PROMPT, id="again"), rank.handoff(20), second)
    assert [type(error) for _, error in second.ends] == [HandoffExpired]
    _run(worker)
    assert len(first.tokens) == 1 and not second.tokens


@pytest.mark.parametrize("num_tokens", [8, 24, 1 << 20])
def test_handoff_that_does_not_fit_the_prompt_is_rejected_before_the_link(rank: RankOfOne, num_tokens: int) -> None:
    """Otherwise the receiver would close the link, with all its transfers."""
    worker, listener = _worker(rank), FakeListener()
    worker.prefill(rank.prompt(_PROMPT), rank.handoff(num_tokens), listener)
    [(_, error)] = listener.ends
    assert isinstance(error, RequestError) and error.param == "handoff.num_tokens"
    _run(worker)
    assert (listener.tokens, rank.sender.transfers, rank.num_held) == ([], {}, 0)


def test_cancelled_prompt_frees_its_blocks_after_the_sender_stops_reading(rank: RankOfOne) -> None:
    worker, listener, handoff = _worker(rank), FakeListener(), rank.handoff(20)
    prompt = rank.prompt(_PROMPT)
    worker.prefill(prompt, handoff, listener)
    worker.step()
    worker.cancel(prompt)
    assert rank.num_held == 3, "the sender still reads the blocks"
    worker.step()
    assert rank.sender.transfers[handoff.key].is_aborted
    worker.shipped(0, shipment(handoff, HandoffExpired("given up")))
    assert (worker.num_requests, rank.num_held, listener.ends) == (0, 0, [])
    assert worker.status().totals.cancelled == 1


def test_a_link_that_fails_ends_the_prompt_with_its_error(rank: RankOfOne) -> None:
    worker, listener, handoff = _worker(rank), FakeListener(), rank.handoff(20)
    worker.prefill(rank.prompt(_PROMPT), handoff, listener)
    worker.step()
    worker.shipped(0, shipment(handoff, LinkClosed("gone")))
    assert [type(error) for _, error in listener.ends] == [LinkClosed]
    _run(worker)
    assert (worker.num_requests, rank.num_held, listener.tokens) == (0, 0, [])
    assert worker.status().totals.transfer_failures == 1
