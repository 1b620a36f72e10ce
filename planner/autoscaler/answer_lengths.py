"""Prediction of the final length of running answers, from finished answers and the progress of running ones.

Among recent requests, short answers finish first. So the mean of the finished ones would drop whenever answers get
longer. The estimate of Kaplan and Meier (1958) also counts running answers, as "longer than n so far". It gives S(n),
the share of answers with more than n tokens. A request with n tokens is expected to reach
n + (the sum of S beyond n) / S(n).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from core.trace.traffic import SeenRequest

_LAST_KNOWN = 40  # latest requests per prompt length class
_LAST_PACES = 200  # latest requests over which the pace of tokens is averaged

_Curve = list[tuple[int, float]]  # (n, share of answers longer than n), ascending


def tokens_so_far(requests: Sequence[SeenRequest], *, now_s: float) -> list[int]:
    """Return the current answer length of each request; running ones are estimated from the recent token rate."""
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
    """Return the actual or predicted answer length of each request, at least 1.

    requests: in order of arrival.
    """
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
    """Compute the Kaplan-Meier curve. known: (tokens, answer is complete) per request."""
    curve, share, left = [(0, 1.0)], 1.0, len(known)
    for count, is_over in sorted(known, key=lambda one: (one[0], not one[1])):
        if is_over:
            share *= 1 - 1 / left
        left -= 1
        curve.append((count, share))
    return curve


def _expected(curve: _Curve, count: int) -> float:
    """Return the expected length of an answer with `count` tokens.

    Beyond the longest known answer, or if that one is still running, as many tokens again are expected.
    """
    last, rest = curve[-1]
    at = next((share for n, share in reversed(curve) if n <= count), 1.0)
    if count >= last or at <= 0:
        return 2.0 * count
    beyond = sum(
        share * (after - max(before, count)) for (before, share), (after, _) in pairwise(curve) if after > count
    )
    return count + (beyond + rest * last) / at
