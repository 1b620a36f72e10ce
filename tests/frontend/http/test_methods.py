"""HTTP methods: HEAD for every GET, OPTIONS, and 405 with the methods of the path, at both listeners."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import NamedTuple

import httpx
import pytest
import pytest_asyncio
from fastapi.routing import APIRoute

from core.spec.schema import RouterSpec
from frontend.access.access import Access
from frontend.admin.admin_server import UiPage, create_admin_app
from frontend.http.app import create_app
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.plain_http import http_client
from tests.support.tiny_service import MakeCompletions

pytestmark = pytest.mark.asyncio(loop_scope="module")

_PROBES = {"live": lambda: True, "ready": lambda: False, "startup": lambda: True}


class Listener(NamedTuple):
    client: httpx.AsyncClient
    get_paths: list[str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def listeners(completions: MakeCompletions) -> AsyncIterator[dict[str, Listener]]:
    service = completions(FakeTokenService())
    app = create_app(
        service, access=Access.anybody(), is_healthy=lambda: True, probes=_PROBES, spec=RouterSpec(cors_origins="*")
    )
    admin = create_admin_app(
        deployment="d",
        router="r",
        health=lambda: {"decode": 1},
        is_ready=lambda: True,
        metrics=lambda: b"# none\n",
        explain_route=lambda id: {},
        page=UiPage(lambda has_history: {}, host="127.0.0.1"),
    )
    async with AsyncExitStack() as stack:
        clients = {}
        for name, one in (("public", app), ("admin", admin)):
            address = await stack.enter_async_context(serve_http(one))
            url = "http://{}:{}".format(*address)
            paths = [route.path for route in one.routes if isinstance(route, APIRoute) and "GET" in route.methods]
            clients[name] = Listener(await stack.enter_async_context(http_client(base_url=url)), paths)
        yield clients
    service.close()


_WHOLE = ("content-length", "content-type", "cache-control", "content-security-policy", "x-content-type-options")


@pytest.mark.parametrize("name", ["public", "admin"])
async def test_head_has_the_headers_of_get_and_no_body(listeners: dict[str, Listener], name: str) -> None:
    client, paths = listeners[name]
    assert len(paths) > 6
    for path in paths:
        path = path.replace("{model_id:path}", "tiny")
        head = await client.head(path)
        assert head.content == b"", path
        if path == "/ui/events":
            assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            continue
        whole = await client.get(path)
        assert head.status_code == whole.status_code, path
        for header in _WHOLE:
            assert head.headers.get(header) == whole.headers.get(header), (path, header)


@pytest.mark.parametrize(
    ("name", "path", "allowed"),
    [
        ("public", "/v1/models", "GET, HEAD, OPTIONS"),
        ("public", "/v1/models/tiny", "GET, HEAD, OPTIONS"),
        ("public", "/v1/chat/completions", "OPTIONS, POST"),
        ("public", "/v1/messages", "OPTIONS, POST"),
        ("public", "/v1/responses", "OPTIONS, POST"),
        ("public", "/v1/responses/resp_1", "DELETE, GET, HEAD, OPTIONS"),
        ("public", "/tokenize", "OPTIONS, POST"),
        ("public", "/health", "GET, HEAD, OPTIONS"),
        ("public", "/health/ready", "GET, HEAD, OPTIONS"),
        ("admin", "/metrics", "GET, HEAD, OPTIONS"),
        ("admin", "/health", "GET, HEAD, OPTIONS"),
        ("admin", "/ui/events", "GET, HEAD, OPTIONS"),
    ],
)
async def test_other_methods_name_those_of_the_path(
    listeners: dict[str, Listener], name: str, path: str, allowed: str
) -> None:
    client = listeners[name].client
    options, put = await client.options(path), await client.put(path)
    assert (options.status_code, options.headers["allow"], options.content) == (204, allowed, b"")
    assert (put.status_code, put.headers["allow"]) == (405, allowed)
    for method in ("HEAD", "DELETE"):
        if method not in allowed:
            assert (await client.request(method, path)).headers["allow"] == allowed


async def test_unknown_path_has_no_methods(listeners: dict[str, Listener]) -> None:
    assert (await listeners["public"].client.options("/v1/nothing")).status_code == 404


async def test_web_pages_may_ask_before_a_request(listeners: dict[str, Listener]) -> None:
    asked = {"origin": "https://chat.example.com", "access-control-request-method": "HEAD"}
    answer = await listeners["public"].client.options("/v1/models", headers=asked)
    assert answer.status_code == 200 and "HEAD" in answer.headers["access-control-allow-methods"]
