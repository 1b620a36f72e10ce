"""Async scheduling on several ranks: answers equal those without it, and those of one rank."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from tests.engine import gang_answers
from tests.engine.engine_requests import compare
from tests.engine.gang import StartGang
from tests.engine.tiny_models import DELTA_NET, MakeModel
from tests.support.grids import quick

_WITHIN_S = 100.0


def test_answers_of_two_ranks_equal_those_of_one(tiny_model: MakeModel, start_gang: StartGang, tmp_path: Path) -> None:
    """With requests of every kind; some arrive late or leave early."""
    directory, _ = tiny_model("llama")
    alone, leader, other = (
        *start_gang(1, gang_answers.answers_of_each_kind, directory, tmp_path),
        *start_gang(2, gang_answers.answers_of_each_kind, directory, tmp_path),
    )
    expected, alone_ahead = alone.result(_WITHIN_S)
    waits, ahead = leader.result(_WITHIN_S)
    assert other.result(_WITHIN_S) is None
    for found in (alone_ahead, waits, ahead):
        compare(found, expected)
    assert ahead.num_device_tokens == alone_ahead.num_device_tokens > 20 and not waits.num_device_tokens


@pytest.mark.parametrize(("max_batch_tokens", "num_blocks"), quick([(9, 20), (64, 24)], [(64, 24)]))
def test_answers_are_equal_with_preemption_and_early_ends(
    max_batch_tokens: int, num_blocks: int, tiny_model: MakeModel, start_gang: StartGang
) -> None:
    limits = max_batch_tokens, num_blocks
    leader, _ = start_gang(2, gang_answers.answers_with_preemption, tiny_model("llama")[0], *limits)
    waits, ahead = leader.result(_WITHIN_S)
    assert ahead.tokens == waits.tokens and ahead.num_device_tokens > 20
    assert waits.num_preemptions and ahead.num_preemptions


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("qwen3_5", DELTA_NET)])
def test_replayed_steps_read_device_tokens_on_every_rank(
    family: str, changes: dict[str, Any], tiny_model: MakeModel, start_gang: StartGang
) -> None:
    leader, _ = start_gang(2, gang_answers.answers_by_replays, tiny_model(family, **changes)[0])
    waits, ahead, num_replays = leader.result(_WITHIN_S)
    assert ahead.ids == waits.ids and ahead.num_device_tokens > 20
    assert ahead.failures == waits.failures == {"3": "LogitsNotFinite"} and len(ahead.ids[3]) == 5
    num_chunked = 2 * 7 if changes else 0  # with recurrent layers, chunks of prompts are not replayed
    assert num_replays >= waits.num_steps + ahead.num_steps - 2 - num_chunked, "the last step of each has no rows"


def test_leader_notices_rank_that_dies_before_receiving_tokens(tiny_model: MakeModel, start_gang: StartGang) -> None:
    leader, other = start_gang(2, gang_answers.lead_dying_rank, tiny_model("llama")[0], timeout_s=5.0)
    assert "another rank is gone" in leader.result(_WITHIN_S)
    with pytest.raises(BrokenProcessPool):
        other.result(_WITHIN_S)


def test_follower_ends_when_rank_0_fails_before_sending_tokens(tiny_model: MakeModel, start_gang: StartGang) -> None:
    leader, other = start_gang(2, gang_answers.fail_while_leading, tiny_model("llama")[0], timeout_s=5.0)
    assert leader.result(_WITHIN_S) == "ZeroDivisionError: a fault of rank 0"
    assert other.result(_WITHIN_S).startswith("ReplicaLost: rank 1 of 2: another rank is gone")
