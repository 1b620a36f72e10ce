"""Report of `python -m benchmarks isolation` from its client's observations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from benchmarks.isolation import load as isolation
from benchmarks.isolation.load import Workload, measure, percentile

_STREAM_GAP_S, _FIRST_S = 0.005, 0.05


async def _passed(seconds: float) -> None:
    """Let the server take this long."""
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, passed.set)
    await passed.wait()


class FakeServer:
    """Server that answers long prompts with a delay and streams at a steady pace; every third prompt fails."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.num_streams = 0

    async def ask(self, token_ids: list[int], max_tokens: int) -> AsyncIterator[int]:
        if len(token_ids) == isolation._STREAM_PROMPT:
            self.num_streams += 1
            try:
                for _ in range(max_tokens):
                    await _passed(_STREAM_GAP_S)
                    yield 1
            finally:
                self.num_streams -= 1
            return
        self.prompts.append(tuple(token_ids))
        if len(self.prompts) % 3 == 0:
            raise ConnectionError("gone")
        await _passed(_FIRST_S)
        yield max_tokens


async def test_streams_and_prompts_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_WARM_UP_S", 0.05)
    server = FakeServer()
    workload = Workload(streams=3, prompt_tokens=40, prefills_per_s=20, quiet_s=0.3, loaded_s=0.6)
    result = await measure(workload, server.ask)
    assert server.num_streams == 0, "a stream was left running"
    assert len(set(server.prompts)) == len(server.prompts) == 12, "prompts are all different, and come at their rate"
    assert {len(prompt) for prompt in server.prompts} == {40}
    loaded, quiet = result["loaded"], result["quiet"]
    assert (loaded["prefills_sent"], loaded["prefills_answered"], loaded["prefills_failed"]) == (12, 8, 4)
    assert loaded["ttft_p50_ms"] >= _FIRST_S * 1e3
    for phase in (quiet, loaded):
        assert _STREAM_GAP_S * 1e3 <= phase["itl_p50_ms"] <= phase["itl_p99_ms"] <= phase["itl_max_ms"]
        assert 0 < phase["tokens_per_s"] <= 3 / _STREAM_GAP_S
    assert "ttft_p50_ms" not in quiet


async def test_failed_stream_fails_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_WARM_UP_S", 0.01)

    async def ask(token_ids: list[int], max_tokens: int) -> AsyncIterator[int]:
        yield 1
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        await measure(Workload(prefills_per_s=10, quiet_s=0.01, loaded_s=0.01), ask)


def test_percentiles_are_observed_values() -> None:
    values = [x / 1000 for x in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([0.007], 0.5) == 7 and percentile([], 0.5) is None
