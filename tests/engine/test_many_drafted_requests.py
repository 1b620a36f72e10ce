"""Two hundred concurrent requests of every kind: with any drafting method, tokens and logprobs equal those without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.engine import SchedulerConfig
from engine.kv.block_manager import BlockManager
from tests.engine.drafting import METHODS, Drafting
from tests.engine.engine_requests import Asked, answers, check_with_leavers, compare, letters_grammar, one_of_each_kind
from tests.engine.steps import prompts
from tests.engine.tiny_models import MakeModel, MakeRunner

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

_NUM_PROMPTS = 200
_ROOM = SchedulerConfig(max_batch_tokens=192, max_running=40, max_waiting=_NUM_PROMPTS)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[Asked]:
    """Return the requests; some texts repeat themselves."""
    kinds = one_of_each_kind(letters_grammar(tmp_path_factory.mktemp("letters")))
    random = Random(5)
    lengths = [random.randrange(3, 48) for _ in range(_NUM_PROMPTS)]
    found: list[Asked] = []
    for number, prompt in enumerate(prompts(*lengths)):
        kind = kinds[number % len(kinds)]
        tokens = prompt[: len(prompt) // 2] * 2 if number % 3 == 0 else prompt
        seed = None if kind.sampling.seed is None else 1000 + number
        found.append(replace(kind, prompt=tokens or prompt, sampling=replace(kind.sampling, seed=seed)))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_answers_equal_those_without_drafts(
    method: str, asked: list[Asked], tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    """In batches, in a pool with preemption and async scheduling, and with requests that leave."""
    drafting = Drafting(method, tiny_model("llama")[0], make_runner, tmp_path)
    expected = answers(drafting.runner, asked, _ROOM, 2048)
    found = answers(drafting.runner, asked, _ROOM, 2048, speculation=drafting.speculation)
    compare(found, expected)
    tight = answers(drafting.runner, asked, _ROOM, 80, is_async=True, speculation=drafting.speculation)
    compare(tight, expected)
    assert tight.num_preemptions
    blocks = BlockManager(2048)
    check_with_leavers(drafting.runner, asked, expected, drafting.speculation(blocks), blocks=blocks)
    drafted = drafting.num_drafted
    # model proposers are rarely called while they are right only by chance
    assert min(drafted) > 10 and sum(drafted) > 300


@pytest.mark.gpu
@pytest.mark.parametrize("recorded_rows", [0, 40])
@pytest.mark.parametrize("method", METHODS)
def test_answers_equal_those_without_drafts_on_a_gpu(
    method: str, recorded_rows: int, asked: list[Asked], tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    """With and without graphs. The shape of a step may change the rounding of some logits."""
    on_gpu: dict[str, Any] = {"device": "cuda", "recorded_rows": recorded_rows}

    def make(directory: Path, **config: Any) -> Any:
        return make_runner(directory, **config | on_gpu)

    few, drafting = asked[:60], Drafting(method, tiny_model("llama")[0], make, tmp_path)
    expected = answers(drafting.runner, few, _ROOM, 2048)
    compare(answers(drafting.runner, few, _ROOM, 2048, speculation=drafting.speculation), expected, atol=1e-3)
    tight = answers(drafting.runner, few, _ROOM, 80, is_async=True, speculation=drafting.speculation)
    compare(tight, expected, atol=1e-3)
    assert sum(drafting.num_drafted) > 20
