"""gRPC endpoint: cluster.v1.Inference, with health and reflection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as pb_grpc
from core.types.errors import ClusterError, DeployError, RateLimited, ReplicaLost, outcome_of
from core.types.network import format_address
from core.wire.channel import PINGS_ALLOWED, keepalive
from frontend.access.access import Access, Client
from frontend.access.limits import RequestContext
from frontend.grpc.key_interceptor import KeyInterceptor, authorization_of
from frontend.grpc.messages import (
    detokenize_request_of,
    prompt_logprobs_of,
    request_of,
    response_bytes,
    status_of,
    tokenize_request_of,
)
from frontend.http.connections import GRPC_ENDPOINT, Certificates, ConnectionLimits
from frontend.openai.fields import also_ignored
from frontend.text.completion import Completion, Completions, Models
from frontend.text.completion_request import MAX_REQUEST_BYTES, CompletionRequest
from frontend.text.prompt_encoder import num_chars
from router.telemetry.tracing import Trace

_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
READINESS = "readiness"  # service name in the health service, for probes

_LAST_WORDS_S = 1.0  # for ended calls to send their status
_UNREAD_BYTES = 16 << 10  # per stream
_MAX_PENDING = 8192  # calls accepted but not yet handled
_Status = health_pb2.HealthCheckResponse
_MAX_WATCHERS = 1024
_LARGE = 16 << 10  # bytes; larger messages are converted on another thread
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # Limits what gRPC buffers of a message before it is read. By default it grows with the network's bandwidth.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
    # A client that vanishes is noticed within 15 s. Clients may ping as well, also while waiting for a first token.
    *keepalive(ping_every_ms=10_000, answer_within_ms=5_000),
    *PINGS_ALLOWED,
)


async def open_grpc_api(
    served: Completions | Models,
    *,
    access: Access,
    host: str,
    port: int,
    is_port_shared: bool = False,
    certificates: Certificates | None = None,
    limits: ConnectionLimits = GRPC_ENDPOINT,
) -> GrpcApi:
    """Serve on host:port (0: any free port) in this event loop, with TLS if certificates are given. Raises DeployError.

    served: one model, or several. is_port_shared: several processes of one node listen on the same port, and the kernel
    distributes connections; otherwise a port in use is an error. Streams beyond a connection's limit wait or fail with
    UNAVAILABLE; clients open another connection for them.
    """
    models = Models.of(served)
    inference = InferenceServicer(models, access)
    gate = KeyInterceptor(
        access,
        free=[health.SERVICE_NAME],
        within_s=limits.message_s,
        max_waiting=2 * limits.streams,
        entered={f"/{SERVICE}/{method}": inference.entered for method in ("Generate", "Tokenize", "Detokenize")},
    )
    server = grpc.aio.server(
        interceptors=[gate],
        options=(
            *_OPTIONS,
            ("grpc.max_metadata_size", limits.header_bytes),
            ("grpc.absolute_max_metadata_size", limits.header_bytes),
            ("grpc.server_handshake_timeout_ms", round(1e3 * limits.open_s)),
            ("grpc.max_connection_idle_ms", round(1e3 * limits.idle_s)),
            ("grpc.max_connection_age_ms", round(1e3 * limits.age_s)),  # then gRPC asks the client to reconnect
            (
                "grpc.max_connection_age_grace_ms",
                round(1e3 * models.default.max_request_s),
            ),  # for running calls to finish
            ("grpc.max_concurrent_streams", limits.streams),
            # Calls that arrive while the event loop is busy; above its default of 1,000 gRPC drops some silently.
            ("grpc.server.max_pending_requests", _MAX_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
            ("grpc.so_reuseport", int(is_port_shared)),
        ),
    )
    endpoint_health = EndpointHealth()
    pb_grpc.add_InferenceServicer_to_server(inference, server)
    health_pb2_grpc.add_HealthServicer_to_server(endpoint_health, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = format_address(host, port)
    try:
        if certificates is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, certificates.for_grpc())
    except RuntimeError as error:
        raise DeployError(
            f"gRPC port {address} cannot be opened; it is in use, or not an address of this host: {error}"
        ) from error
    await server.start()
    endpoint = GrpcApi(server, inference, endpoint_health, bound)
    endpoint.set_health(is_ready=True)
    return endpoint


@dataclass(eq=False)
class GrpcApi:
    """Server, from `open_grpc_api` until `close`."""

    server: grpc.aio.Server
    inference: InferenceServicer
    health: EndpointHealth
    port: int

    def set_health(self, *, is_live: bool = True, is_ready: bool) -> None:
        """Set the health service's status: liveness for the server (""), readiness for "readiness" and
        cluster.v1.Inference. Watchers are notified at once."""
        self.health.set({"": is_live, READINESS: is_ready, SERVICE: is_ready})

    async def close(self, *, grace_s: float) -> None:
        """Report not ready, reject new requests, let running ones finish for grace_s, then end all.

        Does not wait for watchers of the health service.
        """
        self.set_health(is_ready=False)
        self.inference.is_closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.inference.idle.wait()
        # Called once: two overlapping calls have crashed the process in grpc 1.85.
        await self.server.stop(_LAST_WORDS_S)


class InferenceServicer(pb_grpc.InferenceServicer):
    """Servicer of cluster.v1.Inference. Writes responses instead of yielding, so that a cancellation ends the handler
    wherever it waits."""

    def __init__(self, models: Models, access: Access) -> None:
        self.is_closing = False  # new requests are rejected
        self.idle = asyncio.Event()  # set while no request is running
        self.idle.set()
        self._num_running = 0
        self._models = models
        self._access = access
        self._request_contexts: dict[_Context, RequestContext] = {}  # of running calls

    @asynccontextmanager
    async def entered(self, context: _Context) -> AsyncIterator[None]:
        """Hold the key's slot and tokens for a call, from before the message is read until the call ends."""
        async with AsyncExitStack() as stack:
            async with _statuses(context):
                client = self._client(context)
                with self._audited("", context, client):
                    reservation = self._access.limits.entered(client.key)
                    self._request_contexts[context] = await stack.enter_async_context(reservation)
            try:
                yield
            finally:
                del self._request_contexts[context]

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> None:
        async with _statuses(context), self._counted(), self._traced(context) as trace:
            request_context = self._request_contexts[context]
            served, completion_request = await self._read(request, context, request_context)
            completion = await served.open(completion_request, trace=trace)
            headers = {**await request_context.charge([completion]), **also_ignored({}, completion.ignored)}
            await _send_headers(headers, context)  # before the first token
            is_first, id, tokenizer = True, completion_request.id, completion.service.tokenizer
            async with completion.run() as arrivals:
                async for events in arrivals:
                    if is_first:
                        await self._write_prompt_logprobs(completion, context)
                        is_first = False
                    for event in events:
                        await context.write(response_bytes(event, request_id=id, tokenizer=tokenizer))

    async def _write_prompt_logprobs(self, completion: Completion, context: _Context) -> None:
        """Write the prompt's log-probabilities, if requested; each message is built on another thread."""
        service, key_id, start = completion.service, completion.request.key_id, 1
        for part in () if completion.prompt_logprobs is None else completion.prompt_logprobs.parts():
            ids = completion.prompt_ids[start : start + len(part)]
            message = await service.threads.run(key_id, prompt_logprobs_of, ids, part, service.tokenizer)
            await context.write(message)
            start += len(part)

    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        async with _statuses(context), self._counted():
            client = self._client(context)
            with self._audited("", context, client):
                build = partial(tokenize_request_of, request, peer=context.peer())
                completion_request = client.bound(await self._build(build, request, client))
                served = self._models.find(completion_request.model)
                ids = await served.prompts.tokenize(completion_request)
            await _send_headers(await self._request_contexts[context].charge([]), context)
            return pb.TokenizeResponse(token_ids=ids, max_context=served.model.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        async with _statuses(context), self._counted():
            client = self._client(context)
            with self._audited("", context, client):
                served = self._models.find(request.model)
                build = detokenize_request_of(request, max_context=served.model.max_model_len, peer=context.peer())
                text = await served.prompts.detokenize(client.bound(build))
            await _send_headers(await self._request_contexts[context].charge([]), context)
            return pb.DetokenizeResponse(text=text)

    @asynccontextmanager
    async def _traced(self, context: _Context) -> AsyncIterator[Trace | None]:
        tracing = self._models.default.tracing
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        if tracing is None or (trace := tracing.begin(f"{SERVICE}/Generate", headers)) is None:
            yield None
            return
        status, is_our_fault = "", False
        # Initial metadata would cost a write of its own.
        context.set_trailing_metadata((("traceparent", trace.traceparent),))
        try:
            yield trace
        except Exception as error:
            outcome = outcome_of(error)
            status, is_our_fault = outcome.grpc, outcome.http >= 500
            raise
        finally:
            trace.end(status=status, is_our_fault=is_our_fault)

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        if self.is_closing:
            raise ReplicaLost("this router is closing; retry, or use another router")
        self._num_running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self.idle.set()

    def _client(self, context: _Context) -> Client:
        return self._access.identify(authorization_of(context.invocation_metadata()))

    async def _read(
        self, request: pb.GenerateRequest, context: _Context, request_context: RequestContext
    ) -> tuple[Completions, CompletionRequest]:
        deadline_s, client = context.time_remaining(), self._client(context)
        with self._audited(request.request_id[:128], context, client):
            served = self._models.find(request.model)
            max_context = served.model.max_model_len
            build = partial(request_of, request, deadline_s=deadline_s, max_context=max_context, peer=context.peer())
            completion_request = client.bound(await self._build(build, request, client))
            request_context.check(served.prompts.least_tokens(completion_request))
        return served, completion_request

    async def _build(
        self, build: Callable[[], CompletionRequest], message: pb.GenerateRequest | pb.TokenizeRequest, client: Client
    ) -> CompletionRequest:
        """Build a request, off the event loop if the message is large. Raises RequestError and CapacityError."""

        def make() -> CompletionRequest:
            made = build()
            num_chars(made.prompt)  # a chat caches it
            return made

        is_large = message.ByteSize() > _LARGE
        return await self._models.default.threads.run(client.key_id, make) if is_large else make()

    @contextmanager
    def _audited(self, request_id: str, context: _Context, client: Client) -> Iterator[None]:
        """Record a ClusterError of the block in the audit log, and re-raise it."""
        try:
            yield
        except ClusterError as error:
            self._models.default.unreadable(request_id, error, key=client.key, peer=context.peer())
            raise

    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:
        async with _statuses(context), self._counted():
            models = [
                pb.Model(id=name, max_context=card.max_model_len, dtype=card.dtype)
                for card in self._models.cards
                for name in card.names
            ]
            return pb.ListModelsResponse(models=models)


async def _send_headers(headers: Mapping[str, str], context: _Context) -> None:
    if headers:
        await context.send_initial_metadata(tuple(headers.items()))


@asynccontextmanager
async def _statuses(context: _Context) -> AsyncIterator[None]:
    """Convert any failure of the block to the call's status."""
    try:
        yield
    except ClusterError as error:
        status = rpc_status.to_status(status_of(error))
        # Sent with the status, because a client may not see earlier metadata of a failed call.
        headers = tuple(error.headers.items()) if isinstance(error, RateLimited) else ()
        await context.abort(status.code, status.details, (*status.trailing_metadata, *headers))
    except Exception as error:
        logger.exception("request failed with an unexpected exception")
        await context.abort_with_status(rpc_status.to_status(status_of(error)))


class EndpointHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # gRPC's stubs have no types
    """Health servicer. Each watcher reads the statuses for itself, so a slow one delays neither others nor `set`.
    Bound to the endpoint's event loop."""

    def __init__(self) -> None:
        self._is_serving: dict[str, bool] = {}
        self._changed = asyncio.Event()  # replaced after each change
        self._num_watchers = 0

    def set(self, is_serving: Mapping[str, bool]) -> None:
        """Set the status by service name; other names are unknown."""
        if self._is_serving == is_serving:
            return
        self._is_serving = dict(is_serving)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._is_serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _Status(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """Write statuses until the client leaves. No state is kept for an unknown service name."""
        if self._num_watchers >= _MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watchers; use Check")
        self._num_watchers += 1
        name, written = request.service if request.service in self._is_serving else None, None
        try:
            while True:
                changed, status = self._changed, self._status(name)
                if status != written:
                    await context.write(_Status(status=status))
                    written = status
                await changed.wait()
        finally:
            self._num_watchers -= 1

    def _status(self, name: str | None) -> Any:
        is_serving = None if name is None else self._is_serving.get(name)
        if is_serving is None:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if is_serving else _Status.NOT_SERVING
