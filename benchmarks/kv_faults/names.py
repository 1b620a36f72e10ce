"""Public list of faulty KV reads, and the outcome of each, in terms that apply to any system."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# Case name: (fault, issue that reported it). For vllm#52234, see the comment of 2026-09-18.
CASES = {
    "undisturbed": ("no fault", ""),
    "unknown": ("KV of an unknown request", "vllm#52234"),
    "out-of-range": ("KV positions out of range", "vllm#52234"),
    "consumed": ("a reference that has been used already", "vllm#52234"),
    "stale": ("a reference whose blocks belong to another request", "vllm#52234"),
    "expired": ("a reference after its lease", "vllm#52234"),
    "expired-reused": ("the same, with the blocks reused by another request", "vllm#47021"),
    "short": ("fewer positions than the prompt", "vllm#52234"),
    "other-prompt": ("another request's reference with this prompt", "vllm#52234"),
    "twice": ("one reference used by two requests at once", "vllm#52234"),
    "forged-peer": ("a peer name that does not match the address", "vllm#40993"),
    "nobody-there": ("an address without a listener", "vllm#40993"),
    "unwritten": ("completion reported before any KV was sent", "vllm#50754"),
    "forged-sender": ("KV from a peer without a request", "LightLLM#1590"),
    "damaged": ("a bit flipped on the wire", "vllm#52234"),
    "foreign-prefix": ("another tenant's prefix", "vllm#52627"),
    "evicted": ("a prefix that its source has evicted", "vllm#47021"),
    "client-gone": ("the client disconnects before reading", "vllm#41269"),
    "sender-killed": ("kill -9 of the sender while sending", "llm-d#191"),
    "sender-frozen": ("SIGSTOP of the sender while sending, later SIGCONT", "sglang#36033"),
    "receiver-killed": ("kill -9 of the receiver before reading", "vllm#20139"),
    "receiver-frozen": ("SIGSTOP of the receiver before reading, later SIGCONT", "vllm#20139"),
    "restarted": ("a peer that was killed and has restarted under its name", "vllm#25562"),
}


@dataclass
class CaseOutcome:
    """Outcome of one case, for the affected request and concurrent ones."""

    case: str
    # Result for the bad reference: the first words of an error, or "answered".
    seen: str
    num_answers: int = 0  # answers received
    # Answers that differ from the undisturbed ones.
    num_wrong: int = 0
    # Last wrong answer, and the correct one.
    differs: str = ""
    # Wrong answers that equal another prompt's answer, or data given to an unauthorized peer.
    num_foreign: int = 0
    # Requests without a fault of their own that were rejected or failed.
    num_failed: int = 0
    # Requests that did not end by their deadline.
    num_hung: int = 0
    # Blocks that were not freed.
    num_lost: int = 0
    # Seconds until all blocks were free.
    back_s: float = 0.0
    # Processes that ended without being killed by the case.
    num_dead: int = 0

    @property
    def is_clean(self) -> bool:
        harm = (self.num_wrong, self.num_foreign, self.num_failed, self.num_hung, self.num_lost, self.num_dead)
        return not any(harm)

    def as_dict(self) -> dict[str, Any]:
        what, reported = CASES[self.case]
        return asdict(self) | {"what": what, "reported": reported, "is_clean": self.is_clean}


def table(outcomes: list[CaseOutcome]) -> list[list[str]]:
    """Return rows for a text table, with its heading."""
    heading = ["CASE", "SEEN", "ANSWERS", "WRONG", "FOREIGN", "FAILED", "HUNG", "LOST", "BACK AFTER", "DIED"]
    return [heading, *map(_row, outcomes)]


def _row(one: CaseOutcome) -> list[str]:
    counts = (one.num_answers, one.num_wrong, one.num_foreign, one.num_failed, one.num_hung, one.num_lost)
    return [one.case, one.seen[:90], *map(str, counts), f"{one.back_s:.1f} s", str(one.num_dead)]
