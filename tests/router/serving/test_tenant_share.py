"""Waits at a tenant's share: they delay no other tenant and leave no state."""

from __future__ import annotations

import asyncio

import pytest

from core.types.errors import CapacityError
from core.types.request import OFFLINE
from router.routing.admission_queue import AdmissionQueue
from router.routing.fair_queue import Places, QueuedRequest
from router.serving.admission_waits import AdmissionWaits
from tests.router.serving.virtual_time import in_virtual_time, pass_time


class Cluster:
    """Cluster with a number of places, which admitted requests take at once."""

    def __init__(self, num_streams: int, *, queue_s: float = 1000.0) -> None:
        self.free = Places(num_streams, 1000)
        self.num_looks = 0
        self.order: list[str] = []
        self.queue = AdmissionQueue(max_waiting=1000, share=lambda: 0.75, free=self._look)
        self.waits: AdmissionWaits[Places] = AdmissionWaits(self.queue, queue_s=queue_s)

    async def ask(
        self,
        tenant: str,
        n: int,
        *,
        for_s: float,
        user: str = "",
        name: str = "",
        priority: int = 0,
        within_s: float | None = None,
    ) -> None:
        places = Places(n, n)

        def choose() -> Places | None:
            if n > self.free.num_streams:
                return None
            self.free = self.free.less(places)
            return places

        queued = QueuedRequest(tenant, priority, float(n), user=user, places=places)
        await self.waits.enter(queued, choose, within_s=within_s, give_back=self._give_back)
        self.order.append(name)
        try:
            await pass_time(for_s)
        finally:
            self._give_back(places)
            self.waits.leave(queued)

    def _give_back(self, places: Places) -> None:
        self.free = self.free.plus(places)

    def check_empty(self, num_streams: int) -> None:
        assert (len(self.queue), self.queue.num_at_share, self.queue.held) == (0, 0, {})
        assert self.free.num_streams == num_streams

    def _look(self) -> Places:
        self.num_looks += 1
        return self.free


@in_virtual_time
async def test_a_tenant_keeps_to_its_share_and_another_enters_at_once() -> None:
    cluster = Cluster(8)
    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(cluster.ask("greedy", 3, for_s=5, name=f"greedy-{number}"))
        await pass_time(0)
        assert (cluster.free.num_streams, len(cluster.queue)) == (2, 48)
        began_at = asyncio.get_running_loop().time()
        for _ in range(20):
            await cluster.ask("modest", 1, for_s=0.1)
        assert asyncio.get_running_loop().time() - began_at == pytest.approx(2.0)
    assert [name for name in cluster.order if name] == [f"greedy-{number}" for number in range(50)]
    assert asyncio.get_running_loop().time() == pytest.approx(25 * 5), "it has less than its share"
    cluster.check_empty(8)


@in_virtual_time
async def test_a_new_request_does_not_overtake_its_tenants_waiting_ones() -> None:
    cluster = Cluster(8)
    async with asyncio.TaskGroup() as group:
        group.create_task(cluster.ask("a", 5, for_s=1, name="first"))
        await pass_time(0)
        group.create_task(cluster.ask("a", 3, for_s=1, name="large"))
        await pass_time(0)
        group.create_task(cluster.ask("a", 1, for_s=1, name="small"))
        await pass_time(0)
        assert cluster.order == ["first"]
    assert cluster.order == ["first", "large", "small"]
    cluster.check_empty(8)


@in_virtual_time
async def test_small_requests_pass_large_ones_of_their_tenant_in_turns() -> None:
    cluster = Cluster(8)
    async with asyncio.TaskGroup() as group:
        group.create_task(cluster.ask("a", 2, for_s=60))
        await pass_time(0)
        large = group.create_task(cluster.ask("a", 5, for_s=1, name="large"))
        await pass_time(0)
        async with asyncio.timeout(40):
            for _ in range(6):
                await cluster.ask("a", 1, for_s=0.5)
        assert not large.done()
    cluster.check_empty(8)


@in_virtual_time
async def test_disconnected_clients_leave_no_state() -> None:
    cluster = Cluster(14)
    tasks = [
        asyncio.create_task(cluster.ask(tenant, n, for_s=10, user=str(n)))
        for tenant in "abc"
        for n in (3, 1, 2, 5, 1, 1)
    ]
    await pass_time(3)
    for task in tasks[::2]:
        task.cancel()
    await pass_time(0)
    cluster.waits.wake()
    for task in tasks[1::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    cluster.check_empty(14)


@in_virtual_time
async def test_places_released_by_another_router_are_used() -> None:
    """Another router's releases show in the replicas' reports."""
    cluster = Cluster(8)
    cluster.free = cluster.free.less(Places(4, 0))  # taken by the other router
    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(cluster.ask("a", 1, for_s=10))
        await pass_time(0)
        assert cluster.free.num_streams == 1 and len(cluster.queue) == 3
        cluster.free = cluster.free.plus(Places(4, 0))
        cluster.waits.wake()
        await pass_time(0)
        assert len(cluster.queue) == 0


@in_virtual_time
async def test_a_timeout_at_the_share_names_the_reason() -> None:
    cluster = Cluster(8, queue_s=10)
    async with asyncio.TaskGroup() as group:
        group.create_task(cluster.ask("a", 6, for_s=100))
        await pass_time(0)
        with pytest.raises(CapacityError, match="its tenant had its share of the replicas within 10 s"):
            await cluster.ask("a", 1, for_s=1)
    cluster.check_empty(8)


@pytest.mark.parametrize("num_tenants", [10, 100])
@in_virtual_time
async def test_a_wake_queries_the_replicas_once(num_tenants: int) -> None:
    cluster = Cluster(num_tenants)
    tasks = [
        asyncio.create_task(cluster.ask(str(number % num_tenants), 1, for_s=1000)) for number in range(8 * num_tenants)
    ]
    await pass_time(0)
    assert cluster.queue.num_at_share == num_tenants
    cluster.num_looks = 0
    cluster.free = cluster.free.plus(Places(1, 0))
    cluster.waits.wake()
    assert cluster.num_looks <= 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert cluster.queue.held == {} and cluster.queue.num_at_share == 0


@in_virtual_time
async def test_a_tenant_at_its_share_does_not_count_in_predicted_waits() -> None:
    cluster = Cluster(8)
    async with asyncio.TaskGroup() as group:
        greedy = [group.create_task(cluster.ask("greedy", 1, for_s=10)) for _ in range(200)]
        await pass_time(25)  # enough time to measure a rate
        assert cluster.queue.num_at_share == 1
        began_at = asyncio.get_running_loop().time()
        for _ in range(20):
            await cluster.ask("modest", 1, for_s=0.1, within_s=1.0)
        assert asyncio.get_running_loop().time() - began_at == pytest.approx(2.0)
        with pytest.raises(CapacityError, match=r"more than half of the 60\.0 s that it has"):
            await cluster.ask("greedy", 1, for_s=10, within_s=60.0)
        for task in greedy:
            task.cancel()


@in_virtual_time
async def test_freed_places_go_to_tenants_in_fair_order() -> None:
    """Both tenants are at their share. When it grows, neither has saved up credit."""
    cluster = Cluster(10)
    async with asyncio.TaskGroup() as group:
        for _ in range(12):
            for tenant in "ab":
                group.create_task(cluster.ask(tenant, 1, for_s=5, name=tenant))
        await pass_time(0)
        assert cluster.queue.num_at_share == 2
    for first, last in ((0, 8), (8, 16)):
        assert abs(cluster.order[first:last].count("a") - 4) <= 1
    cluster.check_empty(10)


@in_virtual_time
async def test_an_offline_request_waits_for_its_tenants_online_ones_only_while_none_competes() -> None:
    cluster = Cluster(8)
    async with asyncio.TaskGroup() as group:
        for _ in range(7):
            group.create_task(cluster.ask("a", 1, for_s=10))
        await pass_time(0)
        assert cluster.queue.num_at_share == 1
        own = group.create_task(cluster.ask("a", 1, for_s=0, priority=OFFLINE))
        other = group.create_task(cluster.ask("b", 1, for_s=0, priority=OFFLINE))
        await pass_time(1)
        assert other.done() and not own.done()
    cluster.check_empty(8)
