"""/v1/files: what batches are made of, and what comes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, aclosing

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from core.types.errors import RequestError, RequestTooLarge
from frontend.access.request_context import RequestContext
from frontend.http.batches_api import has_batches
from frontend.http.json_response import json_answer
from frontend.http.multipart import Field, FileBegin, MultipartReader
from frontend.http.pagination import is_newest_first, page, page_size
from frontend.http.request_contexts import HttpRequestContexts, tenant_of
from frontend.responses.byte_budget import ByteBudget
from frontend.responses.store import SMALL_BYTES
from router.batches.batches import Batches
from router.batches.bounds import MAX_FILES
from router.batches.new_file import NewFile
from router.batches.records import INPUT, FileRecord
from router.batches.redis_batches import READ_BYTES

_WITHIN_S = 600.0  # in which a file has come
_MAX_BESIDE = 64 * 2**10  # bytes of a body beside its file
_MAX_NAME = 256
MAX_HELD = 256 * 2**20  # bytes of files that are being read: of each so many at a time as come from Redis together
_LEAST_KEPT_S = 3600  # what a client may ask for at least


class FilesApi:
    """The endpoints. A key's limits count each call as a request."""

    def __init__(self, request_contexts: HttpRequestContexts, batches: Batches | None) -> None:
        self._request_contexts = request_contexts
        self._batches = batches
        self._held = ByteBudget(MAX_HELD, "files")  # by tenant

    def add_to(self, app: FastAPI) -> None:
        for path, method, endpoint in (
            ("/v1/files", "POST", self._create),
            ("/v1/files", "GET", self._list),
            ("/v1/files/{id}", "GET", self._read),
            ("/v1/files/{id}", "DELETE", self._delete),
            ("/v1/files/{id}/content", "GET", self._content),
        ):
            app.add_api_route(path, self._request_contexts.route(endpoint), methods=[method])

    async def _create(self, request: Request, request_context: RequestContext) -> Response:
        with self._request_contexts.noted(request):
            batches = has_batches(self._batches)
            upload = _Upload(batches.new_file(tenant_of(request)), max_file_bytes=batches.max_file_bytes)
            announced = request.headers.get("content-length", "")
            upload.check_size(int(announced) if announced.isdecimal() else 0)
            try:
                record = await upload.taken(request)
            except BaseException:
                await asyncio.shield(upload.file.drop())
                raise
        return json_answer(record.published(), await request_context.charge([]))

    async def _list(self, request: Request, request_context: RequestContext) -> Response:
        query = request.query_params
        with self._request_contexts.noted(request):
            limit = page_size(query, default=MAX_FILES, most=10 * MAX_FILES)
            is_descending = is_newest_first(query)
            batches = has_batches(self._batches)
            after = query.get("after")
            found = await batches.files(tenant_of(request), after=after, is_newest_first=is_descending)
        published = [record.published() for record in found if query.get("purpose") in (None, record.purpose)]
        listed = page(published[:limit], has_more=len(published) > limit)
        return json_answer(listed, await request_context.charge([]))

    async def _read(self, request: Request, request_context: RequestContext) -> Response:
        return json_answer((await self._found(request)).published(), await request_context.charge([]))

    async def _delete(self, request: Request, request_context: RequestContext) -> Response:
        id = request.path_params["id"]
        with self._request_contexts.noted(request):
            await has_batches(self._batches).delete_file(tenant_of(request), id)
        return json_answer({"id": id, "object": "file", "deleted": True}, await request_context.charge([]))

    async def _content(self, request: Request, request_context: RequestContext) -> Response:
        record, tenant = await self._found(request), tenant_of(request)
        with ExitStack() as held:
            if record.num_bytes > SMALL_BYTES:
                with self._request_contexts.noted(request):
                    held.enter_context(self._held.during(tenant, min(record.num_bytes, READ_BYTES)))
            headers = {**await request_context.charge([]), "content-length": str(record.num_bytes)}
            return _Content(has_batches(self._batches).content(tenant, record), headers, held.pop_all())

    async def _found(self, request: Request) -> FileRecord:
        with self._request_contexts.noted(request):
            return await has_batches(self._batches).file(tenant_of(request), request.path_params["id"])


class _Content(StreamingResponse):
    """Of a file, which counts as held until it has been written, or its client is cut off."""

    def __init__(self, content: AsyncIterator[bytes], headers: Mapping[str, str], held: ExitStack) -> None:
        """held: is closed at the end, whichever that is."""
        super().__init__(content, media_type="application/octet-stream", headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


class _Upload:
    """A file on its way in. What comes of it is kept as it comes: this process has little of it at a time."""

    def __init__(self, file: NewFile, *, max_file_bytes: int) -> None:
        self.file = file
        self._max_file_bytes = max_file_bytes
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._is_file = False  # what comes belongs to it

    def check_size(self, num_bytes: int) -> None:
        """Of the whole body: what stands beside the file is little. Raises RequestTooLarge."""
        if num_bytes > self._max_file_bytes + _MAX_BESIDE:
            raise RequestTooLarge(f"file: at most {self._max_file_bytes} bytes are taken here", param="file")

    async def taken(self, request: Request) -> FileRecord:
        """Raises RequestError and what NewFile raises, and HTTPException 408."""
        reader = MultipartReader(request.headers.get("content-type", ""))
        num_bytes = 0
        try:
            async with asyncio.timeout(_WITHIN_S), aclosing(request.stream()) as pieces:
                async for piece in pieces:
                    num_bytes += len(piece)
                    self.check_size(num_bytes)
                    await self._take(reader, piece)
        except TimeoutError:
            raise HTTPException(408, headers={"connection": "close"}) from None
        if not reader.is_over:
            raise RequestError("the body ends in the middle of a part")
        if self._filename is None:
            raise RequestError("file: is missing", param="file")
        if (purpose := self._fields.get("purpose", "")) != INPUT:
            raise RequestError(f"purpose: must be {INPUT}, not {purpose[:64]!r}", param="purpose")
        name = self._filename.encode(errors="replace").decode()[-_MAX_NAME:]
        return await self.file.end(name=name, keep_s=self._keep_s())

    async def _take(self, reader: MultipartReader, piece: bytes) -> None:
        for found in reader.feed(piece):
            match found:
                case Field(name=name, value=value):
                    self._fields[name] = value
                case FileBegin(name=name, filename=filename):
                    self._is_file = name == "file"
                    if self._is_file and self._filename is not None:
                        raise RequestError("file: there are two", param="file")
                    self._filename = filename if self._is_file else self._filename
                case bytes():
                    if self._is_file:
                        await self.file.add(found)

    def _keep_s(self) -> float | None:
        told = self._fields.get("expires_after[seconds]")
        if told is None:
            return None
        if not told.isdecimal() or len(told) > 9 or int(told) < _LEAST_KEPT_S:
            text = f"expires_after[seconds]: must be a number from {_LEAST_KEPT_S}"
            raise RequestError(text, param="expires_after")
        return float(told)
