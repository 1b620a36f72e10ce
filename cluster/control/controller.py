"""The controller: one detached Ray actor per deployment that keeps what lives equal to what is desired.

It holds nothing that it cannot find again: the desired state is in Ray's control store, the replicas are detached
actors and placement groups with names. So Ray may restart it at any time, on its head, and no request passes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from cluster.control import authority_store
from cluster.control import desired as desired_store
from cluster.control.authority_store import issue_identity
from cluster.control.desired import CONTROLLER, Desired, Parts
from cluster.control.gang import find_replicas, remove_leftovers
from cluster.control.key_keeper import KeyKeeper
from cluster.control.node_logs import RouterLogs, read_there
from cluster.control.operations import Operations
from cluster.control.person_book import PersonBook
from cluster.control.placement import ResourceDemand, check_fit, live_nodes
from cluster.control.remains import remove_remains
from cluster.control.replica import number_of, replica_id, role_of
from cluster.control.replica_life import ReplicaLife
from cluster.control.report import ControllerReport
from cluster.control.revision_teller import RevisionTeller
from cluster.control.role_pools import RolePools
from cluster.control.update import UpdateOptions
from cluster.control.updater import Updater
from cluster.process.log import LogPart, log_path, read_log, redirect_output
from cluster.words.api_key import ApiKey, KeyBook, KeyChange
from cluster.words.errors import ClusterError, DeployError, RankUnreachable, ReplicaFailed, SpecError
from cluster.words.launch import Launch
from cluster.words.papers import Certificate, Identity
from cluster.words.person import People, PersonRole
from cluster.words.process_name import ProcessName
from cluster.words.request import Role
from cluster.words.spec import MAX_REPLICAS, Spec
from cluster.words.spec_file import parse_spec

logger = logging.getLogger(__name__)

ACTOR_NAME = CONTROLLER
_ROUTER = "router"
_RECONCILE_S = 1.0
_ADOPT_S = 30.0  # `cluster status` waits for it


class Controller:
    """Every method is a coroutine on the actor's one event loop, which owns the pools and the desired state.

    What it raises is for the operator: SpecError or DeployError, one line.
    """

    async def __init__(self, name: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self._name = name
        self._desired = desired_store.load(name)
        if self._desired:
            redirect_output(_own_log(self._desired.launch.log_dir), who=ACTOR_NAME)
        self._keys = KeyKeeper(self._desired.launch) if self._desired else None
        self._changed = asyncio.Event()
        self._pools = {role: RolePools(role, changed=self._changed.set) for role in Role}
        self._updater = self._make_updater(self._desired) if self._desired else None
        self._has_adopted = asyncio.Event()
        self._router_logs = RouterLogs()
        self._people = PersonBook(name)
        self._operations: Operations | None = None
        self._identity: Identity | None = None  # to these people
        self._loop = asyncio.create_task(self._reconcile_forever())

    async def apply(self, launch: Launch, *, parts: Parts) -> None:
        """Make its spec the desired state. What it says of pools holds for replicas that start from now on."""
        if self._desired is None:
            redirect_output(_own_log(launch.log_dir), who=ACTOR_NAME)
            authority_store.prepare(launch.spec)
            await self._open_operations(launch)
            self._desired = Desired(launch=launch, parts=parts)
            self._keys = KeyKeeper(launch)
            self._updater = self._make_updater(self._desired)
        else:
            _check_same_model(self._desired.spec, launch.spec)
            self._desired = replace(self._desired, launch=replace(self._desired.launch, spec=launch.spec))
        self._desire_changed()

    async def status(self) -> ControllerReport:
        """After a restart: once it is known which replicas live on."""
        await self._has_adopted.wait()
        desired = self._known
        pools = {role.value: self._pools[role].report(desired.spec.pool(role).replicas) for role in Role}
        spec = desired.spec.model_dump(mode="json")
        return {"spec": spec, "pools": pools, "revision": self._updates.report(desired)}

    async def scale(self, replicas: dict[str, int], *, wait_for_nodes: bool = False) -> dict[str, tuple[int, int]]:
        """Change the size of the pools named; the others are not touched. Returns (before, after) of each.

        Raises DeployError, and changes nothing, when the nodes of today have no room, unless `wait_for_nodes`.
        """
        desired = self._known
        if desired.update:
            raise SpecError(f"an update to revision {desired.update.revision} is under way; scale when it is over")
        wanted = {Role(role): number for role, number in replicas.items()}
        if any(not 0 <= number <= MAX_REPLICAS for number in wanted.values()):
            raise SpecError(f"a pool has from 0 to {MAX_REPLICAS} replicas")  # a spec with more could not be read again
        before = {role: desired.spec.pool(role).replicas for role in wanted}
        if not wait_for_nodes:
            self._check_room({role: number - before[role] for role, number in wanted.items()})
        for role, number in wanted.items():
            desired.scale(role, number)
            self._pools[role].retry()
        self._desire_changed()
        return {role.value: (before[role], number) for role, number in wanted.items()}

    async def update(self, spec: dict[str, Any], options: UpdateOptions) -> bool:
        """Begin to turn the deployment into one of `spec`; False where nothing of it has to be replaced. Raises
        SpecError, or DeployError where there is no room; then nothing has changed."""
        await self._has_adopted.wait()
        self._updates.begin(self._known, parse_spec(spec), options)
        self._changed.set()
        return self._known.update is not None

    async def abort_update(self) -> int:
        """Take the update back that is under way; the revision that returns. Raises SpecError."""
        self._updates.abort(self._known, "an operator has taken it back")
        self._changed.set()
        return self._known.revision

    async def revisions(self) -> str:
        """The table that routers read in Redis, for one that starts."""
        await self._has_adopted.wait()
        return self._updates.tell(self._known).to_json()

    async def drain(self, replica: str) -> None:
        """Let one replica finish its work, or hand it over, and leave; a fresh one under a new id takes its place."""
        await self._has_adopted.wait()
        pool = self._pool_of(replica)
        if pool.get(replica) is None:
            raise SpecError(f"{replica} has left already")
        pool.retire(replica)
        self._changed.set()

    async def logs(self, replica: str, *, lines: int = 50, starts: dict[int, int] | None = None) -> dict[int, LogPart]:
        """The log of each rank: its last lines, or what follows byte `starts[rank]`. Also of a replica that is gone.

        "controller" is this process itself; "router" are the routers in the order in which they started, also
        those that are gone.
        """
        if replica == ACTOR_NAME:
            return {0: read_log(_own_log(self._known.launch.log_dir), lines=lines, start=(starts or {}).get(0))}
        if replica == _ROUTER:
            return await self._router_logs.read(self._known.launch.log_dir, lines=lines, starts=starts or {})
        await self._has_adopted.wait()
        home = self._pool_of(replica).home(replica)
        if home is None:
            raise DeployError(f"{replica} has not been placed on a node yet: there is no log")
        return {
            rank: await self._read_log(replica, rank, home.node_id, lines=lines, start=(starts or {}).get(rank))
            for rank in range(home.num_ranks)
        }

    async def certify(self, name: ProcessName, request: bytes) -> Certificate:
        """A certificate for this process of the deployment, which holds the key of `request`."""
        if name.deployment != self._name:
            raise SpecError(f"{name.uri} is no process of {self._name}")
        return authority_store.find(self._known.spec).issue(name, request)

    async def keys(self) -> KeyBook:
        """The API keys of clients; no secret is in it."""
        return self._key_keeper.book

    async def add_key(self, key: ApiKey) -> KeyChange:
        """Clients that show its secret are let in. Raises SpecError when its name is taken."""
        change = await self._key_keeper.add(key)
        logger.info("API key made key=%s name=%s tenant=%s told=%s", key.id, key.name, key.tenant, change.is_told)
        return change

    async def revoke_key(self, key: ApiKey) -> KeyChange:
        """Nobody is let in by this key any more."""
        change = await self._key_keeper.revoke(key)
        logger.info(
            "API key revoked key=%s name=%s tenant=%s told=%s problem=%s",
            key.id, key.name, key.tenant, change.is_told, change.problem,
        )  # fmt: skip
        return change

    async def people(self) -> People:
        """Who may operate by a certificate."""
        return self._people.people

    async def add_person(self, name: str, role: PersonRole, request: bytes, *, days: float) -> tuple[str, Certificate]:
        """Where this person may operate, and the certificate of the key of `request`. Raises SpecError."""
        return self._people.issue(self._known.spec, name, role, request, days=days)

    async def remove_person(self, name: str) -> None:
        """Nobody operates by this person's certificate any more. Raises SpecError."""
        self._people.remove(name)

    async def stop(self) -> None:
        """Remove every replica at once, and forget the deployment."""
        self._loop.cancel()
        if self._operations:
            await self._operations.close()
        await asyncio.gather(*(pool.stop() for pool in self._pools.values()))
        if self._keys:
            await self._keys.close()
        if self._updater:
            await self._updater.close()
        remove_remains(self._name)

    async def _reconcile_forever(self) -> None:
        while True:
            self._changed.clear()
            try:
                if not self._has_adopted.is_set():  # nothing may be started beside what lives
                    await self._adopt()
                self._reconcile()
                await self._serve_people()
            except Exception:  # an edge: Ray may be away, and without this loop nothing is ever replaced again
                logger.exception("the replicas are not looked after; trying again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RECONCILE_S):
                    await self._changed.wait()

    async def _adopt(self) -> None:
        """Take over what an earlier life of this controller started; remove what is not whole. Raises RayError, as when
        Ray has just come back itself; then none of it is being looked at any more."""
        found = sorted(find_replicas(self._name), key=number_of)  # they keep the order in which they were started
        lives = await asyncio.gather(*(self._adopt_one(replica) for replica in found), return_exceptions=True)
        if problems := [life for life in lives if isinstance(life, BaseException)]:
            raise problems[0]
        for life in lives:
            if isinstance(life, ReplicaLife):
                self._pools[life.view.role].add(life, self._known.make_of(life.view.id, life.view.role))
        self._has_adopted.set()

    async def _adopt_one(self, replica: str) -> ReplicaLife | None:
        try:
            if self._desired is None:
                raise ReplicaFailed("nothing is desired")
            life = ReplicaLife(replica, self._desired.as_made(replica, role_of(replica)))
            async with asyncio.timeout(_ADOPT_S):
                while not await _is_reached(life):
                    await asyncio.sleep(_RECONCILE_S)
        except (ReplicaFailed, TimeoutError) as error:
            logger.warning("%s is removed, not adopted: %s", replica, error)
            remove_leftovers(replica, self._name)
            return None
        logger.info("%s is adopted", replica)
        return life

    def _reconcile(self) -> None:
        if (desired := self._desired) is None:
            return
        for role, goals in self._updates.goals(desired).items():
            self._pools[role].reconcile(goals, functools.partial(self._new_id, role))
        self._updates.tell(desired)

    async def _serve_people(self) -> None:
        if self._desired and not self._operations:
            try:
                await self._open_operations(self._desired.launch)
            except ClusterError as error:
                logger.warning("people with certificates are not served; trying again: %s", error)

    async def _open_operations(self, launch: Launch) -> None:
        """Serve people with certificates, if the spec says so. Raises SpecError, DeployError."""
        if address := launch.spec.security.operators:
            trail = Path(launch.log_dir).with_name("trail") / "commands.jsonl"
            name = ProcessName.of_controller(self._name)
            self._identity = self._identity or issue_identity(launch.spec, name)
            self._operations = await Operations.open(self, self._people, address, self._identity, trail=trail)

    def _new_id(self, role: Role, make: int) -> str:
        """An id that no replica has had, for one that this revision makes. Stored before it is used, so that this holds
        across restarts."""
        replica = replica_id(role, self._known.take_number(role))
        if make != self._known.makes[role]:
            self._known.made[replica] = make
        desired_store.save(self._known)
        return replica

    def _make_updater(self, desired: Desired) -> Updater:
        return Updater(self._pools, teller=RevisionTeller(desired.launch), save=lambda: desired_store.save(self._known))

    def _check_room(self, more: dict[Role, int]) -> None:
        nodes = live_nodes()
        if min(more.values(), default=0) < 0 or any(pool.num_draining for pool in self._pools.values()):
            nodes = [replace(node, available=node.total) for node in nodes]  # room is being made; who knows where
        check_fit(
            [ResourceDemand(role, self._known.spec.pool(role), max(number, 0)) for role, number in more.items()], nodes
        )

    def _pool_of(self, replica: str) -> RolePools:
        """The pool to which a replica belongs, or has belonged. Raises SpecError for any other name."""
        for pool in self._pools.values():
            if pool.get(replica) is not None or pool.home(replica) is not None:
                return pool
        known = ", ".join(replica for pool in self._pools.values() for replica in pool.ids)
        raise SpecError(f"no replica is called {replica}; there are: {known or 'none'}")

    async def _read_log(self, replica: str, rank: int, node_id: str, *, lines: int, start: int | None) -> LogPart:
        life = self._pools[role_of(replica)].get(replica)
        if life is not None:
            with contextlib.suppress(ReplicaFailed, TimeoutError):
                return await life.read_log(rank, lines=lines, start=start)
        path = log_path(self._known.launch.log_dir, replica, rank)
        try:
            return await read_there(node_id, path, lines=lines, start=start)
        except (RayError, TimeoutError) as error:
            raise DeployError(f"{replica}: its node no longer gives out {path}: {type(error).__name__}") from error

    def _desire_changed(self) -> None:
        desired_store.save(self._known)
        self._changed.set()

    @property
    def _key_keeper(self) -> KeyKeeper:
        if self._keys is None:
            raise DeployError(f"{self._name}: nothing has been deployed yet")
        return self._keys

    @property
    def _updates(self) -> Updater:
        if self._updater is None:
            raise DeployError(f"{self._name}: nothing has been deployed yet")
        return self._updater

    @property
    def _known(self) -> Desired:
        if self._desired is None:
            raise DeployError(f"{self._name}: nothing has been deployed yet")
        return self._desired


def _check_same_model(old: Spec, new: Spec) -> None:
    """What every replica must agree on cannot change while some of them live."""
    for section in ("name", "model", "kv", "index", "security"):
        if getattr(old, section) != getattr(new, section):
            raise SpecError(f"{section}: cannot change while deployed; take {old.name} down first")


async def _is_reached(life: ReplicaLife) -> bool:
    """Adopt it, unless the network is in the way: that may be for a moment, as where this host has just come back."""
    try:
        await life.adopt()
    except (RankUnreachable, TimeoutError) as error:
        logger.warning("%s serves, perhaps: %s", life.view.id, str(error) or "it does not answer")
        return False
    return True


def _own_log(log_dir: str) -> Path:
    return Path(log_dir) / f"{ACTOR_NAME}.log"
