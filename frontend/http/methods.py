"""ASGI middleware for HTTP methods: HEAD for every GET, OPTIONS, and the `Allow` header of a 405."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Methods:
    """Adds HEAD to the routes with GET, as Starlette's own routes have it; the server drops the body.

    Add it first, so that it is the innermost middleware: it looks at each message of a response.
    """

    def __init__(self, app: ASGIApp, *, routes: Sequence[BaseRoute]) -> None:
        """routes: the application's routes; all must be added before the first request."""
        self._app = app
        self._routes = [route for route in routes if isinstance(route, Route) and route.methods]
        for route in self._routes:
            if "GET" in (methods := _methods(route)):
                methods.add("HEAD")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] == "OPTIONS" and (allowed := self._allowed(scope)):
            return await Response(status_code=204, headers={"allow": allowed})(scope, receive, send)

        def send_allowed(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and message["status"] == 405:
                MutableHeaders(scope=message)["allow"] = self._allowed(scope)
            return send(message)

        await self._app(scope, receive, send_allowed)

    def _allowed(self, scope: Scope) -> str:
        """Return the methods of all routes with this path; empty if there is none."""
        found = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
        return ", ".join(sorted({"OPTIONS"}.union(*map(_methods, found)))) if found else ""


def _methods(route: Route) -> set[str]:
    assert route.methods
    return route.methods
