"""Cost of a plain row in a decode step: array operations over all rows, and one Python call for its token."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from core.types.request import FinishReason, SampledToken, Sampling, SequenceRequest
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.timing.pace import Pace

_BLOCK = 16
_LENGTH = _BLOCK + 3
# More rows than the number of calls per step that do not depend on the rows.
_LONG = 20


class FakeRunner:
    """Runner that makes each batch, and chooses token 0."""

    def execute(self, step: ScheduledStep | None, orders: Orders, /) -> Tensor | None:
        return torch.tensor([[1.0, 0.0]]).repeat(len(step.batch.logits_rows), 1) if step else None


def engine_of(sequences: list[Sequence], *, is_async: bool, max_batch_tokens: int | None = None) -> Engine[Tensor]:
    count = len(sequences)
    limits = SchedulerConfig(max_batch_tokens=max_batch_tokens or count * _LENGTH, max_running=count, max_waiting=count)
    blocks = BlockManager(count * 8)
    engine = Engine(FakeRunner(), sample, blocks, limits, block_size=_BLOCK, pace=Pace(), is_async=is_async)
    for sequence in sequences:
        engine.add(Prompt(sequence))
    return engine


def decoding(num_rows: int, *, is_async: bool) -> Engine[Tensor]:
    """Return decoding sequences at the same offset of a block, far from their end."""
    engine = engine_of([sequence_of(str(i), _LENGTH) for i in range(num_rows)], is_async=is_async)
    for _ in range(4):
        engine.step()
    assert len(engine.decoding.running) == num_rows
    return engine


def sequence_of(id: str, length: int, **sampling: Any) -> Sequence:
    asked = Sampling(**{"temperature": 0.0, "max_tokens": 60} | sampling)
    request = SequenceRequest(id=id, token_ids=(1,) * length, num_prompt_tokens=length, sampling=asked, salt=id)
    return Sequence(request, 0, model="m", block_size=_BLOCK, max_context=8 * _BLOCK)


def calls(engine: Engine[Tensor]) -> Counter[str]:
    """Count the calls of our functions and of Python code in libraries during the next step."""
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            counted[f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        result = engine.step()
    finally:
        sys.setprofile(before)
    assert len(result.sampled) == len(engine.decoding.running)
    return counted


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("is_async", [False, True])
def test_plain_row_costs_one_call_per_token(is_async: bool) -> None:
    few, many = (calls(decoding(num_rows, is_async=is_async)) for num_rows in (2, 2 + _LONG))
    more = {name: number for name, number in (many - few).items() if number > 2}  # the pace sums up now and then
    assert list(more.values()) == [_LONG], more
    assert next(iter(more)).endswith("__init__"), "SampledToken's"


@pytest.mark.parametrize("is_async", [False, True])
def test_row_events_are_reported_for_their_row(is_async: bool) -> None:
    """One row ends by a stop token, one by its length, and one fills a block, which is then found in the cache."""
    asked: list[dict[str, Any]] = [{"stop_token_ids": (0,), "min_tokens": 5}, {"max_tokens": 7}, {}]
    engine = engine_of([sequence_of(str(i), _LENGTH, **one) for i, one in enumerate(asked)], is_async=is_async)
    outputs: dict[str, list[SampledToken]] = {}
    while len(outputs.get("2", ())) < 2 * _BLOCK - _LENGTH:
        result = engine.step()
        first = [pair for one in result.prefilled for pair in zip(one.sequences, one.tokens, strict=True)]
        for sequence, token in (*first, *result.sampled):
            outputs.setdefault(sequence.request.id, []).append(token)
    stops, short, fills = ([(token.token_id, token.finish_reason) for token in outputs[id]] for id in "012")
    assert stops == [(1, None)] * 5 + [(0, FinishReason.STOP)]
    assert short == [(0, None)] * 6 + [(0, FinishReason.LENGTH)]
    assert {reason for _, reason in fills} == {None}
    (last,) = engine.decoding.running
    assert engine.blocks.match(last.hashes()) == 1, "the last token of its second block is not computed"
    engine.step()
    assert engine.blocks.match(last.hashes()) == 2


def test_sequence_paused_during_recompute_resumes() -> None:
    """At that time it has blocks, and lacks the KV of more than its last token."""
    first, second = (sequence_of(id, _LENGTH) for id in ("first", "second"))
    engine = engine_of([first, second], is_async=False, max_batch_tokens=3)
    while len(engine.decoding.running) < 2:
        engine.step()
    engine.decoding.preempt_for(1)
    assert list(engine.decoding.running) == [first]
    while not second.blocks:
        engine.step()
    assert second.num_missing > 1
    engine.pause(second)
    engine.resume(second)
    for _ in range(12):
        engine.step()
    assert set(engine.decoding.running) == {first, second}
    assert second.num_missing == 1
    engine.blocks.check_integrity()
