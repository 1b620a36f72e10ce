"""Transport of ClusterError through gRPC calls: the caller gets an error of the same class."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, TypeVar, cast

import grpc
from grpc import aio

from core.types import errors
from core.types.errors import CapacityError, ClusterError, ReplicaLost, RequestError, outcome_of

_MAX_RETRY_S = 3600.0
# Metadata of an error: its class, and the facts that a caller acts on.
_ERROR_KEY, _PARAM_KEY, _RETRY_KEY = "cluster-error", "cluster-error-param", "cluster-error-retry-after-s"

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


async def abort_with(context: aio.ServicerContext[Any, Any], error: ClusterError) -> NoReturn:
    """End a call with `error`. The caller converts it back with `error_of`."""
    status = getattr(grpc.StatusCode, outcome_of(error).grpc)
    facts = [(_ERROR_KEY, type(error).__name__)]
    if isinstance(error, RequestError) and error.param is not None:
        facts.append((_PARAM_KEY, error.param))
    if isinstance(error, CapacityError):
        facts.append((_RETRY_KEY, str(error.retry_after_s)))
    await context.abort(status, str(error), tuple(facts))
    raise AssertionError("abort returned")


@asynccontextmanager
async def aborting(context: aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End the call with the block's error, if the block raises a ClusterError."""
    try:
        yield
    except ClusterError as error:
        await abort_with(context, error)


def rejects(method: Method) -> Method:
    """Decorate a unary-unary servicer method: a ClusterError ends the call with that error."""

    @functools.wraps(method)
    async def call(servicer: Any, request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        async with aborting(context):
            return await method(servicer, request, context)

    return cast(Method, call)


def error_of(error: aio.AioRpcError, *, peer: str) -> ClusterError:
    """Return the error of a failed call to `peer`: the peer's own, or ReplicaLost if it sent none."""
    facts = {key: str(value) for key, value in error.trailing_metadata() or ()}
    kind = getattr(errors, facts.get(_ERROR_KEY, ""), None)
    text = error.details() or ""
    if isinstance(kind, type) and issubclass(kind, ClusterError):
        with suppress(TypeError, ValueError):  # the peer's metadata may be malformed
            if issubclass(kind, CapacityError) and _RETRY_KEY in facts:
                return kind(text, retry_after_s=_seconds(facts[_RETRY_KEY]))
            return kind(text, param=facts.get(_PARAM_KEY)) if issubclass(kind, RequestError) else kind(text)
    return ReplicaLost(f"{peer}: {error.code().name}: {error.details()}")


def _seconds(text: str) -> float:
    """Parse a retry delay. Raises ValueError."""
    if not 0 <= (seconds := float(text)) <= _MAX_RETRY_S:
        raise ValueError(f"retry delay {text} is out of range [0, {_MAX_RETRY_S:g}]")
    return seconds
