"""Blocking gRPC client of cluster.v1.Inference, without Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc

from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as pb_grpc
from core.types.errors import RequestFailed
from core.wire.client_access import EndpointAccess, is_from_router

_USERS_FAULT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


class InferenceClient:
    """Client of one endpoint, or of several separated by commas. A context manager."""

    def __init__(self, endpoint: str, access: EndpointAccess) -> None:
        self._endpoint = endpoint
        self._access = access
        self._channel = access.blocking_channel(endpoint)
        self._stub = pb_grpc.InferenceStub(self._channel)

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._channel.close()

    def generate(self, request: pb.GenerateRequest, *, timeout_s: float) -> Iterator[pb.GenerateResponse]:
        """Yield the events of one request as they arrive. Fills in the access's model if the request names none.

        Leaving the iteration cancels the request. If a router is lost before its first event, the next endpoint is
        tried. Raises RequestFailed.
        """
        request.model = request.model or self._access.model
        deadline = time.monotonic() + timeout_s
        has_begun = False
        for endpoints_left in reversed(range(len(self._endpoint.split(",")))):
            call = self._stub.Generate(request, timeout=deadline - time.monotonic(), metadata=self._access.metadata)
            try:
                for event in call:
                    has_begun = True
                    yield event
                return
            except grpc.RpcError as error:
                is_lost = error.code() is grpc.StatusCode.UNAVAILABLE and not is_from_router(error)
                if not is_lost or has_begun or not endpoints_left:
                    raise self._failure(error, is_cut_off=is_lost and has_begun) from None
            finally:
                call.cancel()

    def _failure(self, error: grpc.RpcError, *, is_cut_off: bool) -> RequestFailed:
        code, details = error.code(), error.details() or ""
        if is_cut_off:
            text = f"the router was lost ({details}); retry the request: the same seed gives the same answer"
        elif code is grpc.StatusCode.UNAVAILABLE and "connect" in details:
            text = f"no router answers at {self._endpoint}; see `cluster status`"
        else:
            text = f"{code.name.lower()}: {details}"
        return RequestFailed(text, exit_code=2 if code in _USERS_FAULT else 1)
