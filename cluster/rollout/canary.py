"""Bounds on the error rate and the latency of a new revision, relative to the old one. Pure."""

from __future__ import annotations

from core.types.revisions import RevisionCounts

# Fewer requests are not significant.
MIN_REQUESTS = 20


def problem_of(
    old: RevisionCounts | None,
    new: RevisionCounts | None,
    *,
    max_error_increase: float,
    max_latency_factor: float | None,
) -> str:
    """Return why the new revision must be rolled back, in one line, or "" if it may stay.

    Its error rate may exceed the old one's by `max_error_increase` (0.1: ten percentage points); an old revision
    without requests counts as free of errors. Its mean TTFT and mean ITL may be at most `max_latency_factor` times the
    old one's; None: latency is not compared. Each bound applies from MIN_REQUESTS requests on.
    """
    old, new = old or RevisionCounts(), new or RevisionCounts()
    if new.attempts >= MIN_REQUESTS and _rate(new) > _rate(old) + max_error_increase:
        return (
            f"{new.failed} of {new.attempts} attempts failed on the new revision, "
            f"{old.failed} of {old.attempts} on the old one"
        )
    if max_latency_factor is None or min(old.answered, new.answered) < MIN_REQUESTS:
        return ""
    for name, old_sum_s, new_sum_s in (("TTFT", old.ttft_s, new.ttft_s), ("ITL", old.itl_s, new.itl_s)):
        old_s, new_s = old_sum_s / old.answered, new_sum_s / new.answered
        if new_s > old_s * max_latency_factor:
            return (
                f"mean {name} is {new_s * 1e3:.1f} ms on the new revision and {old_s * 1e3:.1f} ms on the old one, "
                f"more than {max_latency_factor:g} times as much"
            )
    return ""


def _rate(counts: RevisionCounts) -> float:
    return counts.failed / counts.attempts if counts.attempts else 0.0
