"""Async scheduling over a real model: answers equal those of steps that wait for each token.

Events between steps are covered by the state machine in test_engine.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.types.request import FinishReason, SampledToken, Sampling, SequenceRequest, TokenRules
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.timing.pace import Pace
from tests.engine.engine_requests import Asked, answers, thinking
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import DELTA_NET, MakeModel, MakeRunner

pytestmark = pytest.mark.usefixtures("one_thread")

# So many stop tokens that answers end at unpredictable places.
_STOPS = tuple(range(0, VOCAB_SIZE, 9))

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.9]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 99),
    max_tokens=st.integers(1, 30),
    min_tokens=st.sampled_from([0, 7]),
    stop_token_ids=st.sampled_from([(), _STOPS]),
    num_logprobs=st.sampled_from([None, 2]),
    # Requests that need each token on the host before the next step, which therefore waits.
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.3]),
    token_rules=st.sampled_from([None, None, TokenRules(logit_bias=((3, 4.0),)), TokenRules(bad_words=((3, 4),))]),
)
thoughts = st.sampled_from([None, None, thinking(0), thinking(3), thinking(11), thinking(3, is_open=False)])
asks = st.tuples(st.integers(2, 40), samplings, st.integers(1, 3), thoughts)


@pytest.fixture
def runner(tiny_model: MakeModel, make_runner: MakeRunner) -> ModelRunner:
    """Return a runner whose rows do not depend on the batch, bit for bit."""
    return make_runner(tiny_model("llama")[0], dtype="bfloat16", deterministic=True)


@settings(max_examples=25, database=None, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(asks, min_size=1, max_size=6), num_blocks=st.sampled_from([20, 512]), budget=st.sampled_from([9, 64])
)
def test_async_answers_equal_synchronous_ones(
    asked: list[Any], num_blocks: int, budget: int, runner: ModelRunner
) -> None:
    texts = prompts(*(length for length, _, _, _ in asked))
    wanted = [
        Asked(prompt, sampling, num_choices=choices, thinking=thought)
        for prompt, (_, sampling, choices, thought) in zip(texts, asked, strict=True)
    ]
    limits = SchedulerConfig(max_batch_tokens=budget, max_running=8, max_waiting=9)
    waits = answers(runner, wanted, limits, num_blocks)
    ahead = answers(runner, wanted, limits, num_blocks, is_async=True)
    assert ahead.ids == waits.ids and not waits.num_device_tokens
    assert ahead.tokens == waits.tokens, "log-probabilities, or why it has ended"
    assert ahead.failures == waits.failures


def test_bounded_thinking_waits_only_at_its_end(runner: ModelRunner) -> None:
    """12 tokens of thinking and 20 after the marker; the 8 tokens of the marker are known before they are computed."""
    (prompt,) = prompts(9)
    (outputs,) = answers(runner, [Asked(prompt, Sampling(max_tokens=40, seed=1), thinking=thinking(12))]).ids
    ahead = answers(runner, [Asked(prompt, Sampling(max_tokens=40, seed=1), thinking=thinking(12))], is_async=True)
    assert ahead.ids == [outputs] and outputs[12:20] == list(range(8))
    assert ahead.num_known == 8 and ahead.num_device_tokens == 11 - 1 + 20 - 2


def test_all_but_first_token_are_read_on_the_device(runner: ModelRunner) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=12)
    outputs = answers(runner, [Asked(prompt, sampling) for prompt in prompts(9, 20)], is_async=True)
    assert [len(ids) for ids in outputs.ids] == [12, 12]
    # The first token is chosen with the prompt, whose step is waited for; the last is never computed.
    assert (outputs.num_device_tokens, outputs.num_steps) == (20, 12)


@pytest.mark.parametrize("asks", [{"repetition_penalty": 1.2}, {"token_rules": TokenRules(bad_words=((3, 4),))}])
def test_requests_that_read_tokens_disable_async_steps(asks: dict[str, Any], runner: ModelRunner) -> None:
    asked = [Asked(prompt, Sampling(max_tokens=9, **asks)) for prompt in prompts(9, 20)]
    assert answers(runner, asked, is_async=True).num_device_tokens == 0


@pytest.mark.gpu
@pytest.mark.parametrize("recorded_rows", [0, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("qwen3_5", DELTA_NET)])
def test_async_answers_on_a_gpu(
    family: str,
    changes: dict[str, Any],
    temperature: float,
    recorded_rows: int,
    tiny_model: MakeModel,
    make_runner: MakeRunner,
) -> None:
    """With and without graphs; answers end at different and unpredictable steps."""
    runner = make_runner(tiny_model(family, **changes)[0], device="cuda", recorded_rows=recorded_rows)
    asked = [
        Asked(prompt, Sampling(temperature=temperature, top_p=0.9, seed=i, max_tokens=9 + 5 * i, stop_token_ids=stops))
        for i, (prompt, stops) in enumerate(zip(prompts(9, 20, 30, 4, 17), (_STOPS, (), (), _STOPS, ()), strict=True))
    ]
    ahead = answers(runner, asked, is_async=True)
    assert ahead.ids == answers(runner, asked).ids and ahead.num_device_tokens > 40


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
