"""The controller: one detached Ray actor per deployment that reconciles running replicas with the desired state.

It keeps no state that it cannot recover: the desired state is in Ray's control store, and replicas are named detached
actors and placement groups. So Ray may restart it at any time, on the head, and no request passes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from pathlib import Path
from typing import Any, TypeVar

from cluster.control import desired_state as desired_store
from cluster.control.autoscaling import AutoscaleReport, Autoscaling
from cluster.control.desired_state import Desired, Parts
from cluster.control.gang import find_replicas, remove_leftovers
from cluster.control.key_registry import KeyKeeper
from cluster.control.placement import check_room
from cluster.control.pool import ReplicaPool, life_of, pool_of
from cluster.control.replica import ControllerReport, replica_id
from cluster.control.replica_lifecycle import adopt_all
from cluster.control.role_switches import RoleSwitches
from cluster.control.traffic import CaptureReport, TrafficCapture, TrafficLog, capture_file, ignore
from cluster.ray import store
from cluster.ray.node_logs import RouterLogs, read_rank
from cluster.ray.store import CONTROLLER, namespace
from cluster.rollout.revision_reporter import RevisionReporter
from cluster.rollout.update import UpdateOptions
from cluster.rollout.updater import Updater
from core.identity.authority import Authority
from core.identity.credentials import Certificate
from core.identity.process_name import ProcessName
from core.process.log import LogPart, read_log, redirect_output
from core.spec.loader import parse_spec
from core.spec.schema import MAX_REPLICAS, AutoscaleSpec, Spec
from core.trace.traffic import TrafficAnswer, TrafficReport
from core.types.api_key import ApiKey, KeyChange, KeyRegistry
from core.types.errors import DeployError, SpecError
from core.types.launch import Launch
from core.types.request import Role

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_ROUTER, _AUTHORITY = "router", "authority"
_RECONCILE_S = 1.0


class Controller:
    """Control plane of one deployment.

    Its methods are coroutines on one event loop, which owns the pools and the state.

    Operator errors are SpecError or DeployError, with a one-line message.
    """

    async def __init__(self, name: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self._name = name
        self._desired: Desired | None = None
        self._keys: KeyKeeper | None = None
        self._updater: Updater | None = None
        self._changed = asyncio.Event()
        stored = desired_store.load(name)
        makes = stored.makes if stored else dict.fromkeys(Role, 1)
        self._pools = {role: ReplicaPool(role, make=makes[role], changed=self._changed.set) for role in Role}
        if stored:
            self._take_charge(stored)
            capture_file(stored.launch.log_dir).unlink(missing_ok=True)
        self._switches = RoleSwitches(self._pools)
        self._has_adopted = asyncio.Event()
        self._router_logs = RouterLogs()
        self._traffic = TrafficLog()
        # A restart of the controller ends it.
        self._capture: TrafficCapture | None = None
        self._autoscaling = Autoscaling(
            name,
            self._pools,
            self._traffic,
            desired=lambda: self._desired,
            scale=functools.partial(self.scale, wait_for_nodes=True),
        )
        self._reconciling = asyncio.create_task(self._reconcile_forever())
        self._deciding = asyncio.create_task(self._autoscaling.run_forever())

    async def apply(self, launch: Launch, *, parts: Parts) -> None:
        """Begin with this desired state. Idempotent: Ray repeats a call whose answer was lost."""
        if self._desired is None:
            _prepare_authority(launch.spec)
            self._take_charge(Desired(launch=launch, parts=parts))
            self._desire_changed()

    async def status(self) -> ControllerReport:
        """Return the state of all pools. After a restart, waits until running replicas have been adopted."""
        desired = await self._adopted()
        pools = {role.value: self._pools[role].report(desired.spec.pool(role).replicas) for role in Role}
        spec = desired.spec.model_dump(mode="json")
        return {"spec": spec, "pools": pools, "revision": self._updates.report(desired)}

    async def scale(self, replicas: dict[str, int], *, wait_for_nodes: bool = False) -> dict[str, tuple[int, int]]:
        """Change the size of the named pools. Return (before, after) of each.

        If one pool shrinks and the other grows, replicas change their role in place, as `switch` does, where the spec
        allows it (core.types.role_switch); `status` then reports their earlier id as `was`. Raises SpecError during an
        update, and DeployError if the nodes lack room and `wait_for_nodes` is False; nothing has changed then.
        """
        desired = await self._adopted()
        self._updates.check_none(desired)
        new_sizes = {Role(role): number for role, number in replicas.items()}
        if any(not 0 <= number <= MAX_REPLICAS for number in new_sizes.values()):
            # A stored spec with more replicas could not be parsed again.
            raise SpecError(f"replicas must be between 0 and {MAX_REPLICAS}")
        before = {role: desired.spec.pool(role).replicas for role in new_sizes}
        switching = self._switches.possible(desired, new_sizes)
        if not wait_for_nodes:
            more = {role: number - before[role] for role, number in new_sizes.items()}
            more = {role: number - len(switching) if number > 0 else number for role, number in more.items()}
            is_draining = any(pool.has_draining for pool in self._pools.values())
            check_room(desired.spec, more, is_draining=is_draining)
        for life in switching:
            self._switches.begin(desired, life)
        for role, number in new_sizes.items():
            desired.scale(role, number)
            self._pools[role].retry()
        self._desire_changed()
        return {role.value: (before[role], number) for role, number in new_sizes.items()}

    async def update(self, spec: dict[str, Any], options: UpdateOptions, *, seen: dict[str, Any] | None = None) -> bool:
        """Start an update to `spec`. Return False if it replaces no replica.

        seen: the spec that the operator edited; it must still be current. Raises SpecError, and DeployError if there is
        no room; nothing has changed then.
        """
        desired = await self._adopted()
        self._updates.begin(desired, parse_spec(spec), options, seen=parse_spec(seen) if seen else None)
        self._changed.set()
        return desired.update is not None

    async def abort_update(self) -> int:
        """Roll back the running update. Return the revision that is being restored. Raises SpecError."""
        self._updates.abort(self._known, "aborted by an operator")
        self._changed.set()
        return self._known.revision

    async def revisions(self) -> str:
        """Return the revision table that routers read from Redis, for a router that starts."""
        return self._updates.tell(await self._adopted()).to_json()

    async def members(self) -> list[bytes]:
        """Return the signed records of all serving replicas, for routers that do not find them in Redis."""
        await self._has_adopted.wait()
        return [life.member for pool in self._pools.values() for life in pool.lives if life.member]

    async def switch(self, replica: str) -> str:
        """Turn a serving replica into one of the other pool, with its processes, weights and cached blocks.

        The pool sizes follow. Returns the new id at once; `status` shows the progress. The replica drains first, as by
        `drain`. If it is lost or not drained within timeouts.drain_s, a new replica starts under the new id. Idempotent
        while the switch runs. Raises SpecError, and changes nothing, if the replica cannot switch.
        """
        desired = await self._adopted()
        life = life_of(replica, self._pools)
        self._updates.check_none(desired)
        successor = self._switches.ask(desired, life)
        self._desire_changed()
        return successor

    async def drain(self, replica: str) -> None:
        """Let one replica finish or hand over its work and leave; one with a new id replaces it. Raises SpecError."""
        await self._has_adopted.wait()
        life = life_of(replica, self._pools)
        self._pools[life.view.role].retire(replica)
        self._changed.set()

    async def logs(self, replica: str, *, lines: int = 50, starts: dict[int, int] | None = None) -> dict[int, LogPart]:
        """Return each rank's log: the last lines, or the bytes from `starts[rank]` on.

        Works for replicas that have left. Raises SpecError and DeployError.

        "controller" means this process; "router" means all routers in start order, including ended ones.
        """
        log_dir, starts = self._known.launch.log_dir, starts or {}
        if replica == CONTROLLER:
            return {0: read_log(_own_log(log_dir), lines=lines, start=starts.get(0))}
        if replica == _ROUTER:
            return await self._router_logs.read(log_dir, lines=lines, starts=starts)
        await self._has_adopted.wait()
        home = pool_of(replica, self._pools).home(replica)
        if home is None:
            raise DeployError(f"{replica} has no log yet: it has not been placed on a node")
        return {
            rank: await read_rank(home.node_id, log_dir, replica, rank, lines=lines, start=starts.get(rank))
            for rank in range(home.num_ranks)
        }

    async def certify(self, name: ProcessName, request: bytes) -> Certificate:
        """Issue a certificate for a process of this deployment. request: its signing request. Raises SpecError."""
        if name.deployment != self._name:
            raise SpecError(f"{name.uri} is not a process of {self._name}")
        return _authority_of(self._known.spec).issue(name, request)

    async def keys(self) -> KeyRegistry:
        """Return the clients' API keys; digests only, no secrets."""
        return self._key_keeper.registry

    async def add_key(self, key: ApiKey) -> KeyChange:
        """Admit clients that present this key. Raises SpecError if its name is taken."""
        change = await self._key_keeper.add(key)
        logger.info(
            "API key made key=%s name=%s tenant=%s published=%s", key.id, key.name, key.tenant, change.is_published
        )
        return change

    async def revoke_key(self, key: ApiKey) -> KeyChange:
        """Stop admitting clients that present this key."""
        change = await self._key_keeper.revoke(key)
        logger.info(
            "API key revoked key=%s name=%s tenant=%s published=%s problem=%s",
            key.id, key.name, key.tenant, change.is_published, change.problem,
        )  # fmt: skip
        return change

    async def note_traffic(self, traffic_report: TrafficReport) -> TrafficAnswer:
        return TrafficAnswer(life=self._traffic.note(traffic_report), scaling=self._autoscaling.shown())

    async def start_capture(self, *, max_bytes: int) -> None:
        """Start capturing traffic to a file on the head. Raises SpecError if a capture is running."""
        if self._capture:
            raise SpecError("a capture is under way; end it by `cluster capture stop -o FILE`")
        file = capture_file(self._known.launch.log_dir)
        self._capture = TrafficCapture(file, begin_s=time.monotonic(), max_bytes=max_bytes)
        self._traffic.ended = self._capture.note

    async def capture(self) -> CaptureReport | None:
        """Return the state of the running capture, or None."""
        return self._capture.report(time.monotonic()) if self._capture else None

    async def read_capture(self, begin: int, num_bytes: int) -> bytes:
        """Return part of the running capture's file. Raises SpecError if no capture is running."""
        if self._capture is None:
            raise SpecError("no capture is under way; begin one by `cluster capture start`")
        return self._capture.read(begin, num_bytes)

    async def stop_capture(self) -> None:
        """Stop the capture and delete its file on the head."""
        if self._capture:
            self._traffic.ended = ignore
            self._capture.remove()
            self._capture = None

    async def set_autoscale(self, rules: AutoscaleSpec | None) -> None:
        """Use these rules from the next decision on. None turns autoscaling off."""
        self._known.set_autoscale(rules)
        self._desire_changed()

    async def autoscaling(self) -> AutoscaleReport:
        """Return the autoscaler's decisions and their reasons."""
        return self._autoscaling.report()

    async def stop(self) -> None:
        """Remove every replica at once, and delete the deployment's state."""
        self._reconciling.cancel()
        self._deciding.cancel()
        await self.stop_capture()
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
                # Start nothing before running replicas have been adopted.
                if not self._has_adopted.is_set():
                    await self._adopt()
                self._reconcile()
            except Exception:
                # Catch everything: Ray may be unavailable, and without this loop no lost replica would be replaced.
                logger.exception("reconcile failed; retrying")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RECONCILE_S):
                    await self._changed.wait()

    async def _adopt(self) -> None:
        """Adopt the replicas that an earlier run of this controller started. Raises RayError."""
        for life in await adopt_all(self._name, self._desired):
            self._pools[life.view.role].add(life, self._known.make_of(life.view.id, life.view.role))
        if self._desired:
            self._switches.resume(self._desired)
        self._has_adopted.set()

    def _reconcile(self) -> None:
        if (desired := self._desired) is None:
            return
        if self._switches.forget_ended(desired):
            desired_store.save(desired)
        for role, goals in self._updates.goals(desired).items():
            self._pools[role].reconcile(goals, functools.partial(self._new_id, role))
        self._updates.tell(desired)

    def _new_id(self, role: Role, make: int) -> str:
        """Return an unused replica id for a replica of revision `make`.

        The number is stored before use, so that a restarted controller does not reuse it.
        """
        replica = replica_id(role, self._known.take_number(role))
        if make != self._known.makes[role]:
            self._known.made[replica] = make
        desired_store.save(self._known)
        return replica

    async def _adopted(self) -> Desired:
        """Return the desired state once running replicas have been adopted. Raises DeployError if there is none."""
        await self._has_adopted.wait()
        return self._known

    def _take_charge(self, desired: Desired) -> None:
        """Start managing a deployment."""
        redirect_output(_own_log(desired.launch.log_dir), who=CONTROLLER)
        self._keys, reporter = KeyKeeper(desired.launch), RevisionReporter(desired.launch)
        self._updater = Updater(self._pools, reporter=reporter, save=lambda: desired_store.save(self._known))
        self._desired = desired

    def _desire_changed(self) -> None:
        desired_store.save(self._known)
        self._changed.set()

    @property
    def _key_keeper(self) -> KeyKeeper:
        return self._deployed(self._keys)

    @property
    def _updates(self) -> Updater:
        return self._deployed(self._updater)

    @property
    def _known(self) -> Desired:
        return self._deployed(self._desired)

    def _deployed(self, part: _T | None) -> _T:
        if part is None:
            raise DeployError(f"{self._name}: nothing has been deployed yet")
        return part


def remove_remains(name: str) -> None:
    """Remove all replicas of a deployment and all its entries in Ray's store. Raises RayError, DeployError."""
    for replica in find_replicas(name):
        remove_leftovers(replica, name)
    # The authority goes last: until the desired state is gone, a restarted controller starts replicas, which need it.
    for key in sorted(store.keys_in(namespace(name)), key=lambda key: key == _AUTHORITY):
        store.delete(namespace(name), key)


def _prepare_authority(spec: Spec) -> None:
    """Create the deployment's own certificate authority, or validate the operator's. Raises SpecError.

    It is kept in Ray's store only, from which a restarted controller reads it; processes that can read it can run code
    on every node anyway. Of an operator's authority, only the paths of its files are stored, in the spec.
    """
    if spec.security.tls == "auto":
        store.put(namespace(spec.name), _AUTHORITY, Authority.create(spec.name).to_json())
    elif spec.security.tls == "files":
        Authority.from_files(spec.security)


def _authority_of(spec: Spec) -> Authority:
    """Return the issuing authority; files are read on each call. Raises SpecError, and DeployError if there is none."""
    if spec.security.tls == "files":
        return Authority.from_files(spec.security)
    if stored := store.get(namespace(spec.name), _AUTHORITY):
        return Authority.from_json(stored)
    raise DeployError(f"{spec.name} has no certificate authority (security.tls: {spec.security.tls})")


def _own_log(log_dir: str) -> Path:
    return Path(log_dir) / f"{CONTROLLER}.log"
