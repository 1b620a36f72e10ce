"""Counters and report of a chaos run."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

# Number of failures and mismatches that are kept in detail; all are counted.
_KEPT = 20


@dataclass(frozen=True)
class Mismatch:
    """Answer that differs from the undisturbed one."""

    question: int
    # Position of the first different token.
    position: int
    # Log-probability gap of the top two tokens there, in the undisturbed answer. Rounding can only flip small gaps.
    gap: float
    was_greedy: bool


@dataclass
class FaultWindow:
    """One injected fault."""

    fault: str
    target: str
    at_s: float  # since the start
    # Seconds until every pool was complete again; None: not observed.
    recovered_s: float | None = None
    # Longest pause of any stream from this fault to the next one.
    worst_pause_s: float = 0.0


@dataclass
class Tally:
    """Counters of a run, owned by its event loop."""

    began_at: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    worst_pause_s: float = 0.0
    # Longest time until a client was rejected for lack of room.
    worst_rejection_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    strokes: list[FaultWindow] = field(default_factory=list)
    blocks_leaked: dict[str, int] = field(default_factory=dict)  # replica -> blocks
    # Process to growth over the second half of the run.
    memory_growth_mib: dict[str, float] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_at

    @property
    def is_clean(self) -> bool:
        """Return whether nothing failed, differed or leaked."""
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
        """Return plain values for JSON."""
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
