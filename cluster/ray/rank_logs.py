"""The logs of ranks, from their own process or, where that is gone, from its node."""

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
    """life: None where the replica is gone. Raises DeployError."""
    if life is not None:
        with contextlib.suppress(ReplicaFailed, TimeoutError):
            return await life.read_log(rank, lines=lines, start=start)
    path = log_path(log_dir, replica, rank)
    try:
        return await read_there(home.node_id, path, lines=lines, start=start)
    except (RayError, TimeoutError) as error:
        raise DeployError(f"{replica}: its node no longer gives out {path}: {type(error).__name__}") from error
