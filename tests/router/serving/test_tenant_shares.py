"""Waiting for one's own tenant: in nobody else's way, and nothing is left of it afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from core.types.errors import CapacityError
from router.routing.fair_shares import QueuedRequest
from router.routing.tenant_share import NO_PLACES, Places
from router.serving.tenant_shares import TenantShares
from tests.router.serving.virtual_time import VirtualTimeLoop, pass_time


class Cluster:
    """So many places; who is let in takes them at once."""

    def __init__(self, num_streams: int, *, queue_s: float = 1000.0) -> None:
        self.free = Places(num_streams, 1000)
        self.num_looks = 0
        self.order: list[str] = []
        self.shares = TenantShares(share=lambda: 0.75, free=self._look, max_waiting=1000, queue_s=queue_s)

    async def ask(self, tenant: str, n: int, *, for_s: float, user: str = "", name: str = "") -> None:
        places = Places(n, n)
        async with self.shares.enter(QueuedRequest(tenant, 0, float(n), user=user), places, within_s=None) as held:
            self.shares.booked(held)
            self.free = self.free.less(places)
            self.order.append(name)
            try:
                assert self.free.num_streams >= 0, "there is no gate behind it here: ask for less"
                await pass_time(for_s)
            finally:
                self.free = self.free.plus(places)

    def check_empty(self, num_streams: int) -> None:
        shares = self.shares
        assert (shares.num_waiting, shares.num_lines, shares.held) == (0, 0, {})
        assert self.free.num_streams == num_streams

    def _look(self) -> Places:
        self.num_looks += 1
        return self.free


def _play(scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario)


def test_a_tenant_has_its_share_and_another_comes_in_at_once() -> None:
    async def scenario() -> None:
        cluster = Cluster(8)
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(cluster.ask("greedy", 3, for_s=5, name=f"greedy-{number}"))
            await pass_time(0)
            assert (cluster.free.num_streams, cluster.shares.num_waiting) == (2, 48)
            began_at = asyncio.get_running_loop().time()
            for _ in range(20):
                await cluster.ask("modest", 1, for_s=0.1)
            assert asyncio.get_running_loop().time() - began_at == pytest.approx(2.0)
        assert [name for name in cluster.order if name] == [f"greedy-{number}" for number in range(50)]
        assert asyncio.get_running_loop().time() == pytest.approx(25 * 5), "it has less than its share"
        cluster.check_empty(8)

    _play(scenario())


def test_who_comes_while_others_of_its_tenant_wait_does_not_overtake_them() -> None:
    async def scenario() -> None:
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

    _play(scenario())


def test_inside_a_tenant_small_ones_may_pass_large_ones_in_turns() -> None:
    async def scenario() -> None:
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

    _play(scenario())


def test_clients_that_go_away_leave_nothing_behind() -> None:
    async def scenario() -> None:
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
        cluster.shares.room_changed()
        for task in tasks[1::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        cluster.check_empty(14)

    _play(scenario())


def test_places_that_others_give_back_are_heard_of() -> None:
    """Of another router, by the replicas' own word."""

    async def scenario() -> None:
        cluster = Cluster(8)
        cluster.free = cluster.free.less(Places(4, 0))  # the other router's
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(cluster.ask("a", 1, for_s=10))
            await pass_time(0)
            assert cluster.free.num_streams == 1 and cluster.shares.num_waiting == 3
            cluster.free = cluster.free.plus(Places(4, 0))
            cluster.shares.room_changed()
            await pass_time(0)
            assert cluster.shares.num_waiting == 0

    _play(scenario())


def test_a_wait_for_ones_own_share_that_lasts_too_long_says_so() -> None:
    async def scenario() -> None:
        cluster = Cluster(8, queue_s=10)
        async with asyncio.TaskGroup() as group:
            group.create_task(cluster.ask("a", 6, for_s=100))
            await pass_time(0)
            with pytest.raises(CapacityError, match="its tenant had its share of the replicas within 10 s"):
                await cluster.ask("a", 1, for_s=1)
        cluster.check_empty(8)

    _play(scenario())


@pytest.mark.parametrize("num_tenants", [10, 100])
def test_a_wake_looks_at_the_replicas_once_however_many_wait(num_tenants: int) -> None:
    async def scenario() -> None:
        cluster = Cluster(num_tenants)
        tasks = [
            asyncio.create_task(cluster.ask(str(number % num_tenants), 1, for_s=1000))
            for number in range(8 * num_tenants)
        ]
        await pass_time(0)
        assert cluster.shares.num_lines == num_tenants
        cluster.num_looks = 0
        cluster.free = cluster.free.plus(Places(1, 0))
        cluster.shares.room_changed()
        assert cluster.num_looks <= 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert cluster.shares.held == {} and cluster.shares.num_lines == 0

    _play(scenario())


def test_what_is_let_in_and_not_booked_yet_is_not_free() -> None:
    async def scenario() -> None:
        shares = TenantShares(share=lambda: 0.75, free=lambda: Places(8, 1000), max_waiting=10, queue_s=10)
        async with shares.enter(QueuedRequest("a", 0, 1.0), Places(4, 4), within_s=None) as held:
            assert shares.held == {"a": Places(4, 4)}
            with pytest.raises(CapacityError):  # 4 + 3 of 8
                async with shares.enter(QueuedRequest("a", 0, 1.0), Places(3, 3), within_s=0.5):
                    pass
            async with shares.enter(QueuedRequest("a", 0, 1.0), Places(2, 2), within_s=None):
                pass
            shares.booked(held)
        assert shares.held == {} and NO_PLACES.num_streams == 0

    _play(scenario())
