"""Heads draft the same beside a model with recorded steps as beside one without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.types.request import Sampling
from engine.config import EngineConfig
from engine.runner.decode_graphs import Capture
from engine.runner.runner import ModelRunner
from engine.spec_decode.draft_models.draft_sampler import DraftSampler
from engine.spec_decode.draft_models.head_proposer import HeadProposer
from engine.spec_decode.speculation import Speculation
from tests.engine.asked import AnswerText, Asked, answers
from tests.engine.drafting import WRITERS, heads_place
from tests.engine.fake_capture import FakeReplays
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.spec_decode.proposers import Recorded
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeModel

pytestmark = pytest.mark.usefixtures("one_thread")

_NUM_TOKENS, _MOST_ROWS = 3, 24
# On a CPU experts are called one by one.
_WRITERS = {**WRITERS, "mtp": lambda directory: write_mtp(directory, first_k_dense_replace=4)}


@pytest.mark.parametrize("kind", _WRITERS)
def test_drafts_after_replayed_steps(kind: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    """With prompts, answers, verified drafts, and forks; all steps but the longest prompts are replayed."""
    capture = FakeReplays()
    plain, expected = _answers(kind, tiny_model, tmp_path)
    replayed, guesses = _answers(kind, tiny_model, tmp_path, capture=capture, recorded_rows=_MOST_ROWS)
    assert replayed.ids == plain.ids and guesses == expected
    assert capture.num_replays >= replayed.num_steps - 2 > 10
    assert sum(map(len, guesses.values())) > 100


@pytest.mark.gpu
@pytest.mark.parametrize("kind", _WRITERS)
def test_drafts_on_a_gpu(kind: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    plain, expected = _answers(kind, tiny_model, tmp_path)
    for recorded_rows in (0, _MOST_ROWS):
        outputs, guesses = _answers(kind, tiny_model, tmp_path, recorded_rows=recorded_rows, device="cuda")
        assert outputs.ids == plain.ids and guesses == expected, f"{recorded_rows} rows recorded"


def _answers(
    kind: str, tiny_model: MakeModel, directory: Path, *, capture: Capture | None = None, **config: Any
) -> tuple[AnswerText, dict[tuple[int, ...], list[int]]]:
    """Return the answers, and all drafts. directory: for the files of the heads."""
    _WRITERS[kind](directory)
    heads = heads_place(kind, directory)
    model_dir = directory if kind == "mtp" else tiny_model("llama")[0]
    runner = ModelRunner(
        EngineConfig(model_dir=model_dir, dtype="float32", block_size=8, num_blocks=256, heads=heads, **config),
        capture=capture,
    )
    recorder = Recorded(HeadProposer(runner, DraftSampler(learns=False)), _NUM_TOKENS)
    asked = [
        Asked(prompt, Sampling(max_tokens=14 + i, temperature=0.7 * (i % 2), seed=i), num_choices=1 + i % 2)
        for i, prompt in enumerate(prompts(3, 40, 9, 17))
    ]
    speculation = Speculation({"heads": recorder}, max_tokens=_NUM_TOKENS, vocab_size=VOCAB_SIZE)
    return answers(runner, asked, num_blocks=256, speculation=speculation), recorder.drafts
