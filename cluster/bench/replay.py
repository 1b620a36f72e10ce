"""Open-loop load on a deployment: sends requests at their trace times, times each token, and summarizes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.bench.endpoints import Endpoint, ReportedUsage
from core.trace.statistics import spread
from core.trace.trace import TraceRequest
from core.trace.traffic import Slo
from core.types.errors import RequestFailed

# Token ids below this exist in every model. They make 100^8 different blocks of eight tokens.
_VOCABULARY = 100


@dataclass
class Answered:
    """Timing of one request. Times are seconds after the load began; a request is due at its trace time."""

    request: TraceRequest
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_output: int = 0
    # (seconds between tokens, number of tokens with this gap)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    usage: ReportedUsage | None = None
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to first token since the request was due, so that delays of the load generator count."""
        return self.first_token_at - self.request.arrival_s

    @property
    def mean_itl_s(self) -> float:
        later = self.num_output - 1
        return (self.last_token_at - self.first_token_at) / later if later > 0 else 0.0

    @property
    def e2e_s(self) -> float:
        return self.last_token_at - self.request.arrival_s

    def add_tokens(self, now: float, count: int) -> None:
        """Record `count` tokens that arrived together; the gap is divided among them."""
        if self.num_output:
            self.gaps.append(((now - self.last_token_at) / count, count))
        else:
            self.first_token_at = now
            if count > 1:
                self.gaps.append((0.0, count - 1))
        self.last_token_at = now
        self.num_output += count


async def replay(
    trace: Sequence[TraceRequest],
    endpoint: Endpoint,
    *,
    seed: int,
    timeout_s: float,
    on_end: Callable[[Answered], None] = lambda answered: None,
) -> list[Answered]:
    """Send every request at its time. Returns all answers, in the order of the trace.

    seed: selects the prompts' tokens. timeout_s: limit for one answer.
    """
    # Built in advance, because it takes time.
    prompts = [prompt_of(request, seed=seed) for request in trace]
    begin = time.perf_counter()

    async def one(answered: Answered, token_ids: list[int]) -> None:
        request = answered.request
        await asyncio.sleep(request.arrival_s - (time.perf_counter() - begin))
        try:
            async for item in endpoint.ask(token_ids, max_tokens=request.num_output, timeout_s=timeout_s):
                if isinstance(item, ReportedUsage):
                    answered.usage = item
                else:
                    answered.add_tokens(time.perf_counter() - begin, item)
            if answered.usage is None:
                raise RequestFailed("the answer ended without its usage")
        except RequestFailed as error:
            answered.usage, answered.error = None, str(error)
        on_end(answered)

    found = [Answered(request) for request in trace]
    async with asyncio.TaskGroup() as group:
        for answered, token_ids in zip(found, prompts, strict=True):
            group.create_task(one(answered, token_ids))
    return found


def summary(answers: Sequence[Answered], slo: Slo) -> dict[str, Any]:
    """Return plain values with the fields of the simulator's report.

    Times are in milliseconds, rates per second from the first arrival to the last token.

    Goodput counts the requests within both limits, using each request's own mean ITL.
    """
    done = [answer for answer in answers if answer.usage]
    gaps = [gap for answer in done for gap in answer.gaps]
    duration_s = max((answer.last_token_at for answer in done), default=0.0)
    per_s = 1 / duration_s if duration_s else 0.0
    prompt_tokens = sum(answer.usage.prompt_tokens for answer in done if answer.usage)
    cached_tokens = sum(answer.usage.cached_tokens for answer in done if answer.usage)
    output_tokens = sum(answer.num_output for answer in done)
    num_good = sum(slo.is_kept(answer.ttft_s, answer.mean_itl_s) for answer in done)
    return {
        "completed": len(done),
        "failed": len(answers) - len(done),
        "errors": dict(Counter(answer.error for answer in answers if answer.error).most_common(5)),
        "duration_s": duration_s,
        "reuse_share": cached_tokens / max(1, prompt_tokens),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens * per_s,
        "ttft_ms": spread([answer.ttft_s * 1e3 for answer in done]),
        "itl_ms": spread([seconds * 1e3 for seconds, _ in gaps], [count for _, count in gaps]),
        "e2e_ms": spread([answer.e2e_s * 1e3 for answer in done]),
        "goodput_rps": num_good * per_s,
        "good_share": num_good / max(1, len(answers)),
    }


def prompt_of(request: TraceRequest, *, seed: int) -> list[int]:
    """Return the prompt of a trace's request: equal hash ids give equal tokens, different ids different ones.

    Another `seed` gives other prompts, which miss every cache.
    """
    size = request.tokens_per_id
    ids = request.ids
    if ids is None:  # unique ids; those of a trace are not negative
        first = -(request.number + 1) << 16
        ids = tuple(range(first, first + -(-request.num_tokens // size)))
    tokens: list[int] = []
    for id in ids:
        tokens += np.random.default_rng((seed, abs(id), id < 0)).integers(0, _VOCABULARY, size).tolist()
    return tokens[: request.num_tokens]
