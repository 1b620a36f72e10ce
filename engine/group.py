"""A request on its decode replica: its choices, and how far its KV has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from engine.sequence import Sequence


class Source(StrEnum):
    """Where a request's KV comes from."""

    PREFILL = "prefill"  # a prefill replica computes the prompt and ships it
    HERE = "here"  # the prompt is computed on this replica
    DECODE = "decode"  # another decode replica runs it, and ships what it has


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
    source: Source
    num_offered: int = 0  # leading tokens that a peer, or a tier below this pool, is said to hold; 0: not counted on
    num_cached: int = 0  # prompt tokens found in the prefix cache
    num_fetched: int = 0  # tokens after these whose KV came from where it was offered
    choices: list[Choice] = field(default_factory=list)  # empty until the prompt's KV is whole
    unwanted: set[int] = field(default_factory=set)  # streams that were stopped, perhaps before they began

    @property
    def id(self) -> str:
        return self.root.request.id

    @property
    def fetch_end(self) -> int:
        """Positions before this one are to be fetched, where they are not here."""
        return self.root.num_reusable(self.num_offered)

    @property
    def num_choices(self) -> int:
        return len(self.root.request.choices)
