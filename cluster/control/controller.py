"""The controller: one detached Ray actor per deployment that keeps what lives equal to what is desired.

It holds nothing that it cannot find again: the desired state is in Ray's control store, the replicas are detached
actors and placement groups with names. So Ray may restart it anywhere at any time, and no request passes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.control import desired as desired_store
from cluster.control.desired import Desired, Parts
from cluster.control.gang import find_replicas, remove_leftovers
from cluster.control.placement import ResourceDemand, check_fit, live_nodes
from cluster.control.pool import ReplicaPool
from cluster.control.replica import replica_id, role_of
from cluster.control.replica_life import ReplicaLife
from cluster.control.report import ControllerReport
from cluster.process.log import LogPart, log_path, read_log, redirect_output
from cluster.words.errors import DeployError, ReplicaFailed, SpecError
from cluster.words.request import Role
from cluster.words.spec import Spec
from cluster.words.spec_file import parse_spec

logger = logging.getLogger(__name__)

ACTOR_NAME = "controller"
_ROUTER = "router"
_RECONCILE_S = 1.0
_ADOPT_S = 15.0
_READ_LOG_S = 30.0  # a process may have to start on the node first


class Controller:
    """Every method is a coroutine on the actor's one event loop, which owns the pools and the desired state.

    What it raises is for the operator: SpecError or DeployError, one line.
    """

    async def __init__(self, name: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self._name = name
        self._desired = desired_store.load(name)
        if self._desired:
            redirect_output(_own_log(self._desired.log_dir), who=ACTOR_NAME)
        self._changed = asyncio.Event()
        self._pools = {role: ReplicaPool(role, changed=self._changed.set) for role in Role}
        self._loop = asyncio.create_task(self._reconcile_forever())

    async def apply(self, spec: dict[str, Any], *, index_url: str, log_dir: str, parts: Parts) -> None:
        """Make `spec` the desired state. What it says of pools holds for replicas that start from now on."""
        new = parse_spec(spec)
        if self._desired is None:
            redirect_output(_own_log(log_dir), who=ACTOR_NAME)
            self._desired = Desired(spec=new, index_url=index_url, log_dir=log_dir, parts=parts)
        else:
            _check_same_model(self._desired.spec, new)
            self._desired = replace(self._desired, spec=new)
        self._desire_changed()

    async def status(self) -> ControllerReport:
        desired = self._known
        pools = {role.value: self._pools[role].report(desired.spec.pool(role).replicas) for role in Role}
        return {"spec": desired.spec.model_dump(mode="json"), "pools": pools}

    async def scale(self, replicas: dict[str, int], *, wait_for_nodes: bool = False) -> dict[str, tuple[int, int]]:
        """Change the size of the pools named; the others are not touched. Returns (before, after) of each.

        Raises DeployError, and changes nothing, when the nodes of today have no room, unless `wait_for_nodes`.
        """
        desired = self._known
        wanted = {Role(role): number for role, number in replicas.items()}
        before = {role: desired.spec.pool(role).replicas for role in wanted}
        if not wait_for_nodes:
            self._check_room({role: number - before[role] for role, number in wanted.items()})
        for role, number in wanted.items():
            desired.scale(role, number)
            self._pools[role].retry()
        self._desire_changed()
        return {role.value: (before[role], number) for role, number in wanted.items()}

    async def drain(self, replica: str) -> None:
        """Let one replica finish its work and leave; a fresh one under a new id takes its place in the pool."""
        pool = self._pool_of(replica)
        if pool.get(replica) is None:
            raise SpecError(f"{replica} has left already")
        pool.retire(replica)
        self._changed.set()

    async def logs(self, replica: str, *, lines: int = 50, starts: dict[int, int] | None = None) -> dict[int, LogPart]:
        """The log of each rank: its last lines, or what follows byte `starts[rank]`. Also of a replica that is gone.

        "controller" is this process itself; "router" are the routers on its node in the order in which they started,
        also those that are gone.
        """
        if replica in (ACTOR_NAME, _ROUTER):
            paths = self._control_logs(replica)
            return {i: read_log(path, lines=lines, start=(starts or {}).get(i)) for i, path in enumerate(paths)}
        home = self._pool_of(replica).home(replica)
        if home is None:
            raise DeployError(f"{replica} has not been placed on a node yet: there is no log")
        return {
            rank: await self._read_log(replica, rank, home.node_id, lines=lines, start=(starts or {}).get(rank))
            for rank in range(home.num_ranks)
        }

    async def stop(self) -> None:
        """Remove every replica at once, and forget the deployment."""
        self._loop.cancel()
        await asyncio.gather(*(pool.stop() for pool in self._pools.values()))
        for replica in find_replicas(self._name):
            remove_leftovers(replica, self._name)
        desired_store.forget(self._name)

    async def _reconcile_forever(self) -> None:
        await self._adopt()
        while True:
            self._changed.clear()
            try:
                self._reconcile()
            except RayError:
                logger.exception("Ray did not do as asked; trying again")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _RECONCILE_S)

    async def _adopt(self) -> None:
        """Take over what an earlier life of this controller started; remove what is not whole."""
        for replica in find_replicas(self._name):
            try:
                if self._desired is None:
                    raise ReplicaFailed("nothing is desired")
                life = ReplicaLife(replica, self._desired)
                await asyncio.wait_for(life.adopt(), _ADOPT_S)
            except (ReplicaFailed, TimeoutError) as error:
                logger.warning("%s is removed, not adopted: %s", replica, error)
                remove_leftovers(replica, self._name)
            else:
                logger.info("%s is adopted", replica)
                self._pools[life.view.role].add(life)

    def _reconcile(self) -> None:
        if (desired := self._desired) is None:
            return
        for role, pool in self._pools.items():
            pool.reconcile(desired, functools.partial(self._new_id, role))

    def _new_id(self, role: Role) -> str:
        """An id that no replica has had. Stored before it is used, so that this holds across restarts."""
        number = self._known.take_number(role)
        desired_store.save(self._known)
        return replica_id(role, number)

    def _check_room(self, more: dict[Role, int]) -> None:
        nodes = live_nodes()
        if min(more.values(), default=0) < 0 or any(pool.num_draining for pool in self._pools.values()):
            nodes = [replace(node, available=node.total) for node in nodes]  # room is being made; who knows where
        check_fit(
            [ResourceDemand(role, self._known.spec.pool(role), max(number, 0)) for role, number in more.items()], nodes
        )

    def _pool_of(self, replica: str) -> ReplicaPool:
        """The pool to which a replica belongs, or has belonged. Raises SpecError for any other name."""
        for pool in self._pools.values():
            if pool.get(replica) is not None or pool.home(replica) is not None:
                return pool
        known = ", ".join(replica for pool in self._pools.values() for replica in pool.ids)
        raise SpecError(f"no replica is called {replica}; there are: {known or 'none'}")

    def _control_logs(self, name: str) -> list[Path]:
        log_dir = self._known.log_dir
        if name == ACTOR_NAME:
            return [_own_log(log_dir)]
        return sorted(Path(log_dir).glob(f"{_ROUTER}-*.log"))

    async def _read_log(self, replica: str, rank: int, node_id: str, *, lines: int, start: int | None) -> LogPart:
        life = self._pools[role_of(replica)].get(replica)
        if life is not None:
            with contextlib.suppress(ReplicaFailed, TimeoutError):
                return await life.read_log(rank, lines=lines, start=start)
        path = log_path(self._known.log_dir, replica, rank)
        read: Any = ray.remote(num_cpus=0, max_retries=0)(read_log)
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        call = read.options(scheduling_strategy=on_node).remote(path, lines=lines, start=start)
        try:
            part: LogPart = await asyncio.wait_for(call, _READ_LOG_S)
        except (RayError, TimeoutError) as error:
            raise DeployError(f"{replica}: its node no longer gives out {path}: {type(error).__name__}") from error
        return part

    def _desire_changed(self) -> None:
        desired_store.save(self._known)
        self._changed.set()

    @property
    def _known(self) -> Desired:
        if self._desired is None:
            raise DeployError(f"{self._name}: nothing has been deployed yet")
        return self._desired


def _check_same_model(old: Spec, new: Spec) -> None:
    """What every replica must agree on cannot change while some of them live."""
    for section in ("name", "model", "kv", "index"):
        if getattr(old, section) != getattr(new, section):
            raise SpecError(f"{section}: cannot change while deployed; take {old.name} down first")


def _own_log(log_dir: str) -> Path:
    return Path(log_dir) / f"{ACTOR_NAME}.log"
