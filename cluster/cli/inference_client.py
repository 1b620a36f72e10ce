"""A plain gRPC client of cluster.v1.Inference, for the commands that ask the model. No Ray."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as pb_grpc
from cluster.wire.door_access import DoorAccess
from cluster.words.errors import RequestFailed

_USERS_FAULT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


class InferenceClient:
    """One connection to a router; close it by leaving its `with` block."""

    def __init__(self, endpoint: str, access: DoorAccess) -> None:
        self._endpoint = endpoint
        self._access = access
        self._channel = access.blocking_channel(endpoint)
        self._stub = pb_grpc.InferenceStub(self._channel)

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._channel.close()

    def generate(self, request: pb.GenerateRequest, *, timeout_s: float) -> Iterator[pb.GenerateResponse]:
        """The events of one request as they come. Leaving the iteration cancels it. Raises RequestFailed."""
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._access.metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAVAILABLE and "connect" in (error.details() or ""):
                text = f"no router answers at {self._endpoint}; see `cluster status`"
            else:
                text = f"{code.name.lower()}: {error.details()}"
            raise RequestFailed(text, exit_code=2 if code in _USERS_FAULT else 1) from None
        finally:
            call.cancel()
