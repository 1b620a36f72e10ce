"""What a router makes sure of in what a replica says of itself, before costs are computed from it."""

from __future__ import annotations

import math

from core.rpc import worker_pb2 as pb

_MEASURED = (
    "prefill_tokens_per_s", "decode_step_s", "link_bytes_per_s", "host_bytes_per_s", "disk_bytes_per_s",
    "tokens_per_row", "drafted_per_row",
)  # fmt: skip
_ADDED_UP = ("transfer_seconds", "pull_seconds")
_SMALLEST, _LARGEST = 1e-12, 1e18  # of anything that is measured: seconds, and things per second


def make_plausible(status: pb.Status) -> bool:
    """Take out of a status, in place, what no replica can have measured: NaN, an infinity, less than nothing. Then it
    counts as not measured yet. False if there was any."""
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
