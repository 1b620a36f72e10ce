"""How long answers will be that are not over yet, from those that are and from how far the others have come.

The first to end of what came lately are the short ones: their mean alone would say that answers have become short
whenever they become long. What runs says that its answer is longer than what it has, which Kaplan and Meier's estimate
(1958) counts as such: S(n), the share of answers of more than n tokens. A request that has n is expected to come to
n + (the sum of S beyond n) / S(n).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from core.trace.traffic import SeenRequest

_LAST_KNOWN = 40  # requests with about as long a prompt, that tell of the next ones
_LAST_PACES = 200

_Curve = list[tuple[int, float]]  # n, and the share of answers that are longer; in order of n


def tokens_so_far(requests: Sequence[SeenRequest], *, now_s: float) -> list[int]:
    """Of each request's answer; those under way by how fast tokens came of late."""
    itl_s = fmean([r.itl_s for r in requests[-_LAST_PACES:] if r.itl_s] or [1.0])
    return [
        r.num_output
        if r.num_output is not None
        else 0
        if r.ttft_s is None
        else 1 + max(0, int((now_s - r.arrival_s - r.ttft_s) / itl_s))
        for r in requests
    ]


def answer_lengths(requests: Sequence[SeenRequest], *, now_s: float) -> list[int]:
    """Of each of these, in order of arrival: what it had, or is expected to have; at least one token."""
    so_far = tokens_so_far(requests, now_s=now_s)
    kinds: defaultdict[int, list[tuple[int, bool]]] = defaultdict(list)
    for request, count in zip(requests, so_far, strict=True):
        if count:
            kinds[request.num_tokens.bit_length()].append((count, request.is_over))
    usual = _longer([one for some in kinds.values() for one in some])
    curves = {kind: _longer(some[-_LAST_KNOWN:]) for kind, some in kinds.items() if any(is_over for _, is_over in some)}
    return [
        max(1, count if r.is_over else round(_expected(curves.get(r.num_tokens.bit_length(), usual), count)))
        for r, count in zip(requests, so_far, strict=True)
    ]


def _longer(known: Sequence[tuple[int, bool]]) -> _Curve:
    """known: tokens, and whether that was the whole answer."""
    curve, share, left = [(0, 1.0)], 1.0, len(known)
    for count, is_over in sorted(known, key=lambda one: (one[0], not one[1])):
        if is_over:
            share *= 1 - 1 / left
        left -= 1
        curve.append((count, share))
    return curve


def _expected(curve: _Curve, count: int) -> float:
    """Where the longest that is known is still running, or this one is longer: as much again."""
    last, rest = curve[-1]
    at = next((share for n, share in reversed(curve) if n <= count), 1.0)
    if count >= last or at <= 0:
        return 2.0 * count
    beyond = sum(
        share * (after - max(before, count)) for (before, share), (after, _) in pairwise(curve) if after > count
    )
    return count + (beyond + rest * last) / at
