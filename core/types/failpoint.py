"""Where somebody may look on, or step in, while a replica works: how far its requests and handoffs have come.

Tests kill a process, stop it, or wait for it at one of these; nothing else asks.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class FailpointStage(StrEnum):
    """Told before anybody else hears of it, on whatever thread brings it about."""

    QUEUED = "queued"  # a request is known to a replica
    COMPUTING = "computing"  # a rank is about to compute a batch; with no id
    SAMPLED = "sampled"  # tokens are known on rank 0; with no id
    OPENED = "opened"  # a handoff may be written to on this rank
    LANDED = "landed"  # it is whole on this rank
    ASKED = "asked"  # a replica is asked for a prefix
    SERVING_FETCH = "granted"  # it holds what it has of that, and is about to ship it
    SENDING = "sending"  # a payload is put on the wire
    COMMITTING = "committing"  # all payloads of a passage are on a wire
    SHIPPED = "shipped"  # it has landed at every rank that this rank sends to
    FAILED = "failed"  # or it has not, and never will


Failpoint = Callable[[FailpointStage, str], None]  # the id of the request or handoff comes along


def unobserved(stage: FailpointStage, id: str) -> None:
    """The probe of a replica that nobody looks at."""
