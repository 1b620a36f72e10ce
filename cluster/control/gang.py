"""Gang of one replica: a Ray placement group and one actor per rank, which start and end together.

Ranks are not restarted. If a rank is lost, the whole gang is removed and another one starts under a new id.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
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

from cluster.control.desired_state import Desired
from cluster.control.placement import NO_FAILURES, Node, bundle, live_nodes, preferred_node, why_pending
from cluster.control.replica import parse_rank_name, rank_name, role_of
from cluster.ray.rank_actor import CONCURRENCY_GROUPS, RankActor
from cluster.ray.store import namespace
from core.identity.process_name import ProcessName
from core.types.errors import RankUnreachable, ReplicaFailed
from core.types.rank_api import Binding

# Status calls take milliseconds; a swapping machine takes longer.
_ANSWER_S = 10.0
_PLACE_POLL_S = 1.0
_UNAVAILABLE_S = 1.0
# When one rank fails, others follow, and the first error seen is not always the first failure.
_GRACE_S = 0.3
_STOP_S = 2.0
# Label that Ray sets on every node.
_NODE_ID = "ray.io/node-id"
# Serializes the choice of a node, so that each replica sees where the previous one went.
_choosing = asyncio.Lock()

_CAUSE_OF_DEATH = re.compile(r"(?:is dead because|died because|Worker exit detail:)\s*(?P<cause>.*?)(?:\. |\n|$)")


@dataclass(frozen=True)
class Home:
    """Node on which a replica runs or ran."""

    node_id: str
    node: str  # node name
    num_ranks: int


class Gang:
    """Placement group and rank actors of a replica, owned by the controller's event loop.

    Failed calls raise ReplicaFailed with the rank.
    """

    def __init__(self, replica: str, desired: Desired, *, failures: Mapping[str, int] = NO_FAILURES) -> None:
        """failures: recent failed starts of this pool, by node name."""
        # None until placed.
        self.home: Home | None = None
        # Id of its first replica. Ray's names keep it after a role switch.
        self.name = replica
        self._desired = desired
        self._role = role_of(replica)
        self._pool = desired.spec.pool(self._role)
        self._group: PlacementGroup | None = None
        self._failures = failures
        self._ranks: list[Any] = []  # in rank order

    async def place(self, waiting: Callable[[str], None]) -> None:
        """Wait without limit until one node has room for all ranks. Calls `waiting` with the reason."""
        async with _choosing:
            if node := self._preferred_node():
                self._group = self._reserve({**self._pool.labels, _NODE_ID: node.id})
                # Another replica took the room, or the node is gone.
                if not await asyncio.to_thread(self._group.wait, _PLACE_POLL_S):
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
            name=_group_name(self.name, self._desired.spec.name),
            lifetime="detached",
            bundle_label_selector=[labels] * size,
        )
        return group

    def spawn(self) -> None:
        """Start the processes of all ranks, without waiting for them."""
        assert self._group is not None, "place() comes first"
        spec, need = self._desired.spec, bundle(self._pool)
        make = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RankActor)  # type: ignore[call-overload]
        for rank in range(self._pool.tensor_parallel):
            actor = make.options(
                name=rank_name(self.name, rank),
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
                ProcessName.of_rank(spec.name, self.name, rank),
            )
            self._ranks.append(actor)

    def find(self) -> None:
        """Find the running actors and placement group, instead of place() and spawn(). Raises ReplicaFailed."""
        name = self._desired.spec.name
        try:
            self._group = get_placement_group(_group_name(self.name, name))
            names = [rank_name(self.name, rank) for rank in range(self._pool.tensor_parallel)]
            self._ranks = [ray.get_actor(each, namespace=namespace(name)) for each in names]
        except ValueError as error:
            raise ReplicaFailed(f"incomplete: {error}") from None
        self._note_home(self._group)

    async def ask(self, rank: int, method: str, *args: Any, within_s: float | None = _ANSWER_S) -> Any:
        """Call a method of one rank. Raises TimeoutError after `within_s`."""
        if rank >= len(self._ranks):
            raise ReplicaFailed(f"rank {rank} has no process yet", rank=rank)
        call = getattr(self._ranks[rank], method).options(concurrency_group="control").remote(*args)
        async with asyncio.timeout(within_s):
            return await _translate_errors(rank, call)

    async def ask_all(self, method: str, *args: Any, within_s: float | None = _ANSWER_S) -> list[Any]:
        """Call a method of every rank at once. Raises on the first failure, without waiting for the others."""
        return await _together(self.ask(rank, method, *args, within_s=within_s) for rank in range(len(self._ranks)))

    async def present_id(self) -> str:
        """Return the replica id that its ranks report. Raises ReplicaFailed if they disagree."""
        names = set(await self.ask_all("replica"))
        if len(names) != 1:
            raise ReplicaFailed(f"incomplete: its ranks are of {' and of '.join(sorted(names))}")
        return str(names.pop())

    async def become(self, replica: str, desired: Desired) -> list[Binding]:
        """Turn the drained ranks into those of `replica`, with its role. The caller must load them afterwards."""
        part = desired.parts.rank(role_of(replica))
        bindings: list[Binding] = await self.ask_all("become", part, desired.launch, replica, within_s=None)
        return bindings

    async def watch(self) -> None:
        """Wait until any rank ends, then raise. Never returns."""
        await _together(self._watch(rank) for rank in range(len(self._ranks)))

    async def remove(self, *, is_serving: bool) -> None:
        """Kill every rank and free the placement group. is_serving: let the ranks leave the membership first."""
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
                await _translate_errors(rank, call)
            except RankUnreachable:
                # The network may have failed. A rank that hangs is detected by its missing status.
                await asyncio.sleep(_UNAVAILABLE_S)
            else:
                raise ReplicaFailed(f"rank {rank} stopped by itself", rank=rank)

    def _note_home(self, group: PlacementGroup) -> None:
        node_id: str = placement_group_table(group)["bundles_to_node_id"][0]
        names = [node.name for node in live_nodes() if node.id == node_id]
        self.home = Home(node_id, names[0] if names else node_id, self._pool.tensor_parallel)


def find_replicas(name: str) -> list[str]:
    """Return the replicas of deployment `name` that still have an actor or a placement group in Ray."""
    return sorted(set(_groups(name)) | {rank[0] for entry in _named_actors(name) if (rank := parse_rank_name(entry))})


def remove_leftovers(replica: str, name: str) -> None:
    """Kill every running rank of `replica` and free its placement group."""
    for entry in _named_actors(name):
        rank = parse_rank_name(entry)
        if rank and rank[0] == replica:
            # It has died since it was listed.
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(entry, namespace=namespace(name)))
    with contextlib.suppress(ValueError):
        remove_placement_group(get_placement_group(_group_name(replica, name)))


def _groups(name: str) -> dict[str, dict[str, Any]]:
    """Return Ray's table of each placement group of deployment `name`, by replica."""
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


async def _together(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run the calls at once, and return their results.

    On the first failure, raises the most likely cause, a dead process before errors raised by other ranks, and cancels
    the rest.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(not task.done() or task.exception() for task in tasks):
            await asyncio.wait(tasks, timeout=_GRACE_S)
            errors = [error for task in tasks if task.done() and (error := task.exception())]
            raise min(errors, key=lambda error: getattr(error, "will_repeat", False))
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def _translate_errors(rank: int, call: Awaitable[Any]) -> Any:
    """Translate Ray's long errors into ReplicaFailed with one line."""
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
    """Extract the cause from Ray's long description of an actor's death."""
    if "connection error code 2" in text:
        return "killed, out of memory, or crashed"
    causes = [match["cause"] for match in _CAUSE_OF_DEATH.finditer(text)]
    return causes[-1] if causes else " ".join(text.split())
