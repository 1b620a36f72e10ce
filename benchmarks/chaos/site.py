"""The processes of one deployment on this machine, and what the deployment says of itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.control.report import Pools
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
    """A process that a fault may strike."""

    name: str  # for people: decode-1/0, controller
    pid: int

    @property
    def replica(self) -> str:
        """The replica whose rank this is; what is no rank is its own."""
        return self.name.partition("/")[0]

    def send(self, number: signal.Signals) -> None:
        """A signal; nothing happens to one that is gone."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass


class Site:
    """Looks things up; strikes nothing. Raises SpecError for a deployment whose processes are not all our own, here."""

    def __init__(self, state: State, controller: Any) -> None:
        if state.local_ray is None:
            raise SpecError(
                f"{state.name} runs on a Ray that is not its own: chaos only strikes what is all on this machine"
            )
        self._state = state
        self._controller = controller
        self._mark = state.local_ray.mark

    async def status(self) -> DeploymentReport | None:
        """`cluster status`; None while the controller does not answer."""
        try:
            return await asyncio.to_thread(read_status, self._state, self._controller)
        except ClusterError:
            return None

    async def ranks(self, role: Role) -> list[Target]:
        """Every rank of every replica of a pool that serves."""
        status = await self.status()
        replicas = status["pools"][role.value]["replicas"] if status else []
        return [
            Target(f"{replica['id']}/{number}", rank["pid"])
            for replica in replicas
            if replica["state"] == "ready"
            for number, rank in enumerate(replica["ranks"])
        ]

    async def size(self, role: Role) -> int:
        """How many replicas a pool has, those that drain or start included; 0 while the controller does not answer."""
        status = await self.status()
        return len(status["pools"][role.value]["replicas"]) if status else 0

    async def scale(self, sizes: Mapping[Role, int]) -> None:
        """`cluster scale`: how many replicas these pools are to have. Raises ClusterError."""
        named = {role.value: count for role, count in sizes.items()}
        await asyncio.to_thread(driver.ask, self._controller, "scale", named)

    async def switch(self, replica: str) -> str:
        """`cluster switch`: what the replica will be called. Raises ClusterError."""
        successor: str = await asyncio.to_thread(driver.ask, self._controller, "switch", replica)
        return successor

    async def update(self) -> bool:
        """Begin `cluster update --restart`: all replicas are replaced by others of the same spec; False where there is
        no room for that. Raises ClusterError."""
        status = await asyncio.to_thread(driver.ask, self._controller, "status")
        options = UpdateOptions(restarts_all=True)
        try:
            await asyncio.to_thread(driver.ask, self._controller, "update", status["spec"], options)
        except (DeployError, SpecError):
            return False
        return True

    async def is_updating(self) -> bool:
        """Also while the controller does not answer."""
        status = await self.status()
        if status is None:
            return True
        revision = status.get("revision")
        return revision is not None and revision["update"] is not None

    def named(self, part: str) -> list[Target]:
        """The controller, the router or the index's actor, as Ray titles its processes."""
        return [
            Target(part, pid) for pid in processes.marked(self._mark) if processes.title(pid).startswith(_TITLES[part])
        ]

    def redis(self) -> list[Target]:
        """The embedded Redis: the child of the index's actor. It overwrites its own environment, and so its mark."""
        return [Target("redis", pid) for actor in self.named("index") for pid in processes.children(actor.pid)]

    def memory(self, pools: Pools) -> dict[str, int]:
        """Resident bytes of every process of ours, by name and pid; of the ranks in `pools`."""
        ranks = [
            Target(f"{replica['id']}/{number}", rank["pid"])
            for pool in pools.values()
            for replica in pool["replicas"]
            for number, rank in enumerate(replica["ranks"])
        ]
        targets = [*ranks, *self.named("controller"), *self.named("router"), *self.redis()]
        return {f"{target.name} ({target.pid})": processes.resident_bytes(target.pid) for target in targets}


def leaked_blocks(pools: Pools) -> dict[str, int]:
    """Blocks that idle replicas still hold, by replica; those that hold none are left out."""
    found = {}
    for pool in pools.values():
        for replica in pool["replicas"]:
            blocks = replica["blocks"]
            if held := blocks["total"] - blocks["free"] - blocks["cached"]:
                found[replica["id"]] = held
    return found
