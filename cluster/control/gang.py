"""What Ray holds of one replica: a placement group, and in it one actor per rank. They live and die together.

No rank is ever restarted: a gang that has lost one is removed whole, and another is started under a new id.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.control.desired_state import Desired, namespace
from cluster.control.placement import NO_FAILURES, Node, bundle, live_nodes, preferred_node, why_pending
from cluster.control.replica import parse_rank_name, rank_name, role_of
from cluster.ray.rank_actor import CONCURRENCY_GROUPS, RankActor
from core.identity.process_name import ProcessName
from core.types.errors import RankUnreachable, ReplicaFailed
from core.types.rank_api import Binding

_ANSWER_S = 10.0  # a call that only looks takes milliseconds; a machine that swaps takes longer
_PLACE_POLL_S = 1.0
_UNAVAILABLE_S = 1.0
_GRACE_S = 0.3  # when one rank fails, others follow; the first to be heard is not always the first to fall
_STOP_S = 2.0
_NODE_ID = "ray.io/node-id"  # a label that Ray gives to every node
_choosing = asyncio.Lock()  # a node for one replica at a time: the next one sees where the last one has gone

_CAUSE_OF_DEATH = re.compile(r"(?:is dead because|died because|Worker exit detail:)\s*(?P<cause>.*?)(?:\. |\n|$)")


@dataclass(frozen=True)
class Home:
    """Where a replica runs, or ran."""

    node_id: str
    node: str  # its name
    num_ranks: int


class Gang:
    """Owned by the controller's event loop. A call that fails raises ReplicaFailed, which names the rank."""

    def __init__(self, replica: str, desired: Desired, *, failures: Mapping[str, int] = NO_FAILURES) -> None:
        """failures: how many of its pool's last starts failed on each node, by its name."""
        self.home: Home | None = None  # None before it is placed
        self._replica = replica  # its first life's id, which Ray calls it by for good
        self._desired = desired
        self._role = role_of(replica)
        self._pool = desired.spec.pool(self._role)
        self._group: PlacementGroup | None = None
        self._failures = failures
        self._ranks: list[Any] = []  # actor handles, in rank order

    async def place(self, waiting: Callable[[str], None]) -> None:
        """Wait, for as long as it takes, until one node has room for all ranks; `waiting` hears what is missing."""
        async with _choosing:
            if node := self._preferred_node():
                self._group = self._reserve({**self._pool.labels, _NODE_ID: node.id})
                if not await asyncio.to_thread(self._group.wait, _PLACE_POLL_S):  # others were quicker, or it is gone
                    remove_placement_group(self._group)
                    self._group = None
        self._group = self._group or self._reserve(dict(self._pool.labels))
        while not await asyncio.to_thread(self._group.wait, _PLACE_POLL_S):
            waiting(why_pending(self._pool, live_nodes()))
        self._note_home(self._group)

    def _preferred_node(self) -> Node | None:
        groups = _groups(self._desired.spec.name).items()
        ids = self._desired.switched
        taken = Counter(
            group["bundles_to_node_id"].get(0) for name, group in groups if role_of(ids.get(name, name)) is self._role
        )
        return preferred_node(self._pool, live_nodes(), taken=taken, failures=self._failures)

    def _reserve(self, labels: dict[str, str]) -> PlacementGroup:
        size = self._pool.tensor_parallel
        group: PlacementGroup = placement_group(
            [bundle(self._pool)] * size,
            strategy="STRICT_PACK",
            name=_group_name(self._replica, self._desired.spec.name),
            lifetime="detached",
            bundle_label_selector=[labels] * size,
        )
        return group

    def spawn(self) -> None:
        """Start the processes of all ranks; returns before they run."""
        assert self._group is not None, "place() comes first"
        spec, need = self._desired.spec, bundle(self._pool)
        make = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RankActor)  # type: ignore[call-overload]
        for rank in range(self._pool.tensor_parallel):
            actor = make.options(
                name=rank_name(self._replica, rank),
                namespace=namespace(spec.name),
                lifetime="detached",
                max_restarts=0,
                num_cpus=need.get("CPU", 0),
                num_gpus=need.get("GPU", 0),
                resources={name: amount for name, amount in need.items() if name not in ("CPU", "GPU")},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank),
            ).remote(
                self._desired.parts.rank(self._role),
                self._desired.launch,
                ProcessName.of_rank(spec.name, self._replica, rank),
            )
            self._ranks.append(actor)

    def find(self) -> None:
        """Instead of place() and spawn(): take hold of what lives under this replica's names."""
        name = self._desired.spec.name
        try:
            self._group = get_placement_group(_group_name(self._replica, name))
            names = [rank_name(self._replica, rank) for rank in range(self._pool.tensor_parallel)]
            self._ranks = [ray.get_actor(each, namespace=namespace(name)) for each in names]
        except ValueError as error:
            raise ReplicaFailed(f"not whole: {error}") from None
        self._note_home(self._group)

    async def ask(self, rank: int, method: str, *args: Any, within_s: float | None = _ANSWER_S) -> Any:
        """Call one rank. Raises TimeoutError after `within_s`."""
        if rank >= len(self._ranks):
            raise ReplicaFailed(f"rank {rank} has no process yet", rank=rank)
        call = getattr(self._ranks[rank], method).options(concurrency_group="control").remote(*args)
        async with asyncio.timeout(within_s):
            return await _failing_clearly(rank, call)

    async def ask_all(self, method: str, *args: Any, within_s: float | None = _ANSWER_S) -> list[Any]:
        """Call every rank at once; when one fails, the others are not waited for."""
        calls = [
            asyncio.create_task(self.ask(rank, method, *args, within_s=within_s)) for rank in range(len(self._ranks))
        ]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            await _raise_cause(calls)
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()

    @property
    def name(self) -> str:
        """What Ray calls it: the id of the replica that it was first."""
        return self._replica

    async def present_id(self) -> str:
        """The replica that its ranks say they are. Raises ReplicaFailed where they are of two."""
        names = set(await self.ask_all("replica"))
        if len(names) != 1:
            raise ReplicaFailed(f"not whole: its ranks are of {' and of '.join(sorted(names))}")
        return str(names.pop())

    async def become(self, replica: str, desired: Desired) -> list[Binding]:
        """Its ranks are those of `replica` from now on, with the role of that; they have yet to load. Before that they
        have drained."""
        part = desired.parts.rank(role_of(replica))
        bindings: list[Binding] = await self.ask_all("become", part, desired.launch, replica, within_s=None)
        return bindings

    async def watch(self) -> None:
        """Never return; raise as soon as any rank ends, for whatever reason."""
        watches = [asyncio.create_task(self._watch(rank)) for rank in range(len(self._ranks))]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            await _raise_cause(watches)
        finally:
            for watch in watches:
                watch.cancel()

    async def remove(self, *, is_serving: bool) -> None:
        """Kill every rank and give back the place. Ranks that serve may leave the membership by themselves first."""
        if is_serving:
            stops = [asyncio.create_task(self.ask(rank, "stop", within_s=_STOP_S)) for rank in range(len(self._ranks))]
            await asyncio.gather(*stops, return_exceptions=True)
        for rank in self._ranks:
            ray.kill(rank)
        if self._group is not None:
            remove_placement_group(self._group)

    async def _watch(self, rank: int) -> None:
        while True:
            try:
                call = self._ranks[rank].run_forever.options(concurrency_group="watch").remote()
                await _failing_clearly(rank, call)
            except RankUnreachable:  # the network, perhaps; a rank that hangs is noticed by its silence
                await asyncio.sleep(_UNAVAILABLE_S)
            else:
                raise ReplicaFailed(f"rank {rank} stopped by itself", rank=rank)

    def _note_home(self, group: PlacementGroup) -> None:
        node_id: str = placement_group_table(group)["bundles_to_node_id"][0]
        names = [node.name for node in live_nodes() if node.id == node_id]
        self.home = Home(node_id, names[0] if names else node_id, self._pool.tensor_parallel)


def find_replicas(name: str) -> list[str]:
    """The replicas of deployment `name` of which Ray still knows an actor or a placement group."""
    return sorted(set(_groups(name)) | {rank[0] for entry in _named_actors(name) if (rank := parse_rank_name(entry))})


def remove_leftovers(replica: str, name: str) -> None:
    """Kill every rank of `replica` that lives and give back its place."""
    for entry in _named_actors(name):
        rank = parse_rank_name(entry)
        if rank and rank[0] == replica:
            with contextlib.suppress(ValueError):  # it has died meanwhile
                ray.kill(ray.get_actor(entry, namespace=namespace(name)))
    with contextlib.suppress(ValueError):
        remove_placement_group(get_placement_group(_group_name(replica, name)))


def _groups(name: str) -> dict[str, dict[str, Any]]:
    """What Ray says of each placement group of deployment `name`, by replica."""
    prefix = _group_name("", name)
    return {
        table["name"].removeprefix(prefix): table
        for table in placement_group_table().values()
        if table["name"].startswith(prefix) and table["state"] != "REMOVED"
    }


def _named_actors(name: str) -> list[str]:
    entries = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in entries if entry["namespace"] == namespace(name)]


def _group_name(replica: str, name: str) -> str:
    return f"{namespace(name)}/{replica}"


async def _raise_cause(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """If some of `tasks` failed, raise what most likely came first: a dead process, before what another rank raised."""
    if all(task.done() and not task.exception() for task in tasks):
        return
    await asyncio.wait(tasks, timeout=_GRACE_S)
    errors = [error for task in tasks if task.done() and (error := task.exception())]
    raise min(errors, key=lambda error: getattr(error, "will_repeat", False))


async def _failing_clearly(rank: int, call: Awaitable[Any]) -> Any:
    """Say in a line what Ray says in twenty."""
    try:
        return await call
    except ActorUnavailableError as error:
        raise RankUnreachable(f"rank {rank} cannot be reached", rank=rank) from error
    except RayTaskError as error:
        text = " ".join(str(error.cause).split()) or "no message"
        reason = f"rank {rank}: {type(error.cause).__name__}: {text}"
        raise ReplicaFailed(reason, rank=rank, will_repeat=True) from error
    except RayActorError as error:
        raise ReplicaFailed(f"the process of rank {rank} died: {_death(str(error))}", rank=rank) from error
    except RayError as error:
        raise ReplicaFailed(
            f"rank {rank}: {type(error).__name__}: {' '.join(str(error).split())}", rank=rank
        ) from error


def _death(text: str) -> str:
    """The telling sentence of Ray's long account of an actor's death."""
    if "connection error code 2" in text:
        return "killed, out of memory, or crashed"
    causes = [match["cause"] for match in _CAUSE_OF_DEATH.finditer(text)]
    return causes[-1] if causes else " ".join(text.split())
