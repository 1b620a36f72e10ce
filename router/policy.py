"""Which pair serves a request: the one whose predicted cost, in seconds, is least. Pure.

    through a prefill replica P and a decode replica D
        queue + compute   (queued tokens of P + uncached prompt tokens) / P's rate
        + transfer        bytes that D lacks / link rate
        + decode          _HORIZON steps of D with one more stream, and waiting for blocks if D has too few

    on D alone, where the uncached part is short or there is no P
        queue + compute   (queued tokens of D + uncached prompt tokens) / D's rate
        + stall           the same time once more for each stream that waits meanwhile
        + decode

Rates are the replicas' own measurements; what nobody has measured yet is taken from the others, or from the defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_HORIZON = 64  # tokens of an answer for which the load on a decode replica counts
_FREE_STREAMS = 4  # so many streams share a step before it becomes noticeably longer

_DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
_DEFAULT_STEP_S = 0.02
_DEFAULT_LINK_BYTES_PER_S = 1e9


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """What the choice knows of one replica. Rates are 0 where nothing was measured yet."""

    replica: str
    cached_tokens: int  # leading tokens of this prompt that it holds
    queued_tokens: int
    num_streams: int  # running and waiting sequences
    num_blocks: int  # in all
    available_blocks: int  # free, or cached and unused
    prefill_tokens_per_s: float
    step_s: float
    link_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What the choice knows of the request."""

    num_tokens: int
    block_size: int
    bytes_per_token: int  # of KV on the wire
    max_local_tokens: int  # uncached tokens that a decode replica may compute itself


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to serve the request, and what it is predicted to cost, in seconds."""

    prefill: str | None  # None: the decode replica computes the prompt itself
    decode: str
    compute_s: float
    transfer_s: float
    stall_s: float
    decode_s: float

    @property
    def cost_s(self) -> float:
        return self.compute_s + self.transfer_s + self.stall_s + self.decode_s


def options(demand: Demand, prefills: Sequence[ReplicaView], decodes: Sequence[ReplicaView]) -> list[Option]:
    """Every way to serve the request, cheapest first. Equal costs keep the order of the replicas given."""
    rate = _known([view.prefill_tokens_per_s for view in (*prefills, *decodes)], _DEFAULT_PREFILL_TOKENS_PER_S)
    link = _known([view.link_bytes_per_s for view in prefills], _DEFAULT_LINK_BYTES_PER_S)
    found = []
    for decode in decodes:
        if not prefills or _uncached(demand, decode) <= demand.max_local_tokens:
            found.append(_alone(demand, decode, rate=decode.prefill_tokens_per_s or rate))
        for prefill in prefills:
            option = Option(
                prefill=prefill.replica,
                decode=decode.replica,
                compute_s=_compute_s(demand, prefill, rate=prefill.prefill_tokens_per_s or rate),
                transfer_s=_uncached(demand, decode) * demand.bytes_per_token / (prefill.link_bytes_per_s or link),
                stall_s=0.0,
                decode_s=_decode_s(demand, decode),
            )
            found.append(option)
    return sorted(found, key=lambda option: option.cost_s)


def _alone(demand: Demand, decode: ReplicaView, *, rate: float) -> Option:
    compute_s = _compute_s(demand, decode, rate=rate)
    return Option(
        prefill=None,
        decode=decode.replica,
        compute_s=compute_s,
        transfer_s=0.0,
        stall_s=_uncached(demand, decode) / rate * decode.num_streams,
        decode_s=_decode_s(demand, decode),
    )


def _compute_s(demand: Demand, view: ReplicaView, *, rate: float) -> float:
    # The last token is computed even where all of the prompt is cached: its logits are wanted.
    return (view.queued_tokens + max(1, _uncached(demand, view))) / rate


def _decode_s(demand: Demand, view: ReplicaView) -> float:
    step_s = view.step_s or _DEFAULT_STEP_S
    slower = (view.num_streams + 1 + _FREE_STREAMS) / (view.num_streams + _FREE_STREAMS)
    missing = -(-(_uncached(demand, view) + 1) // demand.block_size) - view.available_blocks
    # Blocks come back as streams end: each missing one is a share of a stream's remaining life.
    waiting_s = max(0, missing) / view.num_blocks * max(1, view.num_streams) * _HORIZON * step_s
    crowding_s = view.num_streams * step_s / _FREE_STREAMS
    return _HORIZON * step_s * slower + waiting_s + crowding_s


def _uncached(demand: Demand, view: ReplicaView) -> int:
    return max(0, demand.num_tokens - view.cached_tokens)


def _known(values: Sequence[float], default: float) -> float:
    """The mean of what was measured."""
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else default
