"""Processes of one deployment on this machine, and the deployment's status."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.control.replica import Pools
from cluster.launch import driver
from cluster.launch.state import State
from cluster.launch.status import DeploymentReport, read_status
from cluster.rollout.update import UpdateOptions
from core.process import processes
from core.types.errors import ClusterError, DeployError, SpecError
from core.types.request import Role

_TITLES = {"controller": "ray::Controller", "router": "ray::ServeReplica", "index": "ray::EmbeddedIndex"}


@dataclass(frozen=True)
class Target:
    """Process that a fault may target."""

    # Display name: decode-1/0, controller.
    name: str
    pid: int

    @property
    def replica(self) -> str:
        """Replica of a rank; for other processes the name itself."""
        return self.name.partition("/")[0]

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process is gone."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass


class Site:
    """Lookup of processes and status. Raises SpecError if the deployment does not run entirely on this machine."""

    def __init__(self, state: State, controller: Any) -> None:
        if state.local_ray is None:
            raise SpecError(f"{state.name} runs on a shared Ray; chaos needs a deployment with a local Ray")
        self._state = state
        self._controller = controller
        self._mark = state.local_ray.mark

    async def status(self) -> DeploymentReport | None:
        """Return the content of `cluster status`, or None if the controller does not answer."""
        try:
            return await asyncio.to_thread(read_status, self._state, self._controller)
        except ClusterError:
            return None

    async def ranks(self, role: Role) -> list[Target]:
        """Return every rank of every serving replica of a pool."""
        status = await self.status()
        replicas = status["pools"][role.value]["replicas"] if status else []
        return [
            Target(f"{replica['id']}/{number}", rank["pid"])
            for replica in replicas
            if replica["state"] == "ready"
            for number, rank in enumerate(replica["ranks"])
        ]

    async def size(self, role: Role) -> int:
        """Return a pool's number of replicas, including starting and draining ones; 0 if the controller does not
        answer."""
        status = await self.status()
        return len(status["pools"][role.value]["replicas"]) if status else 0

    async def scale(self, sizes: Mapping[Role, int]) -> None:
        """Run `cluster scale` with the number of replicas of these pools. Raises ClusterError."""
        named = {role.value: count for role, count in sizes.items()}
        await asyncio.to_thread(driver.ask, self._controller, "scale", named)

    async def switch(self, replica: str) -> str:
        """Run `cluster switch`. Returns the replica's new id. Raises ClusterError."""
        successor: str = await asyncio.to_thread(driver.ask, self._controller, "switch", replica)
        return successor

    async def update(self) -> bool:
        """Start `cluster update --restart`, which replaces all replicas.

        Returns False if there is no room. Raises ClusterError.
        """
        status = await asyncio.to_thread(driver.ask, self._controller, "status")
        options = UpdateOptions(restarts_all=True)
        try:
            await asyncio.to_thread(driver.ask, self._controller, "update", status["spec"], options)
        except (DeployError, SpecError):
            return False
        return True

    async def is_updating(self) -> bool:
        """Return whether an update is running; True if the controller does not answer."""
        status = await self.status()
        return status is None or status["revision"]["update"] is not None

    def named(self, part: str) -> list[Target]:
        """Return the processes of the controller, the router or the index actor, by Ray's process titles."""
        return [
            Target(part, pid) for pid in processes.marked(self._mark) if processes.title(pid).startswith(_TITLES[part])
        ]

    def redis(self) -> list[Target]:
        """Return the embedded Redis as a child of the index actor: it overwrites the environment that had our mark."""
        return [Target("redis", pid) for actor in self.named("index") for pid in processes.children(actor.pid)]

    def memory(self, pools: Pools) -> dict[str, int]:
        """Return resident bytes by process name and pid, for our processes and the ranks in `pools`."""
        ranks = [
            Target(f"{replica['id']}/{number}", rank["pid"])
            for pool in pools.values()
            for replica in pool["replicas"]
            for number, rank in enumerate(replica["ranks"])
        ]
        targets = [*ranks, *self.named("controller"), *self.named("router"), *self.redis()]
        return {f"{target.name} ({target.pid})": _resident_bytes(target.pid) for target in targets}


def leaked_blocks(pools: Pools) -> dict[str, int]:
    """Return the blocks that idle replicas still hold, by replica, without zeros."""
    found = {}
    for pool in pools.values():
        for replica in pool["replicas"]:
            blocks = replica["blocks"]
            if held := blocks["total"] - blocks["free"] - blocks["cached"]:
                found[replica["id"]] = held
    return found


def _resident_bytes(pid: int) -> int:
    """Return the resident memory in bytes; 0 if the process has exited."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
