"""Whether a prefill replica is to answer a request all by itself, because decode replicas are full. Pure.

Waiting has a price, as every other way has one: the seconds until a decode replica has room. A place there comes free
as streams end, one after another; whoever takes the next one lets everybody who waits come a place later. So what a
request costs by waiting is the time until as many streams have ended as wait, itself included. Beside that stands what
the answer costs on a prefill replica: its prompts are before it, and each of its steps delays whoever is there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from router.routing.policy import CandidateReplica, Option

_LONGEST_S = 3600.0


def wait_s(decodes: Sequence[CandidateReplica], *, num_tokens: int, answer_tokens: int, num_ends: int) -> float:
    """Until so many streams have ended on these replicas, which are full; an hour where none does.

    num_tokens: of a stream's context. answer_tokens: how long answers are; one that runs is anywhere in it.
    """
    per_s = sum(_ends_per_s(view, num_tokens=num_tokens, answer_tokens=answer_tokens) for view in decodes)
    return min(_LONGEST_S, num_ends / per_s) if per_s else _LONGEST_S


def cheapest(local_decode: Sequence[Option], pairs: Sequence[Option], *, wait_s: float) -> list[Option]:
    """All of them, the one to take first. guest: on prefill replicas alone, at once. pairs: what there is after a wait;
    where they cost as much, it is worth it."""
    waiting = [replace(option, wait_s=wait_s) for option in pairs]
    return sorted([*waiting, *local_decode], key=lambda option: option.cost_s)


def _ends_per_s(view: CandidateReplica, *, num_tokens: int, answer_tokens: int) -> float:
    timing = view.timing
    step_s = timing.base_s + (timing.token_s + timing.context_s * num_tokens) * view.num_streams
    return view.num_streams / (max(1, answer_tokens) * step_s) if step_s else math.inf
