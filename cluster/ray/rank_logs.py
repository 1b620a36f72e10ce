"""Logs of ranks, read through their process or, if it has ended, on its node."""

from __future__ import annotations

import contextlib

from ray.exceptions import RayError

from cluster.control.gang import Home
from cluster.control.replica_lifecycle import ReplicaLifecycle
from cluster.ray.node_logs import read_there
from core.process.log import LogPart, log_path
from core.types.errors import DeployError, ReplicaFailed


async def read_rank(
    life: ReplicaLifecycle | None, log_dir: str, replica: str, rank: int, home: Home, *, lines: int, start: int | None
) -> LogPart:
    """Read a rank's log. life: None if the replica has left. Raises DeployError."""
    if life is not None:
        with contextlib.suppress(ReplicaFailed, TimeoutError):
            return await life.read_log(rank, lines=lines, start=start)
    path = log_path(log_dir, replica, rank)
    try:
        return await read_there(home.node_id, path, lines=lines, start=start)
    except (RayError, TimeoutError) as error:
        raise DeployError(f"{replica}: cannot read {path} on its node: {type(error).__name__}") from error
