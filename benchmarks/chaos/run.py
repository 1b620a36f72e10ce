"""A chaos run: record the answers, keep sending requests, inject faults, and check for leaks."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.chaos.faults import FAULTS, FaultContext
from benchmarks.chaos.load import LoadGenerator
from benchmarks.chaos.question import questions
from benchmarks.chaos.site import Site, leaked_blocks
from benchmarks.chaos.tally import FaultWindow, Tally
from cluster.control.replica import Pools
from core.types.errors import DeployError
from core.wire.client_access import EndpointAccess

_POLL_S = 0.5
_RECOVER_S = 90.0  # a replica has to start and load
# Two seconds for the blocks, the rest for the controller's polling.
_BLOCKS_BACK_S = 8.0
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Settings of a run."""

    # Names of FAULTS, injected in turn.
    faults: Sequence[str]
    seconds: float
    # Requests per second, if `streams` is 0.
    rate: float
    # Concurrent requests.
    streams: int = 0
    # Seconds between a recovery and the next fault.
    rest_s: float
    num_questions: int
    max_tokens: int
    seed: int


async def run(
    experiment: Experiment, site: Site, endpoint: str, access: EndpointAccess, *, say: Callable[[str], None]
) -> Tally:
    """Run the experiment. Raises DeployError if the deployment is not complete, or fails before the first fault."""
    if not await _is_complete(site):
        raise DeployError("not every replica is ready; see `cluster status`")
    load_questions = questions(experiment.num_questions, max_tokens=experiment.max_tokens)
    async with LoadGenerator(
        endpoint,
        load_questions,
        access=access,
        rate=experiment.rate,
        streams=experiment.streams,
        seed=experiment.seed,
    ) as load:
        say(f"recording the undisturbed answers to {experiment.num_questions} questions")
        await load.learn()
        tally = load.tally
        offered = f"{experiment.streams} streams" if experiment.streams else f"{experiment.rate:g} requests per second"
        say(f"{offered} for {experiment.seconds:.0f} s; faults: {', '.join(experiment.faults) or 'none'}")
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(experiment.seconds))
            group.create_task(
                _strike(experiment, FaultContext(site, load, random.Random(experiment.seed)), tally, say=say)
            )
            group.create_task(_measure_memory(experiment, site, tally))
    tally.blocks_leaked = await _await_blocks(site)
    return tally


async def _strike(experiment: Experiment, scene: FaultContext, tally: Tally, *, say: Callable[[str], None]) -> None:
    """Inject one fault after another, each on a recovered deployment, while there is time."""
    end_at = time.monotonic() + experiment.seconds
    number = 0
    await asyncio.sleep(experiment.rest_s)
    while experiment.faults and time.monotonic() + experiment.rest_s < end_at:
        name = experiment.faults[number % len(experiment.faults)]
        number += 1
        stroke = FaultWindow(name, "", round(tally.elapsed_s, 1))
        tally.strokes.append(stroke)
        began_at = time.monotonic()
        stroke.target = await FAULTS[name].strike(scene)
        if not stroke.target:
            tally.strokes.pop()
            say(f"{name}: no target")
            await asyncio.sleep(experiment.rest_s)
            continue
        # Faults are not always detected at once.
        await asyncio.sleep(experiment.rest_s)
        if await _await_complete(scene.site, within_s=_RECOVER_S):
            stroke.recovered_s = round(time.monotonic() - began_at, 1)
        say(f"{stroke.at_s:.0f} s: {name} {stroke.target}; worst pause so far {tally.worst_pause_s:.2f} s")


async def _measure_memory(experiment: Experiment, site: Site, tally: Tally) -> None:
    """Measure each process's memory growth over the second half, when everything has been used once."""
    await asyncio.sleep(experiment.seconds / 2)
    before = site.memory(await _pools(site))
    await asyncio.sleep(experiment.seconds / 2)
    after = site.memory(await _pools(site))
    tally.memory_growth_mib = {name: (after[name] - before[name]) / _MIB for name in before if after.get(name)}


async def _pools(site: Site) -> Pools:
    status = await site.status()
    return status["pools"] if status else {}


async def _is_complete(site: Site) -> bool:
    status = await site.status()
    return status is not None and status["ready"]


async def _await_complete(site: Site, *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not await _is_complete(site):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def _await_blocks(site: Site) -> dict[str, int]:
    """Wait for blocks to be freed after the load. Returns those that are still held."""
    deadline = time.monotonic() + _BLOCKS_BACK_S
    while True:
        status = await site.status()
        leaked = leaked_blocks(status["pools"]) if status else {}
        if (status and not leaked) or time.monotonic() > deadline:
            return leaked
        await asyncio.sleep(_POLL_S)
