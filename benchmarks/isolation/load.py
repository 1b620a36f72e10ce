"""Load for measuring how long prompts affect running streams, for any server.

A few streams run all the time; then long distinct prompts arrive at a steady rate. Measures the streams' inter-token
latency and the prompts' time to first token. Uses only the standard library, so that any server in any environment can
implement `Ask`.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

Ask = Callable[[list[int], int], AsyncIterator[int]]
# (prompt tokens, number of tokens to generate) -> number of tokens of each event.

# Within every vocabulary.
_TOKEN_IDS = (100, 30_000)
_STREAM_PROMPT = 128
# Then the stream starts over.
_STREAM_TOKENS = 1024
_WARM_UP_S = 3.0
# For answers still running at the end.
_LAST_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Parameters of one measurement."""

    streams: int = 4
    prompt_tokens: int = 1024
    # Answer tokens per long prompt: several, so that its KV is transferred to the decode replica.
    answer_tokens: int = 8
    prefills_per_s: float
    quiet_s: float = 10.0  # without long prompts
    loaded_s: float = 45.0


@dataclass
class _Seen:
    """Measurements of one phase."""

    # Between two events of a stream.
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0  # of the streams
    # Time to first token of the long prompts.
    first_s: list[float] = field(default_factory=list)
    num_sent: int = 0
    num_failed: int = 0

    def as_dict(self, seconds: float) -> dict[str, Any]:
        streams = {
            "itl_p50_ms": percentile(self.gaps_s, 0.50),
            "itl_p99_ms": percentile(self.gaps_s, 0.99),
            "itl_max_ms": percentile(self.gaps_s, 1.0),
            "tokens_per_s": round(self.num_tokens / seconds, 1),
        }
        if not self.num_sent:
            return streams
        return streams | {
            "ttft_p50_ms": percentile(self.first_s, 0.50),
            "ttft_p99_ms": percentile(self.first_s, 0.99),
            "prefills_sent": self.num_sent,
            "prefills_answered": len(self.first_s),
            "prefills_failed": self.num_failed,
        }


async def measure(workload: Workload, ask: Ask) -> dict[str, Any]:
    """Run the workload. Returns plain JSON values, times in milliseconds. Raises what `ask` raises for a stream."""
    load = _Load(workload, ask)
    streams = [asyncio.create_task(load.stream(seed)) for seed in range(workload.streams)]
    try:
        await load.phase(_WARM_UP_S)
        quiet = await load.phase(workload.quiet_s)
        loaded = await load.phase(workload.loaded_s, prefills_per_s=workload.prefills_per_s)
        for task in streams:
            if task.done():
                task.result()
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return {
        "streams": workload.streams,
        "prompt_tokens": workload.prompt_tokens,
        "answer_tokens": workload.answer_tokens,
        "prefills_per_s": workload.prefills_per_s,
        "quiet": quiet.as_dict(workload.quiet_s),
        "loaded": loaded.as_dict(workload.loaded_s),
    }


def percentile(seconds: Sequence[float], share: float) -> float | None:
    """Return the smallest value that `share` of them do not exceed, in milliseconds; None without values."""
    if not seconds:
        return None
    return round(sorted(seconds)[math.ceil(len(seconds) * share) - 1] * 1e3, 2)


class _Load:
    def __init__(self, workload: Workload, ask: Ask) -> None:
        self._workload = workload
        self._ask = ask
        self._seen = _Seen()  # in the current phase

    async def phase(self, seconds: float, *, prefills_per_s: float = 0.0) -> _Seen:
        """Measure for `seconds`, then wait for the remaining prompts."""
        self._seen = seen = _Seen()
        begin = time.monotonic()
        sending: list[asyncio.Task[None]] = []
        for i in range(round(seconds * prefills_per_s)):
            await asyncio.sleep(max(0.0, begin + i / prefills_per_s - time.monotonic()))
            sending.append(asyncio.create_task(self._prefill(seen, seed=1000 + i)))
        await asyncio.sleep(max(0.0, begin + seconds - time.monotonic()))
        # Ignore what the streams do from here on.
        self._seen = _Seen()
        if sending:
            await asyncio.wait(sending, timeout=_LAST_S)
        return seen

    async def stream(self, seed: int) -> None:
        while True:
            last_at = 0.0
            async with aclosing(self._ask(_prompt(_STREAM_PROMPT, seed), _STREAM_TOKENS)) as events:  # type: ignore[type-var]
                async for num_tokens in events:
                    now = time.monotonic()
                    if last_at:
                        self._seen.gaps_s.append(now - last_at)
                    self._seen.num_tokens += num_tokens
                    last_at = now

    async def _prefill(self, seen: _Seen, *, seed: int) -> None:
        seen.num_sent += 1
        begin = time.monotonic()
        is_first = True
        try:
            async for _ in self._ask(_prompt(self._workload.prompt_tokens, seed), self._workload.answer_tokens):
                if is_first:
                    seen.first_s.append(time.monotonic() - begin)
                is_first = False
        except Exception:
            # Count any exception of the server or its client as an unanswered prompt.
            seen.num_failed += 1


def _prompt(num_tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(*_TOKEN_IDS) for _ in range(num_tokens)]
