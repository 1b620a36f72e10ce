"""Log-probabilities of prompt tokens equal transformers', however the prompts are computed."""

from __future__ import annotations

import pytest
import torch

from engine.model import transformer
from engine.sampling.prompt_scorer import Scorer
from engine.scheduler.prompt_scoring import ScoredRow
from tests.engine.scored_prompts import ScoredPrompts, check_scores
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import DEEPSEEK_V3, MakeModel, MakeRunner


@pytest.mark.parametrize(("family", "max_batch_tokens"), [("llama", 7), ("llama", 200), ("deepseek_v3", 13)])
def test_scores_equal_transformers_with_chunks_and_warm_cache(
    family: str, max_batch_tokens: int, tiny_model: MakeModel, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "SLICE_BYTES", 4 * VOCAB_SIZE * 5)  # five positions per slice
    directory, model = tiny_model(family, **(DEEPSEEK_V3 if family == "deepseek_v3" else {}))
    engine = ScoredPrompts(make_runner(directory), max_batch_tokens=max_batch_tokens)
    first, second, third, one = prompts(30, 33, 17, 1)
    for n in (1, 2):
        results = engine.tell([(first, 3), (second, None), (third, 0), (one, 2), (first[:-1], 1)], n=n)
        for tokens, num_top, each in ((first, 3, results[0]), (third, 0, results[2]), (first[:-1], 1, results[4])):
            check_scores(each, model, tokens, num_top, within=2e-4)
        assert len(results[1]) == len(results[3]) == 0, "expected no scores: not requested, or a prompt of one token"
    cached = list(engine.cached.values())
    assert cached[1] == 32 and not cached[0] and not cached[4], "only unscored prompts may reuse cached blocks"


def test_non_finite_row_has_no_scores_alone() -> None:
    scorer = Scorer([ScoredRow(0, [1, 2], 1), ScoredRow(2, [3], 2)])
    scorer.add(torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, float("nan"), 0.0, 0.0]]))
    scorer.add(torch.tensor([[0.0, float("-inf"), 5.0, 5.0]]))
    bad, good = scorer.scores()
    assert bad is None and good is not None
    assert good.ranks_P.tolist() == [1] and sorted(good.top_ids_PK[0].tolist()) == [2, 3]
    assert good.logprobs_P[0] == good.top_logprobs_PK[0, 0] == good.top_logprobs_PK[0, 1], (
        "the same token must have the same logprob in both lists"
    )
