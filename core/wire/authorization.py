"""Authorization of gRPC calls by the caller's certificate, before any handler sees the call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc import aio

from core.identity.process_name import ProcessName
from core.identity.rules import RULES, RpcRule

logger = logging.getLogger(__name__)

_FIRST_S = 10.0  # limit for the first message of a stream, which names its owner

_Context: TypeAlias = aio.ServicerContext[Any, Any]


class Guard(aio.ServerInterceptor):  # type: ignore[misc]  # gRPC requires this base class
    """Server interceptor of `callee`. An RPC without a rule in core.identity.rules gets PERMISSION_DENIED."""

    def __init__(self, callee: ProcessName) -> None:
        self._callee = callee

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        method = details.method
        rule = RULES.get(method)
        if rule is None:
            return grpc.stream_stream_rpc_method_handler(self._reject_unknown(method))
        handler = await continuation(details)
        return handler and self._guarded(method, rule, handler)

    def _guarded(self, method: str, rule: RpcRule, handler: Any) -> Any:
        """Wrap the handler: it is called only if the rule accepts the caller and the first message."""

        async def answer(request: Any, context: _Context) -> Any:
            await self._admit(method, rule, request, context)
            return await handler.unary_unary(request, context)

        async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
            await self._admit(method, rule, request, context)
            async with aclosing(handler.unary_stream(request, context)) as answers:
                async for message in answers:
                    yield message

        async def converse(requests: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
            first = await _first(requests)
            await self._admit(method, rule, first, context)
            async with aclosing(handler.stream_stream(_again(first, requests), context)) as answers:
                async for message in answers:
                    yield message

        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.request_streaming:
            assert handler.response_streaming, "client-streaming RPCs are not used"
            return grpc.stream_stream_rpc_method_handler(converse, **codec)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, **codec)
        return grpc.unary_unary_rpc_method_handler(answer, **codec)

    async def _admit(self, method: str, rule: RpcRule, message: Any | None, context: _Context) -> None:
        caller = _named(_uri(context))
        if rejection := rule.verdict(message, caller, self._callee):
            await _reject(method, rejection, context)

    def _reject_unknown(self, method: str) -> Callable[[Any, _Context], AsyncIterator[Any]]:
        async def reject(requests: Any, context: _Context) -> AsyncIterator[Any]:
            await _reject(method, "no such RPC", context)
            yield  # makes this function a generator

        return reject


async def _first(requests: AsyncIterator[Any]) -> Any | None:
    """Return the first message; None if the stream ends or times out without one."""
    try:
        async with asyncio.timeout(_FIRST_S):
            return await anext(aiter(requests), None)
    except TimeoutError:
        return None


async def _again(first: Any, others: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for message in others:
        yield message


async def _reject(method: str, rejection: str, context: _Context) -> NoReturn:
    logger.warning("refused method=%s peer=%s: %s", method, context.peer(), rejection)
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, rejection)
    raise AssertionError("abort returned")


def _uri(context: _Context) -> bytes:
    """Return the URI in the caller's certificate; empty for none or several."""
    found = context.auth_context().get("peer_uri", ())
    return found[0] if len(found) == 1 else b""


@lru_cache(maxsize=4096)
def _named(uri: bytes) -> ProcessName | None:
    return ProcessName.parse(uri.decode(errors="replace"))
