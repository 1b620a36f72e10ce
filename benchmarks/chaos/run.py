"""One run of chaos: learn the answers, keep asking, strike again and again, and look at what is left."""

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
from cluster.control.report import Pools
from core.types.errors import DeployError
from core.wire.client_access import EndpointAccess

_POLL_S = 0.5
_RECOVER_S = 90.0  # a replica has to start and load
_BLOCKS_BACK_S = 8.0  # two seconds for the blocks; the rest is how often the controller looks
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What to do, and for how long."""

    faults: Sequence[str]  # names of FAULTS, struck in turn
    seconds: float
    rate: float  # requests a second; or,
    streams: int = 0  # unless 0, so many at any time
    rest_s: float  # between a recovery and the next stroke
    num_questions: int
    max_tokens: int
    seed: int


async def run(
    experiment: Experiment, site: Site, endpoint: str, access: EndpointAccess, *, say: Callable[[str], None]
) -> Tally:
    """Raises DeployError when the deployment is not whole or does not answer before anything is disturbed."""
    if not await _is_whole(site):
        raise DeployError("not every replica is ready; see `cluster status`")
    asked = questions(experiment.num_questions, max_tokens=experiment.max_tokens)
    async with LoadGenerator(
        endpoint,
        asked,
        access=access,
        rate=experiment.rate,
        streams=experiment.streams,
        seed=experiment.seed,
    ) as load:
        say(f"learning the undisturbed answers of {experiment.num_questions} questions")
        await load.learn()
        tally = load.tally
        offered = f"{experiment.streams} streams" if experiment.streams else f"{experiment.rate:g} requests a second"
        say(f"{offered} for {experiment.seconds:.0f} s; faults: {', '.join(experiment.faults) or 'none'}")
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(experiment.seconds))
            group.create_task(
                _strike(experiment, FaultContext(site, load, random.Random(experiment.seed)), tally, say=say)
            )
            group.create_task(_weigh(experiment, site, tally))
    tally.blocks_leaked = await _await_blocks(site)
    return tally


async def _strike(experiment: Experiment, scene: FaultContext, tally: Tally, *, say: Callable[[str], None]) -> None:
    """One fault after another, each on a whole deployment, as long as there is time to see it through."""
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
            say(f"{name}: there is nothing to strike")
            await asyncio.sleep(experiment.rest_s)
            continue
        await asyncio.sleep(experiment.rest_s)  # what is struck is not always known at once
        if await _await_whole(scene.site, within_s=_RECOVER_S):
            stroke.recovered_s = round(time.monotonic() - began_at, 1)
        say(f"{stroke.at_s:.0f} s: {name} {stroke.target}; worst pause so far {tally.worst_pause_s:.2f} s")


async def _weigh(experiment: Experiment, site: Site, tally: Tally) -> None:
    """How much memory each process gained over the second half, when everything has been touched once."""
    await asyncio.sleep(experiment.seconds / 2)
    before = site.memory(await _pools(site))
    await asyncio.sleep(experiment.seconds / 2)
    after = site.memory(await _pools(site))
    tally.memory_growth_mib = {name: (after[name] - before[name]) / _MIB for name in before if after.get(name)}


async def _pools(site: Site) -> Pools:
    status = await site.status()
    return status["pools"] if status else {}


async def _is_whole(site: Site) -> bool:
    status = await site.status()
    return status is not None and status["ready"]


async def _await_whole(site: Site, *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not await _is_whole(site):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def _await_blocks(site: Site) -> dict[str, int]:
    """The blocks that are still held when nothing is asked any more."""
    deadline = time.monotonic() + _BLOCKS_BACK_S
    while True:
        status = await site.status()
        leaked = leaked_blocks(status["pools"]) if status else {}
        if (status and not leaked) or time.monotonic() > deadline:
            return leaked
        await asyncio.sleep(_POLL_S)
