"""Replayed steps of models with recurrent layers: states follow their rows, and padding writes none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.types.request import Sampling
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.engine import SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.sampling import sampler
from engine.sampling.sampler import choose_by_torch
from engine.spec_decode.speculation import Speculation
from tests.engine.asked import Asked, Oracle, answers, check_with_leavers
from tests.engine.counted_replays import FakeReplays
from tests.engine.runner.conftest import MakePair
from tests.engine.runner.decode_batches import BLOCK_SIZE, batch_of, check_equal, decode_batch, fill, states_of
from tests.engine.spec_decode.proposers import FakeProposer
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import DELTA_NET, LFM2, NEMOTRON_H

FAMILIES: list[tuple[str, dict[str, Any]]] = [("qwen3_5", DELTA_NET), ("nemotron_h", NEMOTRON_H), ("lfm2", LFM2)]
pytestmark = pytest.mark.usefixtures("one_thread")

_STOPS = tuple(range(0, VOCAB_SIZE, 9))


def filled_pair(make_pair: MakePair, capture: Any) -> tuple[ModelRunner, ModelRunner]:
    pair = make_pair(capture, "qwen3_5", **DELTA_NET)
    for runner in pair:
        fill(runner.pool, 5)
    return pair


def row(start: int, num_tokens: int, *, state_index: int = 3) -> Row:
    blocks = range(-(-(start + num_tokens) // BLOCK_SIZE))
    return Row(token_ids=[7] * num_tokens, start=start, blocks=blocks, num_logits=num_tokens, state_index=state_index)


def test_rows_of_one_token_are_replayed(make_pair: MakePair) -> None:
    """Drafts and chunks are not: their launches depend on the longest of them."""
    capture = FakeReplays()
    pair = filled_pair(make_pair, capture)
    for batch, is_replayed in (
        (decode_batch([5, 30, 1], seed=0), True),
        (Batch.of([row(0, 1)], block_size=BLOCK_SIZE), True),
        (batch_of([(20, 4, 4), (9, 1, 1)], seed=1), False),
        (batch_of([(9, 9, 1)], seed=2), False),
        (decode_batch([5, 30, 1], seed=3), True),
    ):
        before = capture.num_replays
        check_equal(pair, batch)
        assert (capture.num_replays > before) is is_replayed


def test_first_token_of_a_sequence_starts_from_zeros(make_pair: MakePair) -> None:
    """Whatever is in its slot, which an earlier sequence has left."""
    pair = filled_pair(make_pair, FakeReplays())
    batch = Batch.of([row(0, 1)], block_size=BLOCK_SIZE)
    expected = pair[0].forward(batch).clone()
    for part in states_of(pair[0].pool):
        part[3] = torch.nan
    torch.testing.assert_close(pair[0].forward(batch), expected)


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
@pytest.mark.parametrize("is_async", [False, True])
def test_answers_by_replays(
    family: str, changes: dict[str, Any], is_async: bool, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests arrive in chunks, fork, end at unpredictable places and are preempted; drafts are not replayed."""
    monkeypatch.setattr(sampler, "choose_by_torch", lambda *given: choose_by_torch(*given).to(torch.int32))
    capture = FakeReplays()
    replaying, plain = make_pair(capture, family, **changes)
    asked = [
        Asked(prompt, Sampling(temperature=0.9, seed=i, max_tokens=20, stop_token_ids=stops), num_choices=1 + i % 2)
        for i, (prompt, stops) in enumerate(zip(prompts(9, 20, 30, 14), ((), _STOPS, (), _STOPS), strict=True))
    ]
    limits = SchedulerConfig(max_batch_tokens=9, max_running=8, max_waiting=9)
    expected = answers(plain, asked, limits, num_blocks=12)
    found = answers(replaying, asked, limits, num_blocks=12, is_async=is_async)
    assert found.ids == expected.ids and found.num_preemptions and capture.num_replays > 9
    assert bool(found.num_device_tokens) is is_async
    proposer = FakeProposer(Oracle(expected, asked, lambda position: position % 5 > 0))
    speculation = Speculation({"oracle": proposer}, max_tokens=3, vocab_size=VOCAB_SIZE, backs_off=False)
    drafted = answers(replaying, asked, limits, num_blocks=40, is_async=is_async, speculation=speculation)
    assert drafted.ids == expected.ids and drafted.num_accepted


@pytest.mark.parametrize("is_async", [False, True])
def test_answers_from_checkpoints(is_async: bool, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests share prefixes with earlier prompts and answers, arrive one by one, and some leave early."""
    monkeypatch.setattr(sampler, "choose_by_torch", lambda *given: choose_by_torch(*given).to(torch.int32))
    replaying, plain = make_pair(FakeReplays(), "qwen3_5", **DELTA_NET)
    sampling, (prompt, *others) = Sampling(temperature=0.0, max_tokens=30), prompts(20, 9, 26)
    (answer,) = answers(plain, [Asked(prompt, sampling)]).ids
    texts = [prompt + answer[:length] for length in (0, 9, 20, 29)]
    texts += [other[:17] + prompt for other in others] + others
    asked = [Asked(text, sampling, num_choices=1 + i % 2) for i, text in enumerate(texts)]
    expected = answers(plain, asked)
    blocks = BlockManager(60, num_states=replaying.pool.num_states)
    assert blocks.states
    blocks.states.interval = BLOCK_SIZE
    hits: list[bytes] = []
    take = blocks.states.take

    def noted(prefix_hash: bytes | None = None) -> int:
        hits.extend([prefix_hash] if prefix_hash else [])
        return take(prefix_hash)

    monkeypatch.setattr(blocks.states, "take", noted)
    for _ in range(2):
        check_with_leavers(replaying, asked, expected, None, blocks=blocks, is_async=is_async)
    assert len(hits) > 6
