"""Do running streams notice that long prompts are computed? The load, and what its client saw; whoever answers it.

A few streams run all the time. Then long prompts, no two alike, arrive at a steady rate beside them. What counts for
the streams is the time between two of their tokens; for the prompts, the time to their first one. Standard library
only: any server can be put behind `Ask`, in whatever environment it lives.
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
# Prompt tokens and how many to generate, whatever they are -> with each event, how many tokens it brings.

_TOKEN_IDS = (100, 30_000)  # every vocabulary has them
_STREAM_PROMPT = 128
_STREAM_TOKENS = 1024  # then the stream begins anew
_WARM_UP_S = 3.0
_LAST_S = 60.0  # for the answers that are under way at the end


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One measurement."""

    streams: int = 4
    prompt_tokens: int = 1024
    answer_tokens: int = 8  # of each of these prompts, so that their KV has to go to where it is decoded
    prefills_per_s: float
    quiet_s: float = 10.0  # the streams alone
    loaded_s: float = 45.0


@dataclass
class _Seen:
    """What the client has seen in one phase."""

    gaps_s: list[float] = field(default_factory=list)  # between two events of a stream
    num_tokens: int = 0  # of the streams
    first_s: list[float] = field(default_factory=list)  # to a long prompt's first token
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
    """Run the workload; plain JSON values, times in milliseconds. Raises what `ask` raised to a stream."""
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
    """The smallest value that `share` of them do not exceed, in milliseconds; None of none."""
    if not seconds:
        return None
    return round(sorted(seconds)[math.ceil(len(seconds) * share) - 1] * 1e3, 2)


class _Load:
    def __init__(self, workload: Workload, ask: Ask) -> None:
        self._workload = workload
        self._ask = ask
        self._seen = _Seen()  # in the present phase

    async def phase(self, seconds: float, *, prefills_per_s: float = 0.0) -> _Seen:
        """Look on for so long; then wait for the prompts that are still under way."""
        self._seen = seen = _Seen()
        begin = time.monotonic()
        sending: list[asyncio.Task[None]] = []
        for i in range(round(seconds * prefills_per_s)):
            await asyncio.sleep(max(0.0, begin + i / prefills_per_s - time.monotonic()))
            sending.append(asyncio.create_task(self._prefill(seen, seed=1000 + i)))
        await asyncio.sleep(max(0.0, begin + seconds - time.monotonic()))
        self._seen = _Seen()  # what the streams do from here on does not count
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
        except Exception:  # the edge: whatever the server or its client raises is a prompt that was not answered
            seen.num_failed += 1


def _prompt(num_tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(*_TOKEN_IDS) for _ in range(num_tokens)]
