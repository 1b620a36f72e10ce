"""A client that disconnects at any moment frees everything, on an idle machine within two seconds."""

from __future__ import annotations

import asyncio
import random

import pytest

from core.types.request import Sampling, SequenceRequest
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.support.local_cluster import LocalCluster
from tests.support.long_answers import Ceiling
from worker.gang_runner import GangRunner

_AT_ONCE = 25


async def _ask(cluster: LocalCluster, number: int, prompt: list[int], *, num_tokens: int) -> None:
    """Request 200 tokens, and disconnect after some."""
    request = SequenceRequest(
        id=str(number),
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=Sampling(max_tokens=200, temperature=1.0, seed=number),
        choices=(0, 1) if number % 5 == 0 else (0,),
    )
    async with cluster.core.start(request) as generation:
        async for arrived in generation:
            num_tokens -= sum(map(len, arrived.values()))
            if num_tokens <= 0:
                return


async def _abort(cluster: LocalCluster, *, count: int, seed: int, within_s: float) -> None:
    """Disconnect half of the clients at a random moment and half after some tokens.

    Everything that they held must be free within the given seconds.
    """
    moments = random.Random(seed)
    inputs = prompts(*[moments.randint(1, 60) for _ in range(count)])

    async def ask_and_go_away(number: int) -> None:
        task = asyncio.create_task(_ask(cluster, number, inputs[number], num_tokens=moments.randint(1, 30)))
        await asyncio.wait({task}, timeout=moments.expovariate(20) if number % 2 else None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for start in range(0, count, _AT_ONCE):
        await asyncio.gather(*(ask_and_go_away(number) for number in range(start, start + _AT_ONCE)))
        await cluster.idle(timeout_s=within_s)
    await cluster.until(lambda: _num_cancelled(cluster) >= count // 2)


def _num_cancelled(cluster: LocalCluster) -> int:
    """Return the number of requests cancelled on all replicas."""
    return sum(replica.status.totals.cancelled for replica in cluster.replicas)


@pytest.fixture(autouse=True)
def _nobody_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    Ceiling(100).arm(monkeypatch.setattr)


@pytest.mark.parametrize(("tp", "is_async"), [(1, False), pytest.param(2, False, marks=pytest.mark.slow), (2, True)])
async def test_requests_aborted_at_random_free_everything(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tp: int, is_async: bool
) -> None:
    """This holds with synchronous and with asynchronous steps, as on a GPU."""
    monkeypatch.setattr(GangRunner, "is_async", is_async)
    async with lab.own(lab.checkpoint("llama"), **exact_tree(2, 1, tp=(tp, tp), max_local_prefill=16)) as cluster:
        await _abort(cluster, count=50, seed=tp, within_s=30.0)


@pytest.mark.slow
@pytest.mark.timeout(1700)
@pytest.mark.parametrize("tp", [1, 2])
async def test_10000_requests_aborted_at_random_free_everything(lab: Lab, tp: int) -> None:
    async with lab.own(lab.checkpoint("llama"), **exact_tree(2, 1, tp=(tp, tp), max_local_prefill=16)) as cluster:
        await _abort(cluster, count=10_000, seed=tp, within_s=2.0)
