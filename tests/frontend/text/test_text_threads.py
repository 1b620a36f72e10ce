"""Order and limits of work on large texts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from core.types.errors import CapacityError, ModelUnavailable
from frontend.text.text_threads import TextThreads


@pytest.fixture
def go_on() -> threading.Event:
    return threading.Event()


@pytest.fixture
def make(go_on: threading.Event) -> Iterator[Callable[..., TextThreads]]:
    """make(num_threads=…, max_pending=…) -> TextThreads"""
    made = list[TextThreads]()

    def threads(**sizes: int) -> TextThreads:
        made.append(TextThreads(**sizes))
        return made[-1]

    yield threads
    go_on.set()
    for each in made:
        each.close()


async def test_one_key_leaves_a_thread_to_others(make: Callable[..., TextThreads], go_on: threading.Event) -> None:
    threads = make(num_threads=3)
    held = [asyncio.ensure_future(threads.run("large", go_on.wait, 60)) for _ in range(10)]
    assert await asyncio.wait_for(threads.run("other", lambda: "done"), 30) == "done"
    assert not any(one.done() for one in held)
    go_on.set()
    assert await asyncio.gather(*held) == [True] * 10


async def test_keys_take_turns(make: Callable[..., TextThreads], go_on: threading.Event) -> None:
    threads, order = make(num_threads=1), list[str]()
    first = asyncio.ensure_future(threads.run("first", go_on.wait, 60))
    asked = [
        asyncio.ensure_future(threads.run(key_id, order.append, key_id)) for key_id in ("a", "a", "a", "b", "c", "b")
    ]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, *asked)
    assert order == ["a", "b", "c", "a", "b", "a"]


async def test_one_key_leaves_a_quarter_of_the_places(make: Callable[..., TextThreads], go_on: threading.Event) -> None:
    threads = make(num_threads=2, max_pending=8)
    held = [asyncio.ensure_future(threads.run("large", go_on.wait, 60)) for _ in range(6)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityError):
        await threads.run("large", str)
    held += [asyncio.ensure_future(threads.run(f"other-{i}", go_on.wait, 60)) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityError):
        await threads.run("one more", str)
    go_on.set()
    await asyncio.gather(*held)
    assert await threads.run("large", str) == ""


async def test_work_of_cancelled_callers_is_skipped(make: Callable[..., TextThreads], go_on: threading.Event) -> None:
    threads, done = make(num_threads=1, max_pending=4), list[str]()
    first = asyncio.ensure_future(threads.run("", go_on.wait, 60))
    gone = [asyncio.ensure_future(threads.run("", done.append, "gone")) for _ in range(3)]
    await asyncio.sleep(0)
    for one in gone:
        one.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    # The queue has room again.
    waiting = [asyncio.ensure_future(threads.run("", done.append, "run")) for _ in range(3)]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, *waiting)
    assert done == ["run"] * 3


async def test_failures_reach_their_caller(make: Callable[..., TextThreads]) -> None:
    with pytest.raises(ZeroDivisionError):
        await make().run("key", lambda: 1 / 0)


async def test_close_finishes_running_work_and_rejects_queued_work(
    make: Callable[..., TextThreads], go_on: threading.Event
) -> None:
    threads = make(num_threads=1)
    begun, waiting = (asyncio.ensure_future(threads.run("a", go_on.wait, 60)) for _ in range(2))
    await asyncio.sleep(0)
    threads.close()
    with pytest.raises(ModelUnavailable, match="retry"):
        await waiting
    with pytest.raises(ModelUnavailable):
        await threads.run("a", lambda: "too late")
    go_on.set()
    assert await begun
