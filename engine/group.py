"""A request on its decode replica: its choices, and how far its KV has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sequence import Sequence


@dataclass(eq=False)
class Choice:
    """One of a request's choices: a sequence, and the key under which its tokens travel."""

    group: Group
    sequence: Sequence
    stream: int


@dataclass(eq=False)
class Group:
    """All choices of one request that run here. They share the prompt's blocks, and one handoff."""

    root: Sequence  # holds the prompt's blocks until the choices fork from it
    router: str
    prefill_here: bool  # the prompt is computed here: there is no handoff
    num_cached: int = 0  # prompt tokens found in the prefix cache
    choices: list[Choice] = field(default_factory=list)  # empty until the prompt's KV is whole
    handoff: str | None = None
    expires_at: float = 0.0  # monotonic; the handoff must have landed by then
    landed_ranks: set[int] = field(default_factory=set)
    landed_epoch: int = 0
    first_tokens: tuple[int, ...] = ()
    unwanted: set[int] = field(default_factory=set)  # streams that were stopped, perhaps before they began

    @property
    def id(self) -> str:
        return self.root.request.id

    @property
    def num_choices(self) -> int:
        return len(self.root.request.choices)

    def land(self, rank: int, *, epoch: int, first_tokens: tuple[int, ...], num_ranks: int) -> bool:
        """One rank's KV is whole. True when all ranks' are, under the same epoch."""
        if epoch > self.landed_epoch:
            self.landed_epoch, self.landed_ranks, self.first_tokens = epoch, set(), ()
        if epoch == self.landed_epoch:
            self.landed_ranks.add(rank)
            self.first_tokens = first_tokens or self.first_tokens
        return len(self.landed_ranks) == num_ranks and len(self.first_tokens) == self.num_choices
