"""A load against a door that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from cluster.bench.endpoints import ReportedUsage
from cluster.bench.measured import summary
from cluster.bench.replay import Answered, replay
from core.trace.statistics import spread
from core.trace.trace import TraceRequest
from core.types.errors import RequestFailed


class FakeDoor:
    """Answers once `expected` requests are under way at the same time; refuses prompts of one token."""

    def __init__(self, expected: int) -> None:
        self._barrier = asyncio.Barrier(expected)

    async def ask(
        self, token_ids: Sequence[int], *, max_tokens: int, timeout_s: float
    ) -> AsyncGenerator[int | ReportedUsage, None]:
        if len(token_ids) == 1:
            raise RequestFailed("too short")
        async with asyncio.timeout(timeout_s):
            await self._barrier.wait()
        yield 1
        yield max_tokens - 1
        yield ReportedUsage(prompt_tokens=len(token_ids), cached_tokens=len(token_ids) // 2)


def _request(number: int, num_tokens: int) -> TraceRequest:
    return TraceRequest(number=number, arrival_s=0.01 * number, num_tokens=num_tokens, num_output=5, ids=None)


async def test_requests_leave_at_their_times_whatever_comes_back() -> None:
    trace = [_request(0, 8), _request(1, 1), _request(2, 8)]
    ended: list[Answered] = []
    found = await replay(trace, FakeDoor(2), seed=0, timeout_s=5, on_end=ended.append)
    assert [answer.num_output for answer in found] == [5, 0, 5] and found[1].error == "too short"
    assert len(ended) == 3 and ended[0] is found[1]
    assert found[0].ttft_s >= 0.02 > 0  # its answer came when the third request was there, and it was due at 0
    report = summary(found, slo_ttft_s=None, slo_itl_s=None)
    assert (report["completed"], report["failed"], report["reuse_share"]) == (2, 1, 0.5)
    assert report["errors"] == {"too short": 1} and report["output_tokens"] == 10
    assert report["good_share"] == pytest.approx(2 / 3)


def test_tokens_that_come_together_share_the_time() -> None:
    answered = Answered(_request(0, 8))
    for now, count in ((1.0, 1), (1.5, 1), (2.5, 2)):
        answered.came(now, count)
    answered.usage = ReportedUsage(prompt_tokens=8, cached_tokens=0)
    assert (answered.ttft_s, answered.mean_itl_s, answered.e2e_s) == (1.0, 0.5, 2.5)
    report = summary([answered], slo_ttft_s=0.9, slo_itl_s=None)
    assert report["itl_ms"]["mean"] == pytest.approx(500) and report["good_share"] == 0


def test_a_spread_counts_each_value_as_often_as_it_stands_for() -> None:
    assert spread([]) == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    assert spread([3.0, 1.0], [1, 99]) == {"mean": 1.02, "p50": 1.0, "p90": 1.0, "p99": 1.0}
