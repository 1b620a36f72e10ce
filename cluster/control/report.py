"""What the controller says of its pools, as `cluster status --json` prints it: plain values."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from core.types.rank_api import Blocks


class RankReport(TypedDict):
    pid: int
    device: str  # "cpu", "cuda:0"


class ReplicaReport(TypedDict):
    id: str
    state: str  # a cluster.control.replica.ReplicaState
    node: str  # its name; "" before it is placed
    ranks: list[RankReport]
    blocks: Blocks
    running: int  # sequences
    waiting: int
    stage: str  # what it does at present, or waits for
    fraction: float  # of loading, 0 to 1
    revision: NotRequired[int]  # that has made it
    was: NotRequired[str]  # the id that it had in the other pool; empty: it has been what it is all its life


class FailureReport(TypedDict):
    """How a replica ended that should not have."""

    replica: str
    role: str
    state: str  # when it happened
    node: str
    reason: str
    will_repeat: bool  # another try will hardly end otherwise
    text: str  # all of it, in one line


class PoolReport(TypedDict):
    desired: int  # replicas
    ready: int
    replicas: list[ReplicaReport]  # those that start and drain included
    failures: list[FailureReport]  # the last few, the latest last
    failed_rounds: int  # of starting replicas, since one served
    has_given_up: bool


Pools = dict[str, PoolReport]  # by role


class UpdateReport(TypedDict):
    """An update under way."""

    revision: int  # to which it leads
    phase: str  # a cluster.rollout.update.Phase
    reason: str  # why it returns; "" while it does not
    roles: list[str]  # whose replicas are replaced
    share: float  # of the requests that go to that revision now
    step: str  # how far it has come, and what it waits for, in words


class RevisionReport(TypedDict):
    number: int  # of the spec
    update: UpdateReport | None
    last_update: str  # what became of the one before, in a line; "" where there was none


class ControllerReport(TypedDict):
    spec: dict[str, Any]  # as it is now, scaled since the operator wrote it
    pools: Pools
    revision: NotRequired[RevisionReport]
