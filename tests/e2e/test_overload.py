"""Overload: queue order, early rejections, deadlines, and no hangs."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest

from core.types.errors import CapacityError, DeadlineExceeded, ModelUnavailable
from core.types.request import Role, Sampling, SequenceRequest
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.support.local_cluster import LocalCluster
from tests.support.long_answers import Ceiling
from tests.support.waiting import becomes

_GREEDY = Sampling(max_tokens=24, temperature=0.0)


def _tree(*, max_running: int = 2, max_waiting: int = 1024, **timeouts: float) -> dict[str, Any]:
    tree = exact_tree(1, 1, max_waiting=max_waiting) | {"timeouts": timeouts}
    tree["decode"] |= {"max_running": max_running}
    return tree


async def _ask(cluster: LocalCluster, number: int, *, done: list[int] | None = None, **fields: Any) -> int:
    """Send a request and return the number of tokens received."""
    prompt = prompts(20 + number % 20)[0]
    request = SequenceRequest(
        id=str(number), token_ids=tuple(prompt), num_prompt_tokens=len(prompt), sampling=_GREEDY, **fields
    )
    count = 0
    async with cluster.core.start(request) as generation:
        async for arrived in generation:
            count += sum(map(len, arrived.values()))
    if done is not None:
        done.append(number)
    return count


async def test_a_replica_gets_what_it_can_run_and_the_rest_waits_in_the_router(lab: Lab) -> None:
    async with lab.shared(lab.checkpoint("llama"), **_tree()) as cluster:
        decode = next(replica for replica in cluster.replicas if replica.member.role is Role.DECODE)
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, decode.num_requests)
                await cluster.replicas.changed(timeout_s=10)

        watching = asyncio.create_task(watch())
        assert await asyncio.gather(*(_ask(cluster, i) for i in range(12))) == [24] * 12
        watching.cancel()
        assert most == 2
        await cluster.idle()
        assert (decode.promised_blocks, decode.promised_streams, decode.num_requests) == (0, 0, 0)


async def test_flood_of_one_tenant_delays_another_by_its_share_only(lab: Lab) -> None:
    async with lab.shared(lab.checkpoint("llama"), **_tree()) as cluster:
        done: list[int] = []
        flood = [asyncio.create_task(_ask(cluster, i, done=done, tenant="flood", priority=-5)) for i in range(24)]
        await asyncio.sleep(0)
        light = [asyncio.create_task(_ask(cluster, i, done=done, tenant="light")) for i in (100, 101, 102)]
        await asyncio.gather(*flood, *light)
        assert max(done.index(number) for number in (100, 101, 102)) < 12, done


async def test_within_a_tenant_the_smaller_priority_goes_first(lab: Lab) -> None:
    async with lab.shared(lab.checkpoint("llama"), **_tree(max_running=1)) as cluster:
        done: list[int] = []
        late_first = [3, 2, 1]
        running = [asyncio.create_task(_ask(cluster, 0, done=done))]
        await asyncio.sleep(0)
        running += [asyncio.create_task(_ask(cluster, i, done=done, priority=i)) for i in late_first]
        await asyncio.gather(*running)
        assert done == [0, 1, 2, 3]


async def test_refusals_come_at_once_with_a_hint_and_what_is_admitted_is_served(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    running_on = Ceiling(2)
    running_on.arm(monkeypatch.setattr)
    async with lab.shared(lab.checkpoint("llama"), **_tree(max_waiting=16)) as cluster:

        async def one(number: int) -> int:
            try:
                return await _ask(cluster, number)
            except CapacityError as error:
                assert error.retry_after_s > 0
                return 0

        requests = [asyncio.create_task(one(i)) for i in range(60)]
        await becomes(lambda: sum(task.done() for task in requests) >= 50)  # rejected before any answer can have ended
        running_on.lift()
        counts = await asyncio.gather(*requests)
        assert set(counts) == {0, 24}
        assert sum(count > 0 for count in counts) >= 9, "what fits into the queue is served"
        await cluster.idle()
        assert await _ask(cluster, 99) == 24


async def test_a_deadline_that_cannot_be_met_is_refused_before_work_is_spent(lab: Lab) -> None:
    async with lab.shared(lab.checkpoint("llama"), **_tree(max_running=1)) as cluster:
        backlog = [asyncio.create_task(_ask(cluster, i)) for i in range(30)]
        waiting = set(backlog)
        while len(waiting) > 24:  # long enough to measure the drain rate of the queue
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(CapacityError, match="would wait"):  # rejected before it waits
            await _ask(cluster, 50, deadline_s=0.05)
        for task in backlog:
            task.cancel()
        await asyncio.gather(*backlog, return_exceptions=True)


async def test_a_deadline_that_passes_on_the_way_ends_the_request_everywhere(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ceiling(5).arm(monkeypatch.setattr)
    async with lab.shared(lab.checkpoint("llama"), **_tree()) as cluster:
        for number, deadline_s in enumerate((0.02, 0.1, 0.5)):
            with pytest.raises(DeadlineExceeded):
                await _ask(cluster, number, deadline_s=deadline_s)
            await cluster.idle()


async def test_without_a_replica_a_request_waits_and_then_gets_503(lab: Lab) -> None:
    tree = exact_tree(1, 0) | {"timeouts": {"queue_s": 0.5}}
    async with lab.own(lab.checkpoint("llama"), **tree) as cluster:
        begin = time.monotonic()
        with pytest.raises(ModelUnavailable, match="it has no decode replica"):
            await _ask(cluster, 0)
        assert time.monotonic() - begin > 0.4


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_two_minutes_at_twice_the_saturating_load_keep_goodput(lab: Lab) -> None:
    """Compare answers per second at twice the saturating load with those at saturation."""
    peak_s, overload_s = 30.0, 120.0
    tree = _tree(max_running=8, queue_s=2.0)
    async with lab.own(lab.checkpoint("llama"), processes=True, **tree) as cluster:
        numbers = itertools.count()

        async def saturate(end_at: float) -> int:
            served = 0
            while time.monotonic() < end_at:
                num_tokens = await _ask(cluster, next(numbers))
                served += num_tokens == 24
            return served

        await saturate(time.monotonic() + 1)  # warm up the measured rates
        end_at = time.monotonic() + peak_s
        peak = sum(await asyncio.gather(*(saturate(end_at) for _ in range(16)))) / peak_s
        served, refusals_s = 0, list[float]()

        async def ask() -> None:
            nonlocal served
            begin = time.monotonic()
            try:
                num_tokens = await _ask(cluster, next(numbers))
                served += num_tokens == 24
            except CapacityError:
                refusals_s.append(time.monotonic() - begin)

        async with asyncio.TaskGroup() as group:
            begin = time.monotonic()
            for number in range(int(2 * peak * overload_s)):
                is_time = asyncio.Event()
                asyncio.get_running_loop().call_at(begin + number / (2 * peak), is_time.set)
                await is_time.wait()
                group.create_task(ask())
        goodput = served / (time.monotonic() - begin)
        print(
            f"peak {peak:.1f}/s, goodput {goodput:.1f}/s, {len(refusals_s)} refused within {max(refusals_s):.3f} s,"
            f" {sum(seconds > 0.2 for seconds in refusals_s)} of them later than 0.2 s"
        )
        assert goodput >= 0.9 * peak
        assert max(refusals_s) <= 0.2
