"""Whether a replica would take up one more request at once, or only let it wait there instead of here. Pure.

A request waits in the router as long as it can: there it keeps its place by priority and tenant, and can still go to
whichever replica is free first. The blocks that it is predicted to need are promised to it for as long as it is there.
"""

from __future__ import annotations

from router.routing.replica_load import ReplicaLoad

_MAX_BACKLOG_S = 1.0  # so much work in hand keeps a prefill replica busy until it has told us of its progress
_DEFAULT_TOKENS_PER_S = 1000.0
_DEFAULT_ANSWER = 64.0  # tokens, before any answer was seen
_WEIGHT = 0.05  # of the newest answer


def decode_has_room(load: ReplicaLoad, *, num_blocks: int, num_streams: int) -> bool:
    """An idle replica has room for everything; what does not fit at all is refused elsewhere."""
    streams = max(load.num_told_streams, load.promised_streams)
    if not streams:
        return True
    used = max(load.num_blocks - load.available_blocks, load.promised_blocks)
    fits = used + num_blocks <= load.num_blocks and streams + num_streams <= load.max_streams
    return fits and not load.num_waiting


def prefill_has_room(load: ReplicaLoad) -> bool:
    return load.queued_tokens <= _MAX_BACKLOG_S * (load.prefill_tokens_per_s or _DEFAULT_TOKENS_PER_S)


class AnswerLength:
    """How long answers have been lately, in tokens: the mean, where a recent one weighs more."""

    def __init__(self) -> None:
        self._mean = _DEFAULT_ANSWER

    def add(self, num_tokens: int) -> None:
        self._mean += _WEIGHT * (num_tokens - self._mean)

    def predict(self, max_tokens: int) -> int:
        """Of a request that may have so many."""
        return max(1, min(max_tokens, round(self._mean)))
