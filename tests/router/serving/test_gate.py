"""Waiting for room: every place that is taken is used or given back, and nobody is forgotten."""

from __future__ import annotations

import asyncio

import pytest

from cluster.words.errors import CapacityError, RequestError
from router.routing.admission import QueuedRequest
from router.serving.gate import AdmissionGate


class Room:
    """Places for requests, as a dispatch would hand them out."""

    def __init__(self, places: int) -> None:
        self.free = places

    def choose(self) -> str | None:
        if not self.free:
            return None
        self.free -= 1
        return "place"

    def give_back(self, place: str) -> None:
        self.free += 1


async def _enter(gate: AdmissionGate[str], room: Room, *, within_s: float | None = None, tenant: str = "") -> str:
    return await gate.enter(QueuedRequest(tenant, 0, 1.0), room.choose, within_s=within_s, give_back=room.give_back)


async def test_with_room_nobody_waits() -> None:
    gate, room = AdmissionGate[str](max_waiting=1, queue_s=1), Room(2)
    assert [await _enter(gate, room) for _ in range(2)] == ["place"] * 2
    assert (len(gate), room.free) == (0, 0)


async def test_each_place_that_becomes_free_lets_one_pass() -> None:
    gate, room = AdmissionGate[str](max_waiting=100, queue_s=10), Room(0)
    waiting = [asyncio.create_task(_enter(gate, room)) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(gate) == 3
    for left in (2, 1, 0):
        room.free += 1
        gate.wake()
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert (len(gate), room.free) == (left, 0)
    assert await asyncio.gather(*waiting) == ["place"] * 3


async def test_who_comes_while_others_wait_does_not_overtake_them() -> None:
    gate, room = AdmissionGate[str](max_waiting=100, queue_s=10), Room(0)
    first = asyncio.create_task(_enter(gate, room))
    await asyncio.sleep(0)
    room.free += 1
    second = asyncio.create_task(_enter(gate, room))
    await asyncio.sleep(0)
    gate.wake()
    assert await first == "place"
    assert not second.done()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert len(gate) == 0


async def test_who_goes_away_in_the_moment_of_its_turn_gives_its_place_back() -> None:
    gate, room = AdmissionGate[str](max_waiting=100, queue_s=10), Room(0)
    task = asyncio.create_task(_enter(gate, room))
    await asyncio.sleep(0)
    room.free += 1
    gate.wake()
    assert room.free == 0, "it has its place, and does not know it yet"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and room.free == 1


async def test_a_place_given_back_by_one_that_went_away_goes_to_the_next() -> None:
    gate, room = AdmissionGate[str](max_waiting=100, queue_s=10), Room(0)
    tasks = [asyncio.create_task(_enter(gate, room)) for _ in range(2)]
    await asyncio.sleep(0)
    room.free += 1
    gate.wake()
    tasks[0].cancel()
    assert await tasks[1] == "place"


async def test_a_wait_that_lasts_too_long_ends_in_a_refusal() -> None:
    gate, room = AdmissionGate[str](max_waiting=100, queue_s=0.05), Room(0)
    with pytest.raises(CapacityError, match=r"within 0\.05 s") as refused:
        await _enter(gate, room)
    assert refused.value.retry_after_s > 0 and len(gate) == 0


async def test_a_request_that_can_never_be_served_hears_so_at_its_turn_and_holds_up_nobody() -> None:
    gate, room = AdmissionGate[str](max_waiting=100, queue_s=10), Room(0)
    is_wrong = False

    def choose() -> str | None:
        if is_wrong:
            raise RequestError("too long")
        return None

    wrong = asyncio.create_task(gate.enter(QueuedRequest("", 0, 1.0), choose, within_s=None, give_back=room.give_back))
    await asyncio.sleep(0)
    right = asyncio.create_task(_enter(gate, room))
    await asyncio.sleep(0)
    is_wrong = True
    room.free += 1
    gate.wake()
    with pytest.raises(RequestError, match="too long"):
        await wrong
    assert await right == "place"


async def test_an_error_that_nobody_foresaw_ends_its_own_request_only() -> None:
    """Who wakes the gate is a replica's reader of frames, which must live."""
    gate, room = AdmissionGate[str](max_waiting=100, queue_s=10), Room(0)

    def choose() -> str | None:
        return 1 / 0 if room.free else None  # type: ignore[return-value]

    bad = asyncio.create_task(gate.enter(QueuedRequest("", 0, 1.0), choose, within_s=None, give_back=room.give_back))
    await asyncio.sleep(0)
    good = asyncio.create_task(_enter(gate, room))
    await asyncio.sleep(0)
    room.free = 1
    gate.wake()
    assert await good == "place"
    with pytest.raises(ZeroDivisionError):
        await bad
