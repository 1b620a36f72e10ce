"""Load replay against a fake endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from cluster.bench.endpoints import ReportedUsage
from cluster.bench.replay import Answered, replay, summary
from core.trace.statistics import spread
from core.trace.trace import TraceRequest
from core.trace.traffic import Slo
from core.types.errors import RequestFailed


class FakeEndpoint:
    """Endpoint that answers once `expected` requests are in flight, and rejects prompts of one token."""

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


async def test_requests_are_sent_at_their_times_regardless_of_answers() -> None:
    trace = [_request(0, 8), _request(1, 1), _request(2, 8)]
    ended: list[Answered] = []
    found = await replay(trace, FakeEndpoint(2), seed=0, timeout_s=5, on_end=ended.append)
    assert [answer.num_output for answer in found] == [5, 0, 5] and found[1].error == "too short"
    assert len(ended) == 3 and ended[0] is found[1]
    # Due at 0, answered when the third request arrived.
    assert found[0].ttft_s >= 0.02 > 0
    report = summary(found, Slo())
    assert (report["completed"], report["failed"], report["reuse_share"]) == (2, 1, 0.5)
    assert report["errors"] == {"too short": 1} and report["output_tokens"] == 10
    assert report["good_share"] == pytest.approx(2 / 3)


def test_tokens_that_arrive_together_share_the_gap() -> None:
    answered = Answered(_request(0, 8))
    for now, count in ((1.0, 1), (1.5, 1), (2.5, 2)):
        answered.add_tokens(now, count)
    answered.usage = ReportedUsage(prompt_tokens=8, cached_tokens=0)
    assert (answered.ttft_s, answered.mean_itl_s, answered.e2e_s) == (1.0, 0.5, 2.5)
    report = summary([answered], Slo(ttft_s=0.9))
    assert report["itl_ms"]["mean"] == pytest.approx(500) and report["good_share"] == 0


def test_spread_uses_weights() -> None:
    assert spread([]) == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    assert spread([3.0, 1.0], [1, 99]) == {"mean": 1.02, "p50": 1.0, "p90": 1.0, "p99": 1.0}
