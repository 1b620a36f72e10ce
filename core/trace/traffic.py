"""Traffic as it is remembered: hashes, lengths and times, and never a word of what was asked or answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.types.json_records import known_fields
from core.types.request import Role
from core.types.step_timing import StepTiming

TOKENS_PER_HASH = 64  # of a prompt, behind one hash of all before them
KEPT_S = 1080.0  # what whoever decides looks at, and what may be in caches since before


@dataclass(kw_only=True, slots=True)
class SeenRequest:
    """One request: told when it arrives, filled in at its first token and when it is over. Times are seconds of whoever
    holds it."""

    arrival_s: float
    num_tokens: int  # of the prompt
    ids: Sequence[int] | None  # one per `tokens_per_id` tokens: equal ids are equal prefixes. None: shares nothing
    tokens_per_id: int = TOKENS_PER_HASH
    num_output: int | None = None  # tokens of the answer; None: it is not over
    ttft_s: float | None = None  # None: no token came
    itl_s: float | None = None  # mean between two tokens; None: there were no two

    @property
    def is_over(self) -> bool:
        return self.num_output is not None

    def is_good(self, *, slo_ttft_s: float, slo_itl_s: float) -> bool:
        """It was answered within both limits."""
        return self.ttft_s is not None and self.ttft_s <= slo_ttft_s and (self.itl_s or 0.0) <= slo_itl_s


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """One replica as a router knows it; a rate of 0 was not measured yet."""

    replica: str
    role: Role
    timing: StepTiming | None
    link_bytes_per_s: float
    prefill_tokens_per_s: float
    decode_step_s: float
    queued_tokens: int  # of prompts
    num_streams: int
    max_running: int
    max_batch_tokens: int
    num_blocks: int
    available_blocks: int
    block_size: int
    bytes_per_token: int  # of KV on the wire
    tokens_per_row: float = 0.0  # that a row of a step gets: with drafts more than 1
    drafted_per_row: float = 0.0  # tokens that it computes beside its own

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> ReplicaReport:
        """Of what asdict has made, by any version."""
        timing = tree["timing"] and StepTiming(**known_fields(StepTiming, tree["timing"]))
        return cls(**{**known_fields(cls, tree), "role": Role(tree["role"]), "timing": timing})


@dataclass(frozen=True, kw_only=True)
class TrafficReport:
    """What a router has seen since it last told. A request's arrival_s is how long ago it came."""

    router: str
    arrived: dict[int, SeenRequest]  # by the router's own number; those that are over already included
    changed: dict[int, SeenRequest]  # told of before: their first token has come, or they are over
    num_lost: int  # that it had no room for until now
    num_waiting: int = 0  # requests, for a replica with room
    replicas: tuple[ReplicaReport, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShownDecision:
    """One of the autoscaler's, for people who look at a router."""

    at: float  # seconds since 1970
    text: str  # "2P2D -> 3P1D"
    reason: str


@dataclass(frozen=True, kw_only=True)
class TrafficAnswer:
    """Of the controller to a router's news."""

    life: str  # which of its own knows of them: a new one is to be told everything
    scaling: tuple[ShownDecision, ...] = ()  # the last ones, the latest first
