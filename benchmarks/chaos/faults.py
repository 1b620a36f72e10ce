"""Faults that chaos can inject into a deployment, by name."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.chaos.network import partition
from core.types.request import Role
from core.types.role_switch import other

# The command line shows the names before it may import Ray.
if TYPE_CHECKING:
    from benchmarks.chaos.load import LoadGenerator
    from benchmarks.chaos.site import Site, Target

# Longer than every liveness deadline.
_STOPPED_S = 6.0
_PARTED_S = 6.0
_SLOW_S = 6.0
_SLOW_TURN_S = 0.1
# Share of each turn in which a slow rank may run.
_SLOW_SHARE = 0.25
_DRAIN_S = 120.0
_UPDATE_S = 300.0
_POLL_S = 0.2
_STORM_S = 6.0
# Share of requests that clients abort during a storm.
_STORM_SHARE = 0.7


@dataclass(frozen=True)
class FaultContext:
    """Objects that a fault works on."""

    site: Site
    load: LoadGenerator
    random: random.Random


@dataclass(frozen=True)
class Fault:
    """Fault that `strike` injects, and undoes if necessary. Returns the target's name, or "" if there is none."""

    explanation: str
    strike: Callable[[FaultContext], Awaitable[str]]


async def _kill(victim: Role | str, scene: FaultContext) -> str:
    if target := await _choose(victim, scene):
        target.send(signal.SIGKILL)
    return target.name if target else ""


async def _stop(victim: Role | str, scene: FaultContext) -> str:
    if target := await _choose(victim, scene):
        await _pause(target, _STOPPED_S)
    return target.name if target else ""


async def _slow(role: Role, scene: FaultContext) -> str:
    if not (target := await _choose(role, scene)):
        return ""
    end_at = time.monotonic() + _SLOW_S
    while time.monotonic() < end_at:
        await _pause(target, _SLOW_TURN_S * (1 - _SLOW_SHARE))
        await asyncio.sleep(_SLOW_TURN_S * _SLOW_SHARE)
    return target.name


async def _part(role: Role, scene: FaultContext) -> str:
    if not (target := await _choose(role, scene)):
        return ""
    struck = target.replica
    processes = [target for pool in Role for target in await scene.site.ranks(pool)] + scene.site.named("router")
    inside = {target.pid for target in processes if target.replica == struck}
    outside = {target.pid for target in processes} - inside
    ended = threading.Event()
    try:
        await asyncio.to_thread(partition, inside, outside, ended=ended, within_s=_PARTED_S)
    finally:
        ended.set()
    return struck


async def _rescale(role: Role, scene: FaultContext) -> str:
    count = await scene.site.size(role)
    if count < 2:
        return ""
    await scene.site.scale({role: 1})
    try:
        async with asyncio.timeout(_DRAIN_S):
            while await scene.site.size(role) != 1:
                await asyncio.sleep(_POLL_S)
    finally:
        await scene.site.scale({role: count})
    return f"{count} to 1 to {count}"


async def _update(scene: FaultContext) -> str:
    if not await scene.site.update():
        return ""
    async with asyncio.timeout(_UPDATE_S):
        while await scene.site.is_updating():
            await asyncio.sleep(_POLL_S)
    return "every replica"


async def _switch(role: Role, scene: FaultContext) -> str:
    replicas = sorted({target.replica for target in await scene.site.ranks(role)})
    if len(replicas) < 2:
        return ""
    sizes = {pool: await scene.site.size(pool) for pool in Role}
    replica = scene.random.choice(replicas)
    successor = await scene.site.switch(replica)
    try:
        async with asyncio.timeout(_DRAIN_S):
            while successor not in {target.replica for target in await scene.site.ranks(other(role))}:
                await asyncio.sleep(_POLL_S)
    finally:
        await scene.site.scale(sizes)
    return f"{replica} to {successor} and back"


async def _abort_storm(scene: FaultContext) -> str:
    scene.load.abort_share = _STORM_SHARE
    await asyncio.sleep(_STORM_S)
    scene.load.abort_share = 0.0
    return f"{_STORM_SHARE:.0%} of the requests"


FAULTS: Mapping[str, Fault] = {
    "kill-prefill": Fault("kill -9 of a prefill rank", partial(_kill, Role.PREFILL)),
    "kill-decode": Fault("kill -9 of a decode rank", partial(_kill, Role.DECODE)),
    "stop-prefill": Fault(f"a prefill rank is stopped for {_STOPPED_S:g} s", partial(_stop, Role.PREFILL)),
    "stop-decode": Fault(f"a decode rank is stopped for {_STOPPED_S:g} s", partial(_stop, Role.DECODE)),
    "slow-prefill": Fault(
        f"a prefill rank runs {_SLOW_SHARE:.0%} of the time for {_SLOW_S:g} s", partial(_slow, Role.PREFILL)
    ),
    "slow-decode": Fault(
        f"a decode rank runs {_SLOW_SHARE:.0%} of the time for {_SLOW_S:g} s", partial(_slow, Role.DECODE)
    ),
    "partition-prefill": Fault(
        f"drop packets between a prefill replica and its peers for {_PARTED_S:g} s", partial(_part, Role.PREFILL)
    ),
    "partition-decode": Fault(
        f"drop packets between a decode replica and its peers for {_PARTED_S:g} s", partial(_part, Role.DECODE)
    ),
    "rescale-prefill": Fault("the prefill pool is scaled to one replica, and back", partial(_rescale, Role.PREFILL)),
    "rescale-decode": Fault("the decode pool is scaled to one replica, and back", partial(_rescale, Role.DECODE)),
    "update": Fault("all replicas are replaced by those of another revision, of the same spec", _update),
    "switch-prefill": Fault("a prefill replica becomes a decode replica, and back", partial(_switch, Role.PREFILL)),
    "switch-decode": Fault("a decode replica becomes a prefill replica, and back", partial(_switch, Role.DECODE)),
    "redis-down": Fault("kill -9 of the embedded Redis, which comes back empty", partial(_kill, "redis")),
    "redis-stop": Fault(f"the embedded Redis is stopped for {_STOPPED_S:g} s", partial(_stop, "redis")),
    "controller": Fault("kill -9 of the controller", partial(_kill, "controller")),
    "abort-storm": Fault(f"for {_STORM_S:g} s, clients abort at random moments", _abort_storm),
    "router": Fault("kill -9 of a router replica; its clients have to retry", partial(_kill, "router")),
}
# They need root and extra packages.
PARTITIONS = frozenset(name for name in FAULTS if name.startswith("partition-"))


async def _choose(victim: Role | str, scene: FaultContext) -> Target | None:
    """Choose one rank of a pool, or one process of that name; None if there is none."""
    if isinstance(victim, Role):
        targets = await scene.site.ranks(victim)
    else:
        targets = scene.site.redis() if victim == "redis" else scene.site.named(victim)
    return scene.random.choice(targets) if targets else None


async def _pause(target: Target, seconds: float) -> None:
    """Stop the process with SIGSTOP, and continue it after `seconds` in any case."""
    target.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        target.send(signal.SIGCONT)
