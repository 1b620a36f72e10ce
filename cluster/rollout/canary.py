"""Whether what routers have seen of a new revision speaks against it. Pure.

A few bad requests prove nothing: a share counts as greater than another when even its lower bound (Wilson's interval,
95 %) is above the other's upper one. Source: Wilson 1927, doi:10.1080/01621459.1927.10502953.
"""

from __future__ import annotations

import math

from core.types.revisions import RevisionCounts, Slo

ATTAINMENT = 0.95  # of the requests are to keep the SLO
_Z = 1.96
_FEW = 3  # so many bad ones at least


def problem_of(old: RevisionCounts | None, new: RevisionCounts | None, *, slo: Slo) -> str:
    """Why the new revision must not stay, in a line; "" where nothing speaks against it."""
    old, new = old or RevisionCounts(), new or RevisionCounts()
    if _is_worse(new.failed, new.attempts, old.failed, old.attempts):
        return f"{new.failed} of {new.attempts} attempts failed on it, {old.failed} of {old.attempts} on the old one"
    if _is_worse(new.other_tokens, new.replayed, old.other_tokens, old.replayed):
        return (
            f"{new.other_tokens} of {new.replayed} answers were others when they were asked again there, "
            f"{old.other_tokens} of {old.replayed} on the old one"
        )
    misses, _ = share_between(new.slow, new.answered)
    if new.slow >= _FEW and misses > 1 - ATTAINMENT and _share(new.slow, new.answered) > _share(old.slow, old.answered):
        limits = (("ttft", slo.ttft_ms), ("itl", slo.itl_ms))
        said = ", ".join(f"{name} {limit:g} ms" for name, limit in limits if limit is not None)
        others = f"{old.slow} of {old.answered} on the old one"
        return f"{new.slow} of {new.answered} requests missed the SLO ({said}), {others}"
    return ""


def share_between(bad: int, total: int) -> tuple[float, float]:
    """The bounds between which the share is that these are a sample of; (0, 1) where there is none."""
    if not total:
        return 0.0, 1.0
    share = min(1.0, bad / total)
    middle = share + _Z**2 / (2 * total)
    spread = _Z * math.sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2))
    scale = 1 + _Z**2 / total
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def _is_worse(bad: int, total: int, other_bad: int, other_total: int) -> bool:
    """Of a revision without any request there is nothing to compare with: then what most would call bad is."""
    most = share_between(other_bad, other_total)[1] if other_total else 0.5
    return bad >= _FEW and share_between(bad, total)[0] > most


def _share(bad: int, total: int) -> float:
    return bad / total if total else 0.0
