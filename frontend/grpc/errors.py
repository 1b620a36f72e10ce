"""Conversion of errors to gRPC statuses with google.rpc details."""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from core.rpc import inference_pb2 as pb
from core.types.errors import CapacityError, ClusterError, RequestError, outcome_of
from frontend.grpc.messages import field_of


def status_of(error: Exception) -> Status:
    """Return the status with ErrorInfo (the code as its reason), and BadRequest or RetryInfo where they apply. The
    message names the field of GenerateRequest. The text of an unexpected exception is withheld."""
    outcome = outcome_of(error)
    details: list[Message] = [ErrorInfo(reason=outcome.code.upper(), domain=pb.DESCRIPTOR.package)]
    message = str(error) if isinstance(error, ClusterError) else "internal error; see the router's log"
    if isinstance(error, RequestError) and error.param is not None:
        field, param = field_of(error.param), f"{error.param}:"
        if message.startswith(param):
            message = f"{field}:{message.removeprefix(param)}"
        violation = BadRequest.FieldViolation(field=field, description=message)
        details.append(BadRequest(field_violations=[violation]))
    if isinstance(error, CapacityError):
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1e3))
        details.append(RetryInfo(retry_delay=delay))
    packed = [AnyMessage() for _ in details]
    for any_message, detail in zip(packed, details, strict=True):
        any_message.Pack(detail)
    code = getattr(grpc.StatusCode, outcome.grpc).value[0]
    return Status(code=code, message=message, details=packed)
