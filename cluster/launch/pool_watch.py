"""Waiting for pools to become ready, with progress reports."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

from cluster.control.report import FailureReport, PoolReport, Pools, Reporter
from cluster.launch.driver import ask
from core.types.errors import ClusterError, DeployError, ReplicaDidNotStart

_POLL_S = 0.25
_LOG_LINES = 20
# A killed process may have been bad luck once.
_MAX_FAILED_ROUNDS = 2


def await_ready(
    controller: Any, roles: Iterable[str], *, deadline: float, reporter: Reporter, known_failures: Collection[str] = ()
) -> Pools:
    """Wait until the pools of `roles` have exactly the desired replicas, all ready. Returns all pools.

    Raises ReplicaDidNotStart for a failure outside `known_failures` (replica ids), and DeployError at the deadline
    (time.monotonic()), with the replicas that are not ready.
    """
    roles = tuple(roles)
    pools: Pools = ask(controller, "status")["pools"]
    while not all(_is_settled(pools[role]) for role in roles):
        reporter.show(pools)
        for role in roles:
            if failure := _final_failure(pools[role], known_failures):
                raise ReplicaDidNotStart(failure["text"], log=_log_of(controller, failure["replica"]))
        if time.monotonic() > deadline:
            raise DeployError(f"not done in time; {_awaited(pools)}")
        time.sleep(_POLL_S)
        pools = ask(controller, "status")["pools"]
    reporter.show(pools)
    return pools


def _is_settled(pool: PoolReport) -> bool:
    return pool["ready"] == pool["desired"] == len(pool["replicas"])


def _final_failure(pool: PoolReport, known: Collection[str]) -> FailureReport | None:
    for failure in (failure for failure in pool["failures"] if failure["replica"] not in known):
        if failure["will_repeat"] or pool["failed_rounds"] >= _MAX_FAILED_ROUNDS:
            return failure
    return None


def _log_of(controller: Any, replica: str) -> str:
    try:
        parts = ask(controller, "logs", replica, lines=_LOG_LINES)
    except ClusterError as error:
        return f"({error})"
    return "".join(parts[rank].text for rank in sorted(parts))


def _awaited(pools: Pools) -> str:
    waiting = [
        f"{replica['id']} is {replica['state']}" + (f" ({replica['stage']})" if replica["stage"] else "")
        for pool in pools.values()
        for replica in pool["replicas"]
        if replica["state"] != "ready"
    ]
    return "; ".join(waiting) or "a failed replica waits for its next attempt"
