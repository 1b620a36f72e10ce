"""Both servers that a gRPC door may have, as a plain client sees them: what the door's handlers rely upon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest
import pytest_asyncio

from frontend.http import polled_server
from frontend.http.polled_server import PolledServer, open_server

pytestmark = pytest.mark.asyncio

Handler: TypeAlias = Callable[[Any, Any], Awaitable[None]]
_IN_TIME_S = 10.0
_LARGE = b"x" * (64 << 10)


@pytest.fixture(params=["polled", "aio"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "aio":
        monkeypatch.setattr(polled_server, "KNOWN_VERSIONS", ())
    return str(request.param)


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Methods of which tests say what they do."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        handler = self.handlers.get(details.method)
        return handler and grpc.stream_stream_rpc_method_handler(handler)


class Served:
    def __init__(self, service: Service, server: grpc.aio.Server, channel: grpc.aio.Channel) -> None:
        self.service, self.server, self.channel = service, server, channel

    def ask(self, handler: Any, **call: Any) -> grpc.aio.StreamStreamCall:
        """A call that this handler serves."""
        method = f"/test/{len(self.service.handlers)}"
        self.service.handlers[method] = handler
        return self.channel.stream_stream(method)(**call)


@asynccontextmanager
async def _served() -> AsyncIterator[Served]:
    service, server = Service(), open_server(interceptors=[], options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers([service])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(_IN_TIME_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield Served(service, server, channel)
        finally:
            await server.stop(None)


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with _served() as served:
        yield served


async def _code(call: grpc.aio.Call) -> grpc.StatusCode:
    return await asyncio.wait_for(call.code(), _IN_TIME_S)


async def test_another_version_of_grpc_has_its_own_server(kind: str, served: Served) -> None:
    assert isinstance(served.server, PolledServer) == (kind == "polled")


async def test_messages_come_in_order_with_metadata_before_and_after(served: Served) -> None:
    async def double(messages: Any, context: Any) -> None:
        await context.send_initial_metadata((("began", "1"),))
        context.set_trailing_metadata((("ended", "2"),))
        async for message in messages:
            await context.write(2 * message)

    call = served.ask(double)
    for number in range(100):
        await call.write(b"%d" % number)
    await call.done_writing()
    assert [message async for message in call] == [2 * (b"%d" % number) for number in range(100)]
    assert (await call.initial_metadata())["began"] == "1"
    assert (await call.trailing_metadata())["ended"] == "2"
    assert await _code(call) is grpc.StatusCode.OK


async def test_a_generator_is_a_handler_too(served: Served) -> None:
    async def count(messages: Any, context: Any) -> AsyncIterator[bytes]:
        for number in range(3):
            yield b"%d" % number

    call = served.ask(count)
    await call.done_writing()
    assert [message async for message in call] == [b"0", b"1", b"2"]


async def test_what_nobody_serves_is_said(served: Served) -> None:
    call = served.channel.stream_stream("/test/none")()
    assert await _code(call) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("kind", ["polled"], indirect=True)
async def test_a_method_that_is_no_text_is_served_by_nobody() -> None:
    """Where grpc.aio's own server leaves the call without an answer."""
    async with _served() as served:
        call = served.channel.stream_stream(b"/test/\xff")()
        assert await _code(call) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_bug_is_a_status_and_the_next_call_is_served(served: Served) -> None:
    async def fail(messages: Any, context: Any) -> None:
        raise KeyError("a bug")

    async def work(messages: Any, context: Any) -> None:
        pass

    call = served.ask(fail)
    assert await _code(call) is grpc.StatusCode.UNKNOWN
    assert "KeyError" in await call.details()
    assert await _code(served.ask(work)) is grpc.StatusCode.OK


async def test_an_abort_ends_the_handler_where_it_is(served: Served) -> None:
    went_on = []

    async def reject(messages: Any, context: Any) -> None:
        await context.write(b"one")
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", (("why", "full"),))
        went_on.append(True)

    call = served.ask(reject)
    assert await call.read() == b"one"
    assert await _code(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await call.details() == "no room"
    assert (await call.trailing_metadata())["why"] == "full"
    assert not went_on


@pytest.mark.parametrize("way", ["cancel", "deadline"])
async def test_a_client_that_goes_ends_the_handler_where_it_waits(served: Served, way: str) -> None:
    ended: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()

    async def wait(messages: Any, context: Any) -> None:
        left_s = context.time_remaining()
        await context.write(b"begun")
        try:
            await asyncio.Event().wait()
        finally:
            ended.set_result(left_s)

    call = served.ask(wait, timeout=None if way == "cancel" else 1.0)
    assert await call.read() == b"begun"
    if way == "cancel":
        call.cancel()
    left_s = await asyncio.wait_for(ended, _IN_TIME_S)
    if way == "cancel":
        assert left_s is None
    else:
        assert left_s is not None
        assert 0 < left_s < 2.0
        assert await _code(call) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_read_that_was_given_up_loses_no_message(served: Served) -> None:
    given_up = asyncio.Event()

    async def read(messages: Any, context: Any) -> None:
        try:
            async with asyncio.timeout(0.001):
                await anext(messages)
        except TimeoutError:
            given_up.set()
        await context.write(await anext(messages))

    if not isinstance(served.server, PolledServer):
        pytest.skip("grpc.aio loses it")
    call = served.ask(read)
    await given_up.wait()
    await call.write(b"late")
    assert await call.read() == b"late"


async def test_who_reads_late_is_heard_of_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled_server, "LATER_S", 3600.0)

    async def pour(messages: Any, context: Any) -> None:
        for _ in range(100):
            await context.write(_LARGE)
            await asyncio.sleep(0)  # the server looks, and finds it under way
            await asyncio.sleep(0)

    assert sum([len(message) async for message in served.ask(pour)]) == 100 * len(_LARGE)


async def test_what_is_waited_for_is_looked_for_often(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polled_server, "LATER_S", 3600.0)
    waits = asyncio.Event()

    async def echo(messages: Any, context: Any) -> None:
        await context.write(await anext(messages))
        waits.set()
        await context.write(await anext(messages))

    call = served.ask(echo)
    for message in (b"one", b"two"):
        await call.write(message)
        assert await call.read() == message
        await waits.wait()


async def test_who_reads_nothing_holds_up_his_own_handler_and_no_other(served: Served) -> None:
    all_written = asyncio.Event()

    async def pour(messages: Any, context: Any) -> None:
        for _ in range(400):
            await context.write(_LARGE)
        all_written.set()

    async def echo(messages: Any, context: Any) -> None:
        async for message in messages:
            await context.write(message)

    slow, quick = served.ask(pour), served.ask(echo)
    for number in range(300):
        await quick.write(b"%d" % number)
        assert await quick.read() == b"%d" % number
    assert not all_written.is_set()  # 25 MB, of which windows and sockets hold a part
    assert sum([len(message) async for message in slow]) == 400 * len(_LARGE)
    assert all_written.is_set()


async def test_what_is_written_now_waits_for_nothing_and_is_refused_where_something_waits(
    kind: str, served: Served
) -> None:
    if kind == "aio":
        pytest.skip("it has no such way")

    async def pour(messages: Any, context: Any) -> None:
        assert not context.write_now(b"before all others")
        await context.write(b"0")
        number = 1
        while number < 100:
            number += context.write_now(b"%d" % number)
            assert not context.write_now(b"before that is taken over")
            await asyncio.sleep(0)
        await context.write(b"100")
        rejected.append(context.write_now(b"101"))

    rejected: list[bool] = []
    assert [message async for message in served.ask(pour)] == [b"%d" % number for number in range(101)]
    assert rejected == [False]


async def test_many_calls_at_once_are_all_served(served: Served) -> None:
    async def one(messages: Any, context: Any) -> None:
        await context.write(await anext(messages))

    async def ask(number: int) -> bytes:
        call = served.ask(one)
        await call.write(b"%d" % number)
        return bytes(await call.read())

    assert await asyncio.gather(*map(ask, range(300))) == [b"%d" % number for number in range(300)]


@pytest.mark.parametrize("is_patient", [True, False])
async def test_stopping_waits_for_what_runs_as_long_as_it_may(served: Served, is_patient: bool) -> None:
    may_end = asyncio.Event()

    async def wait(messages: Any, context: Any) -> None:
        await context.write(b"begun")
        await may_end.wait()
        await context.write(b"done")

    call = served.ask(wait)
    assert await call.read() == b"begun"
    stopping = asyncio.create_task(served.server.stop(_IN_TIME_S if is_patient else 0.01))
    if is_patient:
        may_end.set()
        assert await call.read() == b"done"
        assert await _code(call) is grpc.StatusCode.OK
    else:
        assert await _code(call) is not grpc.StatusCode.OK
    await asyncio.wait_for(stopping, _IN_TIME_S)
