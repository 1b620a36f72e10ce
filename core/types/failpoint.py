"""Failpoints: stages of requests and handoffs at which a test can observe, stop or kill a replica.

Only tests install one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class FailpointStage(StrEnum):
    """Stage at which a failpoint is called, on the thread that reaches it and before any other notification."""

    QUEUED = "queued"  # a replica accepted a request
    COMPUTING = "computing"  # a rank is about to compute a batch; id is empty
    SAMPLED = "sampled"  # rank 0 sampled tokens; id is empty
    OPENED = "opened"  # a handoff accepts writes on this rank
    LANDED = "landed"  # a handoff is complete on this rank
    ASKED = "asked"  # a replica received a request for a prefix
    SERVING_FETCH = "serving_fetch"  # a replica pinned the requested prefix and is about to ship it
    SENDING = "sending"  # a payload is being written to the wire
    COMMITTING = "committing"  # all payloads of a transfer are on a wire
    SHIPPED = "shipped"  # the transfer landed at every rank that this rank sends to
    FAILED = "failed"  # the transfer failed for good


Failpoint = Callable[[FailpointStage, str], None]  # (stage, id of the request or handoff)


def unobserved(stage: FailpointStage, id: str) -> None:
    """Do nothing: the failpoint of a replica outside tests."""
