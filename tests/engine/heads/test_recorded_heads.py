"""Heads beside a model whose steps are recorded guess what they do where each is launched anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.model.draft_heads import HeadsPlace
from cluster.words.request import Sampling
from engine.config import EngineConfig
from engine.decode_graphs import Capture
from engine.draft_models.drawn import DrawnTokens
from engine.draft_models.head_proposer import HeadProposer
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.speculation.speculation import Speculation
from tests.engine.asked import Asked, Said, answers
from tests.engine.counted_replays import FakeReplays
from tests.engine.heads.eagle1_files import write_eagle1
from tests.engine.heads.head_files import write_eagle, write_medusa
from tests.engine.heads.mtp_files import write_mtp
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import MakeModel

pytestmark = pytest.mark.usefixtures("one_thread")

_NUM_TOKENS, _MOST_ROWS = 3, 24
_WRITERS: dict[str, Callable[[Path], object]] = {
    "medusa": write_medusa,
    "eagle": write_eagle,
    "eagle1": write_eagle1,
    "mtp": lambda directory: write_mtp(directory, first_k_dense_replace=4),  # experts are called one by one on a CPU
}


class Overheard:
    """Implements Proposer: what heads guess in each step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._heads = HeadProposer(runner, DrawnTokens(learns=False))
        self.guesses: list[list[int]] = []

    def propose(self, sequences: Any, max_tokens: int) -> Any:
        proposals = self._heads.propose(sequences, _NUM_TOKENS)
        self.guesses += [list(proposal.tokens) for proposal in proposals]
        return proposals

    def finished(self, sequence: Sequence) -> None:
        pass


@pytest.mark.parametrize("kind", _WRITERS)
def test_what_is_guessed_behind_replayed_steps(kind: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    """Prompts, answers, drafts that are verified, and blocks that fork: replayed but for the longest prompts."""
    _WRITERS[kind](tmp_path)
    model_dir = tmp_path if kind == "mtp" else tiny_model("llama")[0]
    capture, method = FakeReplays(), "eagle" if kind == "eagle1" else kind

    def said(capture: Capture | None, recorded_rows: int) -> tuple[Said, list[list[int]]]:
        config: dict[str, Any] = {"heads": HeadsPlace(method, tmp_path), "recorded_rows": recorded_rows}
        runner = ModelRunner(
            EngineConfig(model_dir=model_dir, dtype="float32", block_size=8, num_blocks=256, **config),
            capture=capture,
        )
        overheard = Overheard(runner)
        asked = [
            Asked(prompt, Sampling(max_tokens=14 + i, temperature=0.7 * (i % 2), seed=i), num_choices=1 + i % 2)
            for i, prompt in enumerate(prompts(3, 40, 9, 17))
        ]
        linear: dict[str, Any] = {
            "max_tokens": _NUM_TOKENS,
            "may_branch": False,
        }  # what branches goes by what steps have taken
        speculation = Speculation({"heads": overheard}, vocab_size=VOCAB_SIZE, **linear)
        return answers(runner, asked, num_blocks=256, speculation=speculation), overheard.guesses

    (plain, expected), (replayed, guesses) = said(None, 0), said(capture, _MOST_ROWS)
    assert replayed.ids == plain.ids and guesses == expected
    assert capture.num_replays >= replayed.num_steps - 2 > 10
    assert sum(map(len, guesses)) > 100
