"""Methods that draft with layers of the pool: drafts and answers equal those of a pool that keeps whole contexts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from core.model.draft_heads import HeadsPlace
from core.types.request import Sampling
from engine.engine import SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.scheduler.step_commands import Orders
from engine.spec_decode.draft_models.draft_model import OwnLayers
from engine.spec_decode.draft_models.head_proposer import HeadProposer
from engine.spec_decode.speculation import Speculation
from tests.engine.asked import Asked, answers, compare
from tests.engine.kv.test_window_parts import FAMILIES
from tests.engine.spec_decode.heads.eagle1_files import write_eagle1
from tests.engine.spec_decode.heads.head_files import write_eagle
from tests.engine.spec_decode.proposers import Recorded
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeModel, MakeRunner

pytestmark = pytest.mark.usefixtures("one_thread")

_CONFIG = SchedulerConfig(max_batch_tokens=48, max_running=24, max_waiting=8)
_ASKED = [
    Asked(prompt, Sampling(temperature=temperature, seed=1, max_tokens=25))
    for prompt, temperature in zip(prompts(11, 40, 25), (0.0, 0.0, 1.0), strict=True)
]
_NUM_BLOCKS = 64
# Of three sequences with windows of 9 or 16 tokens, and of a step.
_NUM_PARTS = 1 + 3 * 4 + 6


def _drafting(method: str, runner: ModelRunner, made: list[Recorded]) -> Callable[[BlockManager], Speculation]:
    def speculation(blocks: BlockManager) -> Speculation:
        def flush() -> None:
            if blocks.windows:
                runner.execute(None, Orders(parts=blocks.windows.take_changes()))

        models = OwnLayers(runner, blocks, before_writing=flush) if method == "self" else HeadProposer(runner)
        made.append(Recorded(models))
        return Speculation({method: made[-1]}, max_tokens=6, vocab_size=VOCAB_SIZE, backs_off=False)

    return speculation


@pytest.mark.parametrize(
    ("method", "family", "dtype", "is_async"),
    [
        ("self", "mistral", "float32", False),
        ("eagle1", "gpt_oss", "bfloat16", True),
        pytest.param("eagle", "gpt_oss", "bfloat16", False, marks=pytest.mark.slow),
        pytest.param("self", "gemma3", "float32", True, marks=pytest.mark.slow),
        pytest.param("eagle", "mistral", "float32", False, marks=pytest.mark.slow),
    ],
)
def test_drafts_see_their_windows(
    method: str, family: str, dtype: str, is_async: bool, tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path
) -> None:
    model_dir, _ = tiny_model(family, **FAMILIES[family])
    {"self": id, "eagle": write_eagle, "eagle1": write_eagle1}[method](tmp_path)
    options = {"dtype": dtype, "heads": None if method == "self" else HeadsPlace("eagle", tmp_path)}
    whole = make_runner(model_dir, num_blocks=_NUM_BLOCKS, **options)
    freed = make_runner(model_dir, num_blocks=_NUM_BLOCKS, frees_windows=True, num_window_parts=_NUM_PARTS, **options)
    expected, made = answers(whole, _ASKED, _CONFIG, _NUM_BLOCKS), list[Recorded]()
    answers(whole, _ASKED, _CONFIG, _NUM_BLOCKS, speculation=_drafting(method, whole, made))
    found = answers(freed, _ASKED, _CONFIG, _NUM_BLOCKS, is_async=is_async, speculation=_drafting(method, freed, made))
    compare(found, expected)
    wanted, drafts = (recorded.drafts for recorded in made)
    both = wanted.keys() & drafts.keys()
    assert len(both) > 10 and [drafts[tokens] for tokens in both] == [wanted[tokens] for tokens in both]
