"""The gRPC door: cluster.v1.Inference, with health and reflection."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as pb_grpc
from cluster.wire.channel import PINGS_ALLOWED, keepalive
from cluster.words.errors import CapacityError, ClusterError, DeployError, RequestError, outcome_of
from router.doors.grpc_messages import field_of, request_of, response_of
from router.text.completion import Completions
from router.text.completion_request import MAX_REQUEST_BYTES

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # A client that has vanished without a word is noticed within 15 s. Clients may ping, too, also while they wait for
    # a first token.
    *keepalive(ping_every_ms=10_000, answer_within_ms=5_000),
    *PINGS_ALLOWED,
)


async def open_grpc_api(completions: Completions, *, host: str, port: int, is_port_shared: bool = False) -> GrpcApi:
    """Start to serve on host:port (0: any free one), in this event loop.

    is_port_shared: several router processes of one node listen on the same port and the kernel deals out connections;
    otherwise a port in use is an error. Raises DeployError.
    """
    server = grpc.aio.server(options=(*_OPTIONS, ("grpc.so_reuseport", int(is_port_shared))))
    health_servicer = health.aio.HealthServicer()
    pb_grpc.add_InferenceServicer_to_server(InferenceServicer(completions), server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise DeployError(f"gRPC port {host}:{port} cannot be opened; is it in use?") from error
    await server.start()
    door = GrpcApi(server, health_servicer, bound)
    await door.set_serving(True)
    return door


class GrpcApi:
    """A server that runs until `close`."""

    def __init__(self, server: grpc.aio.Server, health_servicer: health.aio.HealthServicer, port: int) -> None:
        self.port = port
        self._server = server
        self._health = health_servicer

    async def set_serving(self, is_serving: bool) -> None:
        """What the health service says, of the server ("") and of cluster.v1.Inference; watchers hear it at once."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def close(self, *, grace_s: float) -> None:
        """Take no more requests, let those under way finish for grace_s, then end them."""
        await self.set_serving(False)
        await self._server.stop(grace_s)


class InferenceServicer(pb_grpc.InferenceServicer):
    """Writes from within the handler, and does not yield: so a cancelled call ends the handler wherever it waits."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with _statuses(context):
            asked = request_of(request, deadline_s=context.time_remaining())
            completion = await self._completions.open(asked)
            async with completion.run() as events:
                async for event in events:
                    message = response_of(event, request_id=asked.id, tokenizer=self._completions.tokenizer)
                    await context.write(message)

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        model = self._completions.model
        return pb.ListModelsResponse(models=[pb.Model(id=model.id, max_context=model.max_context, dtype=model.dtype)])


@asynccontextmanager
async def _statuses(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """The edge: whatever fails inside becomes the call's status."""
    try:
        yield
    except ClusterError as error:
        await context.abort_with_status(rpc_status.to_status(status_of(error)))
    except Exception:
        logger.exception("request failed by a bug")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the router's log says more")


def status_of(error: ClusterError) -> Status:
    """google.rpc.Status with ErrorInfo (the code as its reason), and BadRequest or RetryInfo where they apply."""
    outcome = outcome_of(error)
    details: list[Message] = [ErrorInfo(reason=outcome.code.upper(), domain=pb.DESCRIPTOR.package)]
    if isinstance(error, RequestError) and error.param is not None:
        violation = BadRequest.FieldViolation(field=field_of(error.param), description=str(error))
        details.append(BadRequest(field_violations=[violation]))
    if isinstance(error, CapacityError):
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1e3))
        details.append(RetryInfo(retry_delay=delay))
    packed = [AnyMessage() for _ in details]
    for holder, detail in zip(packed, details, strict=True):
        holder.Pack(detail)
    code = getattr(grpc.StatusCode, outcome.grpc).value[0]
    return Status(code=code, message=str(error), details=packed)
