"""Operator page on the admin listener, at /ui. Self-contained: it loads nothing from other hosts.

The page inserts values, such as ids and tenants from clients, as text nodes only; its content security policy allows
nothing but its own two files. Against DNS rebinding, requests whose Host header is not an address or name of this
machine are rejected.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from frontend.http.event_stream import data

View = Callable[[bool], Mapping[str, Any]]

_HERE = Path(__file__).parent
_UPDATE_S = 0.5
_MAX_WATCHING = 32  # streams; half of the listener's connections
_FILES = {
    "/ui": ("ui.html", "text/html; charset=utf-8"),
    "/ui/page.js": ("ui.js", "text/javascript; charset=utf-8"),
    "/ui/page.css": ("ui.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class UiPage:
    """Operator page, with one event stream for each open page; updates are serialized once for all. Bound to the event
    loop."""

    def __init__(self, view: View, *, host: str) -> None:
        """view: return the current state, with or without the last minutes. host: address of the listener."""
        self._view = view
        self._names = {host.lower(), "localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
        self._num_watching = 0
        self._cached_update: tuple[float, bytes] = (-1.0, b"")

    def add_to(self, app: FastAPI) -> None:
        for path in _FILES:
            app.add_api_route(path, self.file, methods=["GET"])
        app.add_api_route("/ui/events", self.events, methods=["GET"])
        app.add_api_route("/debug/view", self.view, methods=["GET"])

    async def file(self, request: Request) -> Response:
        if rejected := self.rejected(request):
            return rejected
        name, kind = _FILES[request.url.path]
        return Response(await asyncio.to_thread((_HERE / name).read_bytes), media_type=kind, headers=HEADERS)

    async def view(self, request: Request) -> Response:
        return self.rejected(request) or JSONResponse(self._view(True), headers=HEADERS)

    async def events(self, request: Request) -> Response:
        """Stream server-sent events: the full state first, then updates twice a second."""
        if rejected := self.rejected(request):
            return rejected
        if request.method == "HEAD":
            head = Response(media_type="text/event-stream", headers=HEADERS)
            del head.headers["content-length"]
            return head
        if self._num_watching >= _MAX_WATCHING:
            return JSONResponse({"error": "too many pages are open"}, status_code=503)
        return StreamingResponse(self._updates(), media_type="text/event-stream", headers=HEADERS)

    async def _updates(self) -> AsyncIterator[bytes]:
        self._num_watching += 1
        try:
            yield data(dict(self._view(True)), name="all")
            while True:
                await asyncio.sleep(_UPDATE_S)
                yield self._now()
        finally:
            self._num_watching -= 1

    def _now(self) -> bytes:
        now = asyncio.get_running_loop().time()
        at, update = self._cached_update
        if now - at >= _UPDATE_S / 2:
            update = data(dict(self._view(False)), name="now")
            self._cached_update = now, update
        return update

    def rejected(self, request: Request) -> Response | None:
        """Return an error response if the Host header is not this machine's. Guards every route with request data."""
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.strip("[]").lower()
        if name in self._names or _is_address(name):
            return None
        text = "Host is not a name of this machine: use its address, or localhost through ssh -L\n"
        return Response(text, status_code=421, media_type="text/plain", headers=HEADERS)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
