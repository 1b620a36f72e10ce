"""Async scheduling over a real model: answers equal those of steps that wait for each token.

Events between steps are covered by the state machine in test_engine.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.types.request import Sampling
from core.types.token_rules import TokenRules
from engine.engine import SchedulerConfig
from engine.runner.runner import ModelRunner
from tests.engine.asked import Asked, answers, thinking
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
