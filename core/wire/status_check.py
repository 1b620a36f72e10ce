"""Plausibility check of a replica's reported metrics, on which the router bases its costs."""

from __future__ import annotations

import math

from core.rpc import worker_pb2 as pb

_MEASURED = (
    "prefill_tokens_per_s", "decode_step_s", "link_bytes_per_s", "host_bytes_per_s", "disk_bytes_per_s",
    "tokens_per_row", "drafted_per_row",
)  # fmt: skip
_ADDED_UP = ("transfer_seconds", "pull_seconds")
_SMALLEST, _LARGEST = 1e-12, 1e18  # of any measurement: seconds, and things per second


def make_plausible(status: pb.Status) -> bool:
    """Clear implausible metrics of a status in place: NaN, infinite and negative ones. They then count as not measured.

    Returns False if there were any.
    """
    bad = [name for name in _MEASURED if not _is_plausible(getattr(status, name))]
    for name in bad:
        status.ClearField(name)
    timing, totals = status.timing, status.totals
    is_good = not bad
    if not all(map(_is_plausible, (timing.base_s, timing.token_s, timing.pair_s, timing.context_s))):
        status.ClearField("timing")
        is_good = False
    for name in _ADDED_UP:
        if not 0 <= getattr(totals, name) < math.inf:
            totals.ClearField(name)
            is_good = False
    return is_good


def _is_plausible(number: float) -> bool:
    return number == 0 or _SMALLEST <= number <= _LARGEST
