"""Waits for room: every reserved place is used or returned, and every request gets its turn or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from core.types.errors import CapacityError, RequestError
from core.types.request import OFFLINE
from router.routing.admission_queue import AdmissionQueue
from router.routing.fair_queue import QueuedRequest
from router.serving.admission_waits import AdmissionWaits
from tests.router.serving.virtual_time import in_virtual_time, pass_time


class Room:
    """Places for requests, as a router would assign them."""

    def __init__(self, places: int) -> None:
        self.free = places

    def choose(self) -> str | None:
        if not self.free:
            return None
        self.free -= 1
        return "place"

    def give_back(self, place: str) -> None:
        self.free += 1


def _waits(*, max_waiting: int, queue_s: float) -> AdmissionWaits[str]:
    return AdmissionWaits(AdmissionQueue(max_waiting=max_waiting), queue_s=queue_s)


async def _enter(waits: AdmissionWaits[str], room: Room, *, within_s: float | None = None, tenant: str = "") -> str:
    return await waits.enter(QueuedRequest(tenant, 0, 1.0), room.choose, within_s=within_s, give_back=room.give_back)


async def _begun(asking: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
    """Start a request, and let it come as far as it does."""
    task = asyncio.create_task(asking)
    await asyncio.sleep(0)
    return task


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_requests_with_room_do_not_wait() -> None:
    waits, room = _waits(max_waiting=1, queue_s=1), Room(2)
    assert [await _enter(waits, room) for _ in range(2)] == ["place"] * 2
    assert (len(waits.queue), room.free) == (0, 0)


async def test_each_place_that_becomes_free_lets_one_pass() -> None:
    waits, room = _waits(max_waiting=100, queue_s=10), Room(0)
    waiting = [await _begun(_enter(waits, room)) for _ in range(3)]
    assert len(waits.queue) == 3
    for left in (2, 1, 0):
        room.free += 1
        waits.wake()
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert (len(waits.queue), room.free) == (left, 0)
    assert await asyncio.gather(*waiting) == ["place"] * 3


async def test_a_new_request_does_not_overtake_waiting_ones() -> None:
    waits, room = _waits(max_waiting=100, queue_s=10), Room(0)
    first = await _begun(_enter(waits, room))
    room.free += 1
    second = await _begun(_enter(waits, room))
    waits.wake()
    assert await first == "place"
    assert not second.done()
    await _cancelled(second)
    assert len(waits.queue) == 0


async def test_a_request_cancelled_at_its_turn_returns_its_place() -> None:
    waits, room = _waits(max_waiting=100, queue_s=10), Room(0)
    task = await _begun(_enter(waits, room))
    room.free += 1
    waits.wake()
    assert room.free == 0, "it has its place, and does not know it yet"
    await _cancelled(task)
    assert task.cancelled() and room.free == 1


async def test_the_place_of_a_cancelled_request_goes_to_the_next() -> None:
    waits, room = _waits(max_waiting=100, queue_s=10), Room(0)
    tasks = [await _begun(_enter(waits, room)) for _ in range(2)]
    room.free += 1
    waits.wake()
    tasks[0].cancel()
    assert await tasks[1] == "place"


async def test_a_wait_times_out_with_a_capacity_error() -> None:
    waits, room = _waits(max_waiting=100, queue_s=0.05), Room(0)
    with pytest.raises(CapacityError, match=r"within 0\.05 s") as rejected:
        await _enter(waits, room)
    assert rejected.value.retry_after_s > 0 and len(waits.queue) == 0


async def test_an_impossible_request_fails_at_its_turn_and_delays_no_other() -> None:
    waits, room = _waits(max_waiting=100, queue_s=10), Room(0)
    is_wrong = False

    def choose() -> str | None:
        if is_wrong:
            raise RequestError("too long")
        return None

    wrong = await _begun(waits.enter(QueuedRequest("", 0, 1.0), choose, within_s=None, give_back=room.give_back))
    right = await _begun(_enter(waits, room))
    is_wrong = True
    room.free += 1
    waits.wake()
    with pytest.raises(RequestError, match="too long"):
        await wrong
    assert await right == "place"


async def test_an_unexpected_error_ends_only_its_own_request() -> None:
    """Waits are woken by a replica's frame reader, which must survive the error."""
    waits, room = _waits(max_waiting=100, queue_s=10), Room(0)

    def choose() -> str | None:
        return 1 / 0 if room.free else None  # type: ignore[return-value]

    bad = await _begun(waits.enter(QueuedRequest("", 0, 1.0), choose, within_s=None, give_back=room.give_back))
    good = await _begun(_enter(waits, room))
    room.free = 1
    waits.wake()
    assert await good == "place"
    with pytest.raises(ZeroDivisionError):
        await bad


class Places:
    """Room for a number of concurrent streams; a request may need several."""

    def __init__(self, number: int, *, hold_s: float = 2.0, queue_s: float = 60.0) -> None:
        self.free = number
        self.queue = AdmissionQueue(max_waiting=1000, hold_s=hold_s)
        self.waits: AdmissionWaits[int] = AdmissionWaits(self.queue, queue_s=queue_s)
        self.entered: list[tuple[str, float]] = []  # (name, time)

    async def ask(self, name: str, size: int, *, for_s: float = 0.0, tenant: str = "") -> None:
        def choose() -> int | None:
            if size > self.free:
                return None
            self.free -= size
            return size

        await self.waits.enter(
            QueuedRequest(tenant, 0, float(size)), choose, within_s=None, give_back=lambda size: self._leave(size)
        )
        self.entered.append((name, asyncio.get_running_loop().time()))
        await pass_time(for_s)
        self._leave(size)

    def _leave(self, size: int) -> None:
        self.free += size
        self.waits.wake()


@in_virtual_time
async def test_a_request_without_room_delays_others_for_a_bounded_time() -> None:
    places = Places(4, hold_s=2.0, queue_s=20.0)
    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(places.ask(f"runs-{number}", 1, for_s=100 if number else 1))
        large = group.create_task(_rejected(places.ask("large", 4)))
        await pass_time(0)
        small = [group.create_task(places.ask(f"small-{number}", 1, for_s=0.5)) for number in range(6)]
        await asyncio.wait(small)
        came = [at for name, at in places.entered if name.startswith("small")]
        pauses = [after - before for before, after in zip([1.0, *came], came, strict=False)]
        assert max(pauses) <= 2.0 + 0.5  # room from 1.0 on; the request before took 0.5
        assert not large.done() and asyncio.get_running_loop().time() < 10
        await large


async def _rejected(asking: Coroutine[Any, Any, None]) -> None:
    with pytest.raises(CapacityError):
        await asking


@in_virtual_time
async def test_a_large_request_gets_room_despite_a_stream_of_small_ones() -> None:
    """Without turns, small requests could starve it."""
    places = Places(8, hold_s=2.0)
    async with asyncio.TaskGroup() as group:

        async def small_ones() -> None:
            for number in range(400):
                group.create_task(places.ask(f"small-{number}", 1, for_s=1.0, tenant="small"))
                await pass_time(0.05)

        coming = group.create_task(small_ones())
        await pass_time(5)
        await asyncio.wait_for(places.ask("large", 8, for_s=1.0, tenant="large"), 20)
        assert not coming.done()


@in_virtual_time
async def test_repeated_cancellation_does_not_prolong_delays() -> None:
    places = Places(2, hold_s=2.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(places.ask("runs", 1, for_s=30))
        await pass_time(0)

        async def come_and_go() -> None:
            while True:
                large = asyncio.create_task(places.ask("large", 2))
                await pass_time(1.5)
                large.cancel()
                await asyncio.gather(large, return_exceptions=True)

        harassing = asyncio.create_task(come_and_go())
        await pass_time(0.1)
        await asyncio.wait_for(places.ask("small", 1), 10)
        assert asyncio.get_running_loop().time() < 5
        harassing.cancel()


@in_virtual_time
async def test_all_waiting_requests_are_tried_even_if_many_find_no_room() -> None:
    places = Places(2, hold_s=1.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(places.ask("runs", 1, for_s=50))
        await pass_time(0)
        large = [asyncio.create_task(places.ask(f"large-{number}", 2)) for number in range(30)]
        await pass_time(0)
        small = group.create_task(places.ask("small", 1))
        while not small.done():
            await pass_time(0.05)
            places.waits.wake()
            assert asyncio.get_running_loop().time() < 10
        await _cancelled(*large)
        assert (len(places.queue), places.free) == (0, 1)


async def _enter_offline(
    waits: AdmissionWaits[str], room: Room, *, within_s: float | None = None, tenant: str = ""
) -> str:
    queued = QueuedRequest(tenant, OFFLINE, 1.0)
    return await waits.enter(queued, room.choose, within_s=within_s, give_back=room.give_back)


async def test_offline_requests_go_when_no_other_waits() -> None:
    waits, room = _waits(max_waiting=100, queue_s=100), Room(1)
    assert await _enter_offline(waits, room) == "place", "requests with room do not wait"
    last = [await _begun(_enter_offline(waits, room)) for _ in range(2)]
    assert len(waits.queue) == 0, "offline requests are not counted as waiting"
    others = [await _begun(_enter(waits, room)) for _ in range(2)]  # arrive later
    for someone in (*others, *last):
        room.free += 1
        waits.wake()
        await asyncio.wait((*others, *last), return_when=asyncio.FIRST_COMPLETED)
        assert await someone == "place" and room.free == 0
        others = [one for one in others if not one.done()]
        last = [one for one in last if not one.done()]


async def test_offline_requests_delay_no_other() -> None:
    waits, room, small = _waits(max_waiting=100, queue_s=100), Room(0), Room(1)
    last = await _begun(_enter_offline(waits, room))
    assert await _enter(waits, small) == "place", "at once: it needs what there is"
    await _cancelled(last)


async def test_offline_requests_time_out_and_return_places_like_others() -> None:
    waits, room = _waits(max_waiting=100, queue_s=0.01), Room(0)
    with pytest.raises(CapacityError):
        await _enter_offline(waits, room)
    gone = await _begun(_enter_offline(waits, room, within_s=100))
    room.free += 1
    waits.wake()
    await _cancelled(gone)
    assert room.free == 1

    def reject() -> str:
        raise RequestError("never")

    with pytest.raises(RequestError):
        await waits.enter(QueuedRequest("", OFFLINE, 1.0), reject, within_s=None, give_back=room.give_back)


async def test_offline_requests_have_separate_shares_and_bounds() -> None:
    waits, room = _waits(max_waiting=16, queue_s=100), Room(0)
    greedy, modest = (Room(0), Room(0))
    flood = [await _begun(_enter_offline(waits, greedy, tenant="greedy")) for _ in range(8)]
    with pytest.raises(CapacityError):
        await _enter_offline(waits, greedy, tenant="greedy")
    other = await _begun(_enter_offline(waits, modest, tenant="modest"))
    greedy.free = modest.free = room.free = 1
    waits.wake()
    await asyncio.wait((*flood, other), return_when=asyncio.FIRST_COMPLETED)
    assert await other == "place", "it is not behind all of the flood"
    await _cancelled(*flood)
