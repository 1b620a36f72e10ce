"""Async scheduling on several ranks: answers equal those without it, and those of one rank."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from tests.engine import gang_answers
from tests.engine.asked import compare
from tests.engine.gang import StartGang
from tests.engine.tiny_models import MakeModel

_WITHIN_S = 100.0


def test_what_is_said_is_the_same_on_two_ranks_and_on_one(
    tiny_model: MakeModel, start_gang: StartGang, tmp_path: Path
) -> None:
    """With requests of every kind, some of which arrive late or leave early."""
    directory, _ = tiny_model("llama")
    alone, leader, other = (
        *start_gang(1, gang_answers.said_of_each_kind, directory, tmp_path),
        *start_gang(2, gang_answers.said_of_each_kind, directory, tmp_path),
    )
    expected, alone_ahead = alone.result(_WITHIN_S)
    waits, ahead = leader.result(_WITHIN_S)
    assert other.result(_WITHIN_S) is None
    for found in (alone_ahead, waits, ahead):
        compare(found, expected)
    assert ahead.num_device_tokens == alone_ahead.num_device_tokens > 20 and not waits.num_device_tokens


def test_where_blocks_run_out_and_answers_end_where_nobody_expects_it(
    tiny_model: MakeModel, start_gang: StartGang
) -> None:
    leader, _ = start_gang(2, gang_answers.said_where_blocks_run_out, tiny_model("llama")[0])
    for waits, ahead in leader.result(_WITHIN_S):
        assert ahead.tokens == waits.tokens and ahead.num_device_tokens > 20
        assert waits.num_preemptions and ahead.num_preemptions


def test_fed_tokens_of_replayed_steps_are_on_the_device_of_every_rank(
    tiny_model: MakeModel, start_gang: StartGang
) -> None:
    leader, _ = start_gang(2, gang_answers.said_by_replays, tiny_model("llama")[0])
    waits, ahead, num_replays = leader.result(_WITHIN_S)
    assert ahead.ids == waits.ids and ahead.num_device_tokens > 20
    assert ahead.failures == waits.failures == {"3": "LogitsNotFinite"} and len(ahead.ids[3]) == 5
    assert num_replays >= waits.num_steps + ahead.num_steps - 2, "the last step of each has no rows"


def test_a_rank_that_dies_before_it_has_the_tokens_is_told_in_time(
    tiny_model: MakeModel, start_gang: StartGang
) -> None:
    leader, other = start_gang(2, gang_answers.leads_one_that_dies, tiny_model("llama")[0])
    assert "another rank is gone" in leader.result(_WITHIN_S)
    with pytest.raises(BrokenProcessPool):
        other.result(_WITHIN_S)


def test_a_rank_that_waits_for_tokens_of_a_rank_0_that_has_failed_ends(
    tiny_model: MakeModel, start_gang: StartGang
) -> None:
    leader, other = start_gang(2, gang_answers.leads_and_fails, tiny_model("llama")[0])
    assert leader.result(_WITHIN_S) == "ZeroDivisionError: a fault of rank 0"
    assert other.result(_WITHIN_S).startswith("ReplicaLost: rank 1 of 2: another rank is gone")
