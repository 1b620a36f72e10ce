"""GET and DELETE /v1/streams/{request_id}: a streamed answer whose client lost its connection is taken up, or ended."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from frontend.http.event_stream import while_connected
from frontend.http.held_streams import HeldStream, HeldStreams, number_after

_PATH = "/v1/streams/{request_id:path}"  # a client may have slashes in its ids


class StreamsApi:
    def __init__(self, streams: HeldStreams) -> None:
        self._streams = streams

    def add_to(self, app: FastAPI) -> None:
        app.add_api_route(_PATH, self.take_up, methods=["GET"])
        app.add_api_route(_PATH, self.end, methods=["DELETE"])

    async def take_up(self, request_id: str, request: Request) -> Response:
        held = self._streams.find(request.scope, request_id)
        request.state.request_id = request_id  # by which it can be taken up once more
        return _TakenUp(held, number_after(request.scope))

    async def end(self, request_id: str, request: Request) -> Response:
        self._streams.find(request.scope, request_id).leave()
        return JSONResponse({"id": request_id, "object": "stream", "deleted": True})


class _TakenUp(Response):
    def __init__(self, held: HeldStream, after: int) -> None:
        super().__init__()
        self._held = held
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._held.play(send, after=self._after))
