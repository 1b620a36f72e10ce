"""One request on its way through the simulated cluster."""

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
    """What became of it, in seconds of virtual time."""

    request: TraceRequest
    hashes: list[bytes]
    option: Option
    compute_s: float  # of what is missing of the prompt, as the router sees it
    num_cached: int = 0  # prompt tokens that were not computed again
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    ended_at: float = 0.0
    restored: list[int] = field(default_factory=list)  # blocks held for it until it is admitted
    landed: Callable[[], None] | None = None  # told when the KV is on the decode replica
    moves_to: str | None = None  # the decode replica to which it is on its way
    promised_blocks: int = 0  # on a decode replica, with the answer that is predicted
    reserved_at: int = 0  # tokens that it had when blocks were set aside there
    with_replicas: set[str] = field(default_factory=set)  # that have a part in it

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.request.arrival_s

    @property
    def mean_itl_s(self) -> float:
        gaps = self.request.num_output - 1
        return (self.last_token_at - self.first_token_at) / gaps if gaps else 0.0

    def sequence(self, *, block_size: int, num_generated: int = 0) -> Sequence:
        """As a replica sees it. Its tokens are all alike: what matters of the prompt is in the hashes."""
        num_tokens = self.request.num_tokens
        request = SequenceRequest(
            id=str(self.request.number),
            token_ids=(self.request.number,) * (num_tokens + num_generated),
            num_prompt_tokens=num_tokens,
            sampling=Sampling(max_tokens=self.request.num_output),
            priority=self.request.number,  # who waited for blocks from elsewhere keeps its place in the queue
        )
        return Sequence(request, 0, model=_MODEL, block_size=block_size, max_context=1 << 40, hashes=self.hashes)
