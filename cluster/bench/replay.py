"""Open-loop load on a deployment: requests are sent at their trace times, and every token is timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.bench.endpoints import Endpoint, ReportedUsage
from core.trace.prompts import TracePrompts
from core.trace.trace import TraceRequest
from core.types.errors import RequestFailed


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
        """Time to first token since the request was due, so that a slow load generator shows."""
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
    prompts = [TracePrompts(seed=seed).of(request) for request in trace]
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
