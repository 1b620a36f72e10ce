"""What chaos counts, and what it makes of it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

_KEPT = 20  # failures and mismatches of which the account is kept; all are counted


@dataclass(frozen=True)
class Mismatch:
    """An answer that is not the undisturbed one."""

    question: int
    position: int  # of the first token that differs
    gap: float  # how near the runner-up was there, in the undisturbed answer; rounding can turn only small ones
    was_greedy: bool


@dataclass
class FaultWindow:
    """One fault as it happened."""

    fault: str
    target: str
    at_s: float  # since the begin
    recovered_s: float | None = None  # until every pool was whole again; None: not seen
    worst_pause_s: float = 0.0  # of any stream, from the stroke to the next one


@dataclass
class Tally:
    """Everything that is counted. Belongs to the event loop of the run."""

    began_at: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    worst_pause_s: float = 0.0
    worst_rejection_s: float = 0.0  # how long a client waited to hear that there is no room
    failures: list[str] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    strokes: list[FaultWindow] = field(default_factory=list)
    blocks_leaked: dict[str, int] = field(default_factory=dict)  # replica -> blocks
    memory_growth_mib: dict[str, float] = field(default_factory=dict)  # process -> over the second half of the run

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_at

    @property
    def is_clean(self) -> bool:
        """Nothing failed, nothing differed, nothing leaked."""
        return not (self.counts["failed"] or self.counts["mismatched"] or self.blocks_leaked)

    def failed(self, account: str) -> None:
        self.counts["failed"] += 1
        if len(self.failures) < _KEPT:
            self.failures.append(f"{self.elapsed_s:.1f} s: {account}")

    def mismatched(self, mismatch: Mismatch) -> None:
        self.counts["mismatched"] += 1
        if len(self.mismatches) < _KEPT:
            self.mismatches.append(mismatch)

    def paused(self, seconds: float) -> None:
        self.worst_pause_s = max(self.worst_pause_s, seconds)
        if self.strokes:
            self.strokes[-1].worst_pause_s = max(self.strokes[-1].worst_pause_s, seconds)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        names = (
            "sent",
            "completed",
            "failed",
            "refused",
            "aborted",
            "asked_again",
            "retried",
            "migrated",
            "mismatched",
        )
        return {
            "clean": self.is_clean,
            "seconds": round(self.elapsed_s, 1),
            **{name: self.counts[name] for name in names},
            "worst_pause_s": round(self.worst_pause_s, 3),
            "worst_rejection_s": round(self.worst_rejection_s, 3),
            "blocks_leaked": self.blocks_leaked,
            "memory_growth_mib": {name: round(growth, 1) for name, growth in self.memory_growth_mib.items()},
            "strokes": [asdict(stroke) for stroke in self.strokes],
            "failures": self.failures,
            "mismatches": [asdict(mismatch) for mismatch in self.mismatches],
        }
