"""Events from any thread reach the waiting call in order."""

from __future__ import annotations

import asyncio

import pytest

from core.types.errors import ReplicaLost
from core.wire.thread_events import CallEvents


async def test_events_come_in_order_and_end() -> None:
    events: CallEvents[int] = CallEvents()

    def tell() -> None:
        for i in range(3):
            events.put(i)
        events.end()

    await asyncio.to_thread(tell)
    assert [event async for event in events] == [0, 1, 2]


async def test_an_end_with_an_error_is_raised_after_what_came_before() -> None:
    events: CallEvents[str] = CallEvents()
    events.put("first")
    events.end(ReplicaLost("gone"))
    seen = []
    with pytest.raises(ReplicaLost, match="gone"):
        async for event in events:
            seen.append(event)
    assert seen == ["first"]
