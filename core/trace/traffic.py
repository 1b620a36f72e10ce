"""Traffic records: hashes, lengths and times, without any text of prompts or answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from core.model.kv_memory import AnnouncedPool
from core.types.request import Role
from core.types.step_timing import StepTiming

TOKENS_PER_HASH = 64  # of a prompt; a hash covers all tokens before, too
KEPT_S = 1080.0  # window of the autoscaler's decisions, plus the age of cached prefixes


@dataclass(frozen=True)
class Slo:
    """Limits for a good request, in seconds: on its TTFT, and on its mean ITL."""

    ttft_s: float = math.inf
    itl_s: float = math.inf

    @classmethod
    def of_ms(cls, ttft_ms: float | None, itl_ms: float | None) -> Slo:
        """Convert limits in milliseconds; None: no limit."""
        return cls(*(math.inf if limit is None else limit / 1e3 for limit in (ttft_ms, itl_ms)))

    def is_kept(self, ttft_s: float, itl_s: float) -> bool:
        return ttft_s <= self.ttft_s and itl_s <= self.itl_s


@dataclass(kw_only=True, slots=True)
class SeenRequest:
    """Record of one request, updated at its first token and at its end. Times are on the clock of its owner."""

    arrival_s: float
    num_tokens: int  # of the prompt
    ids: Sequence[int] | None  # one per `tokens_per_id` tokens; equal ids are equal prefixes. None: shares no prefix
    tokens_per_id: int = TOKENS_PER_HASH
    num_output: int | None = None  # tokens of the answer; None: running
    ttft_s: float | None = None  # None: no token yet
    itl_s: float | None = None  # mean inter-token latency; None: fewer than two tokens

    @property
    def is_over(self) -> bool:
        return self.num_output is not None


@dataclass(frozen=True, kw_only=True)
class ReplicaReport(AnnouncedPool):
    """State of one replica as a router sees it. A rate of 0 is not measured yet."""

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
    available_blocks: int
    tokens_per_row: float = 0.0  # accepted tokens per row and step; above 1 with drafts
    drafted_per_row: float = 0.0  # draft tokens verified per row and step

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> ReplicaReport:
        """Parse the asdict() of a report of any version."""
        return msgspec.convert(tree, cls)


@dataclass(frozen=True, kw_only=True)
class TrafficReport:
    """Traffic of a router since its last report. The arrival_s of a request is its age in seconds."""

    router: str
    arrived: dict[int, SeenRequest]  # by the router's own number; finished ones included
    changed: dict[int, SeenRequest]  # reported before; since then got a first token or finished
    num_waiting: int = 0  # requests queued for a replica
    replicas: tuple[ReplicaReport, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShownDecision:
    """Autoscaler decision, for the routers' status pages."""

    at: float  # seconds since 1970
    text: str  # "2P2D -> 3P1D"
    reason: str


@dataclass(frozen=True, kw_only=True)
class TrafficAnswer:
    """Reply of the controller to a traffic report."""

    life: str  # id of the controller's process: a new one needs a full report
    scaling: tuple[ShownDecision, ...] = ()  # latest decisions, newest first
