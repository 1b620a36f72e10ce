"""Request in the simulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from core.trace.trace import TraceRequest
from core.types.request import Sampling, SequenceRequest
from engine.scheduler.sequence import Sequence
from router.routing.policy import Option

_MODEL = "simulated"


@dataclass(eq=False)
class Flight:
    """State and timestamps of one simulated request, in seconds of virtual time."""

    request: TraceRequest
    hashes: list[bytes]
    option: Option
    compute_s: float  # predicted time to compute the uncached part of the prompt
    num_cached: int = 0  # prompt tokens found in the cache
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    ended_at: float = 0.0
    restored: list[int] = field(default_factory=list)  # fetched blocks, held until admission
    landed: Callable[[], None] | None = None  # called when the KV is on the decode replica
    moves_to: str | None = None  # target decode replica of a move in progress
    promised_blocks: int = 0  # blocks reserved on a decode replica, including the predicted answer
    reserved_at: int = 0  # number of generated tokens when the target reserved blocks
    with_replicas: set[str] = field(default_factory=set)  # replicas that take part in it

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.request.arrival_s

    @property
    def mean_itl_s(self) -> float:
        gaps = self.request.num_output - 1
        return (self.last_token_at - self.first_token_at) / gaps if gaps else 0.0

    def sequence(self, *, block_size: int, num_generated: int = 0) -> Sequence:
        """Build the engine's sequence. All its tokens are equal: the hashes identify the prompt."""
        num_tokens = self.request.num_tokens
        request = SequenceRequest(
            id=str(self.request.number),
            token_ids=(self.request.number,) * (num_tokens + num_generated),
            num_prompt_tokens=num_tokens,
            sampling=Sampling(max_tokens=self.request.num_output),
            priority=self.request.number,  # a request delayed by a fetch keeps its place in the queue
        )
        return Sequence(request, 0, model=_MODEL, block_size=block_size, max_context=1 << 40, hashes=self.hashes)
