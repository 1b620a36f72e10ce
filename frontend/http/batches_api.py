"""POST and GET /v1/batches, GET /v1/batches/{id}, POST /v1/batches/{id}/cancel."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from core.types.errors import RequestError
from frontend.access.request_context import RequestContext
from frontend.http.batch_types import BatchBody
from frontend.http.json_response import json_answer
from frontend.http.pagination import page, page_size
from frontend.http.request_contexts import HttpRequestContexts, client_of, tenant_of
from frontend.openai.fields import ignored_header
from router.batches.batches import Batches

_LISTED, _MAX_LISTED = 20, 100


class BatchesApi:
    """The endpoints. A key's limits count each call as a request, and then each line."""

    def __init__(self, request_contexts: HttpRequestContexts, batches: Batches | None) -> None:
        """batches: None where there are none."""
        self._request_contexts = request_contexts
        self._batches = batches

    def add_to(self, app: FastAPI) -> None:
        for path, method, endpoint in (
            ("/v1/batches", "POST", self._create),
            ("/v1/batches", "GET", self._list),
            ("/v1/batches/{id}", "GET", self._read),
            ("/v1/batches/{id}/cancel", "POST", self._cancel),
        ):
            app.add_api_route(path, self._request_contexts.route(endpoint), methods=[method])

    async def _create(self, request: Request, request_context: RequestContext) -> Response:
        body = await self._request_contexts.read(BatchBody, request, BatchBody.check)
        with self._request_contexts.noted(request):
            record = await has_batches(self._batches).create(
                client_of(request),
                input_file_id=body.input_file_id,
                endpoint=body.endpoint,
                metadata=body.metadata,
            )
        return json_answer(record.published(), {**await request_context.charge([]), **ignored_header(body)})

    async def _list(self, request: Request, request_context: RequestContext) -> Response:
        query = request.query_params
        with self._request_contexts.noted(request):
            limit = page_size(query, default=_LISTED, most=_MAX_LISTED)
            batches = has_batches(self._batches)
            found, has_more = await batches.batches(tenant_of(request), after=query.get("after"), limit=limit)
        published = [record.published() for record in found]
        return json_answer(page(published, has_more=has_more), await request_context.charge([]))

    async def _read(self, request: Request, request_context: RequestContext) -> Response:
        with self._request_contexts.noted(request):
            record = await has_batches(self._batches).batch(tenant_of(request), request.path_params["id"])
        return json_answer(record.published(), await request_context.charge([]))

    async def _cancel(self, request: Request, request_context: RequestContext) -> Response:
        with self._request_contexts.noted(request):
            record = await has_batches(self._batches).cancel(tenant_of(request), request.path_params["id"])
        return json_answer(record.published(), await request_context.charge([]))


def has_batches(batches: Batches | None) -> Batches:
    """Raises RequestError where there are none."""
    if batches is None:
        raise RequestError("files and batches are off here; the operator's router.batch_mib turns them on")
    return batches
