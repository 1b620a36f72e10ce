"""Heads on several ranks draft as on one: heads with a layer are split over the ranks, others run on rank 0 only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.model.draft_heads import HeadsKind
from tests.engine.gang import StartGang
from tests.engine.spec_decode.heads import heads_on_ranks
from tests.engine.spec_decode.heads.head_files import write_eagle, write_medusa
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.tiny_models import MakeModel

_WITHIN_S = 60.0


_SLOW = ("medusa", "mtp of deepseek_v32", "mtp of nemotron_h")


@pytest.fixture(params=["eagle", "mtp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in _SLOW)])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> HeadsKind:
    kind, _, family = request.param.partition(" of ")
    if family:
        write_mtp(tmp_path, family=family)
    else:
        {"medusa": write_medusa, "eagle": write_eagle, "mtp": write_mtp}[kind](tmp_path)
    return kind


@pytest.fixture
def directory(kind: HeadsKind, tiny_model: MakeModel, tmp_path: Path) -> Path:
    """Directory of the model."""
    return tmp_path if kind == "mtp" else tiny_model("llama")[0]


@pytest.mark.slow  # a short version is in tests/e2e/test_heads.py
def test_drafts_and_answers_do_not_depend_on_number_of_ranks(
    kind: HeadsKind, directory: Path, start_gang: StartGang, tmp_path: Path
) -> None:
    (alone,) = start_gang(1, heads_on_ranks.drafts_of_answers, directory, kind, tmp_path)
    ids, guesses = alone.result(_WITHIN_S)
    leader, other = start_gang(2, heads_on_ranks.drafts_of_answers, directory, kind, tmp_path)
    assert leader.result(_WITHIN_S) == (ids, guesses)
    assert len(guesses) > 80 and all(guesses.values())
    assert other.result(_WITHIN_S) is None


def test_every_rank_records_received_kv(
    kind: HeadsKind, directory: Path, start_gang: StartGang, tmp_path: Path
) -> None:
    (alone,) = start_gang(1, heads_on_ranks.drafts_after_transfer, directory, kind, tmp_path)
    expected = alone.result(_WITHIN_S)
    leader, _ = start_gang(2, heads_on_ranks.drafts_after_transfer, directory, kind, tmp_path)
    found = leader.result(_WITHIN_S)
    assert len(found) == len(expected) >= 6
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
