"""The public list of KV reads that go wrong, and what came of each: the same words for whoever is put to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# By the name of a case: what is done, and where it was reported. Of vllm#52234 the comment of 2026-09-18 counts.
CASES = {
    "undisturbed": ("nothing", ""),
    "unknown": ("KV of a request that nobody has", "vllm#52234"),
    "out-of-range": ("KV beyond what there is", "vllm#52234"),
    "consumed": ("a reference that was used already", "vllm#52234"),
    "stale": ("a reference whose blocks another request has by now", "vllm#52234"),
    "expired": ("a reference after its lease", "vllm#52234"),
    "expired-reused": ("the same, and the blocks are another request's", "vllm#47021"),
    "short": ("fewer positions than the prompt has", "vllm#52234"),
    "other-prompt": ("another request's reference beside this prompt", "vllm#52234"),
    "twice": ("one reference by two requests at once", "vllm#52234"),
    "forged-peer": ("the name of a peer that is not the one at that address", "vllm#40993"),
    "nobody-there": ("an address at which nobody listens", "vllm#40993"),
    "unwritten": ("word that KV is there before any was sent", "vllm#50754"),
    "forged-sender": ("KV from a peer that nobody has asked", "LightLLM#1590"),
    "damaged": ("a bit turned over on the wire", "vllm#52234"),
    "foreign-prefix": ("another tenant's prefix", "vllm#52627"),
    "evicted": ("a prefix that its holder has evicted since", "vllm#47021"),
    "client-gone": ("nobody reads what was computed", "vllm#41269"),
    "sender-killed": ("kill -9 of the sender as it sends", "llm-d#191"),
    "sender-frozen": ("SIGSTOP of the sender as it sends; later it goes on", "sglang#36033"),
    "receiver-killed": ("kill -9 of the receiver before it has read", "vllm#20139"),
    "receiver-frozen": ("SIGSTOP of the receiver before it has read; later it goes on", "vllm#20139"),
    "restarted": ("a peer that was killed and is back under its name", "vllm#25562"),
}


@dataclass
class CaseOutcome:
    """What one case has done, to the request that it struck and to those beside it."""

    case: str
    seen: str  # by whoever held the bad reference: an error's first words, or "answered"
    num_answers: int = 0  # that came
    num_wrong: int = 0  # of these, not token for token the undisturbed ones
    differs: str = ""  # the last of these, and the right one
    num_foreign: int = 0  # of these, another prompt's answer, token for token; or what was given to a stranger
    num_failed: int = 0  # requests that held nothing bad and were refused, or ended with an error
    num_hung: int = 0  # requests without an end by their deadline
    num_lost: int = 0  # blocks that do not come back
    back_s: float = 0.0  # until all blocks were back
    num_dead: int = 0  # processes that ended, and were not killed by the case

    @property
    def is_clean(self) -> bool:
        harm = (self.num_wrong, self.num_foreign, self.num_failed, self.num_hung, self.num_lost, self.num_dead)
        return not any(harm)

    def as_dict(self) -> dict[str, Any]:
        what, reported = CASES[self.case]
        return asdict(self) | {"what": what, "reported": reported, "is_clean": self.is_clean}


def table(outcomes: list[CaseOutcome]) -> list[list[str]]:
    """For people, with its heading."""
    heading = ["CASE", "SEEN", "ANSWERS", "WRONG", "FOREIGN", "FAILED", "HUNG", "LOST", "BACK AFTER", "DIED"]
    return [heading, *map(_row, outcomes)]


def _row(one: CaseOutcome) -> list[str]:
    counts = (one.num_answers, one.num_wrong, one.num_foreign, one.num_failed, one.num_hung, one.num_lost)
    return [one.case, one.seen[:90], *map(str, counts), f"{one.back_s:.1f} s", str(one.num_dead)]
