"""An engine that frees the parts of layers with a window answers as one that keeps every block."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.types.request import Sampling
from engine.engine import SchedulerConfig
from engine.runner.runner import ModelRunner
from engine.spec_decode.speculation import Speculation
from tests.engine.engine_requests import AMPLE, Asked, Oracle, answers, compare
from tests.engine.kv.test_window_parts import FAMILIES
from tests.engine.spec_decode.proposers import FakeProposer
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeModel, MakeRunner

MODELS = {name: FAMILIES[name] for name in ("gemma3", "gpt_oss", "mistral", "llama4")}
GREEDY = Sampling(temperature=0.0, max_tokens=30)
SMALL = SchedulerConfig(max_batch_tokens=64, max_running=8, max_waiting=32)
CHUNKED = SchedulerConfig(max_batch_tokens=16, max_running=8, max_waiting=32)


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def pair(family: str, tiny_model: MakeModel, make_runner: MakeRunner, *, num_parts: int) -> list[ModelRunner]:
    """Return a runner that keeps every block, and one with parts."""
    directory, _ = tiny_model(family, **MODELS[family])
    freed = make_runner(directory, frees_windows=True, num_window_parts=num_parts)
    assert freed.layout.windows and freed.pool.num_window_parts < freed.pool.num_blocks
    return [make_runner(directory), freed]


def asked(*lengths: int, num_choices: int = 1) -> list[Asked]:
    return [Asked(prompt, GREEDY, num_choices=num_choices) for prompt in prompts(*lengths)]


def test_choices_share_and_copy_parts(family: str, tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    """Each choice forks inside a block."""
    requests = [replace(one, sampling=replace(GREEDY, temperature=1.0, seed=3)) for one in asked(37, 21, num_choices=3)]
    expected, found = (
        answers(runner, requests, AMPLE, 96) for runner in pair(family, tiny_model, make_runner, num_parts=95)
    )
    compare(found, expected)


def test_preempted_sequences(family: str, tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    """Blocks run out, so sequences are preempted and continue from what is cached."""
    expected, found = (
        answers(runner, asked(30, 31, 32, 33), CHUNKED, num_blocks)
        for runner, num_blocks in zip(pair(family, tiny_model, make_runner, num_parts=30), (96, 20), strict=True)
    )
    assert found.num_preemptions and not expected.num_preemptions
    compare(found, expected)


def test_sequences_wait_for_parts(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    """Parts for one sequence at a time: the others wait, and all end."""
    expected, found = (
        answers(runner, asked(30, 31, 32, 33), CHUNKED, 96)
        for runner in pair("mistral", tiny_model, make_runner, num_parts=1 + 2 + 3)
    )
    assert found.num_steps > expected.num_steps and not found.num_preemptions
    compare(found, expected)


@pytest.mark.parametrize("num_parts", [95, 1 + 2 + 3 + 5])
def test_prefix_hits_at_every_border(num_parts: int, tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    """Prompts that share the beginning of an earlier one, up to any position, with many and with few cached parts."""
    whole, freed = pair("gemma3", tiny_model, make_runner, num_parts=num_parts)
    ((first, other),) = (prompts(72, 72),)
    shared = [72, 64, 63, 65, 40, 39, 24, 17, 16, 8, 7, 71]
    requests = [first] + [first[:length] + other[length:] for length in shared]
    requests += [first, other[:50], first[:33] + other[:20]]
    one_by_one = replace(CHUNKED, max_running=1)
    expected, found = (
        answers(runner, [Asked(prompt, replace(GREEDY, max_tokens=9)) for prompt in requests], one_by_one, 60)
        for runner in (whole, freed)
    )
    compare(found, expected)
    assert found.num_cached > (300 if num_parts == 95 else 0) and found.num_cached <= expected.num_cached


def test_drafts_and_async_steps(family: str, tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    """Rejected drafts take back the blocks that began with them."""
    whole, freed = pair(family, tiny_model, make_runner, num_parts=60)
    requests = asked(33, 40, 5)
    expected = answers(whole, requests, SMALL, 96)
    compare(answers(freed, requests, SMALL, 96, is_async=True), expected)
    oracle = FakeProposer(Oracle(expected, requests, lambda position: position % 5 < 3))
    speculation = Speculation({"oracle": oracle}, max_tokens=9, vocab_size=VOCAB_SIZE)
    found = answers(freed, requests, SMALL, 96, speculation=speculation)
    assert found.num_accepted
    compare(found, expected)
