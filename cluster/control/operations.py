"""The controller, for people who have a certificate and no part in Ray.

    mutual TLS -> the table of core.identity.rules -> the book of people -> the controller's own method

What a certificate protects here, it protects because whoever has only that cannot reach Ray: see docs/SECURITY.md.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from grpc import aio

from cluster.control.operator_registry import PersonBook
from cluster.control.report import ControllerReport
from core.identity.credentials import Identity
from core.process.json_lines import append_line
from core.process.log import LogPart
from core.rpc import operate_pb2 as pb
from core.rpc import operate_pb2_grpc as rpc
from core.types.api_key import ApiKey, KeyChange, KeyRegistry, read_key
from core.types.errors import ClusterError, DeployError, SpecError
from core.types.request import Role
from core.wire.call_errors import abort_with
from core.wire.channel import listen, make_server

logger = logging.getLogger(__name__)

_MAX_LINES = 100_000
_LOOKS = (pb.StatusRequest, pb.LogsRequest, pb.ListKeysRequest)  # the others are written down

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])
_Context: TypeAlias = aio.ServicerContext[Any, Any]


class Operated(Protocol):
    """What people ask of a controller; it raises ClusterError."""

    async def status(self) -> ControllerReport: ...
    async def logs(
        self, replica: str, *, lines: int = 50, starts: dict[int, int] | None = None
    ) -> dict[int, LogPart]: ...
    async def scale(self, replicas: dict[str, int], *, wait_for_nodes: bool = False) -> dict[str, tuple[int, int]]: ...
    async def drain(self, replica: str) -> None: ...
    async def switch(self, replica: str) -> str: ...
    async def keys(self) -> KeyRegistry: ...
    async def add_key(self, key: ApiKey) -> KeyChange: ...
    async def revoke_key(self, key: ApiKey) -> KeyChange: ...


def _command(method: Method) -> Method:
    """For those in the book alone. What changes something is noted: who, what, and what came of it."""

    @functools.wraps(method)
    async def call(self: Operations, request: Message, context: _Context) -> Any:
        who = self.who(context)
        if who is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this certificate is not, or no longer, let in here")
        answer, rejected, said = None, None, "it did not come to its end"
        try:
            answer = await method(self, request, context)
            said = ""
        except ClusterError as error:
            rejected, said = error, str(error)
        finally:  # before anybody is told
            if not isinstance(request, _LOOKS):
                self.note(str(who), context.peer(), method.__name__, request, said)
        if rejected:
            await abort_with(context, rejected)
        return answer

    return cast(Method, call)


class Operations(rpc.OperationsServicer):
    """A server of its own. Lives on the controller's event loop."""

    def __init__(self, controller: Operated, book: PersonBook, server: aio.Server, *, audit_log: Path) -> None:
        self._controller = controller
        self._book = book
        self._server = server
        self._audit_log = audit_log
        self.port = 0  # once it listens
        rpc.add_OperationsServicer_to_server(self, server)

    @classmethod
    async def open(
        cls, controller: Operated, book: PersonBook, address: str, identity: Identity, *, audit_log: Path
    ) -> Operations:
        """Listen at HOST:PORT, as `identity`. trail: the file that is written of who has changed what.

        Raises DeployError.
        """
        server = make_server(identity)
        operations = cls(controller, book, server, audit_log=audit_log)
        try:
            operations.port = listen(server, address, identity)
        except RuntimeError as error:
            raise DeployError(f"security.operators: cannot listen at {address}: {error}") from None
        await server.start()
        logger.info("people with certificates may operate at %s", address)
        return operations

    async def close(self) -> None:
        await self._server.stop(None)

    @_command
    async def Status(self, request: pb.StatusRequest, context: _Context) -> pb.StatusReply:
        report = await self._controller.status()
        spec = {name: part for name, part in report["spec"].items() if name != "index"}  # its password is in it
        return pb.StatusReply(report=json.dumps({**report, "spec": spec}))

    @_command
    async def Logs(self, request: pb.LogsRequest, context: _Context) -> pb.LogsReply:
        lines = min(request.lines, _MAX_LINES)
        parts = await self._controller.logs(request.replica, lines=lines, starts=dict(request.starts) or None)
        return pb.LogsReply(ranks={rank: pb.RankLog(text=part.text, end=part.end) for rank, part in parts.items()})

    @_command
    async def Scale(self, request: pb.ScaleRequest, context: _Context) -> pb.ScaleReply:
        if not request.replicas or not request.replicas.keys() <= {role.value for role in Role}:
            raise SpecError("replicas: say how many of prefill, decode or both")
        changes = await self._controller.scale(dict(request.replicas), wait_for_nodes=request.wait_for_nodes)
        return pb.ScaleReply(before={role: before for role, (before, _) in changes.items()})

    @_command
    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainReply:
        await self._controller.drain(request.replica)
        return pb.DrainReply()

    @_command
    async def Switch(self, request: pb.SwitchRequest, context: _Context) -> pb.SwitchReply:
        return pb.SwitchReply(replica=await self._controller.switch(request.replica))

    @_command
    async def ListKeys(self, request: pb.ListKeysRequest, context: _Context) -> pb.ListKeysReply:
        return pb.ListKeysReply(book=(await self._controller.keys()).to_json())

    @_command
    async def CreateKey(self, request: pb.CreateKeyRequest, context: _Context) -> pb.ChangeKeyReply:
        key = read_key(request.key)
        if key.name != request.name:
            raise SpecError(f"this is not the key of {request.name}")
        return _changed(await self._controller.add_key(key))

    @_command
    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: _Context) -> pb.ChangeKeyReply:
        key = (await self._controller.keys()).find(request.name)
        return _changed(await self._controller.revoke_key(key))

    def who(self, context: _Context) -> str | None:
        """The person at the other end, by the certificate; None: not in the book."""
        found = context.auth_context().get("x509_pem_cert", ())
        name = self._book.admitted(found[0]) if found else None
        return str(name) if name else None

    def note(self, who: str, peer: str, command: str, request: Message, error: str) -> None:
        asked = MessageToDict(request, preserving_proto_field_name=True)
        asked.pop("key", None)  # its name is beside it; the hash of its secret is in it
        line = {"time": round(time.time(), 3), "who": who, "peer": peer, "command": command, "asked": asked}
        append_line(self._audit_log, {**line, "error": error})
        logger.info("command=%s who=%s peer=%s error=%s", command, who, peer, error or "none")


def _changed(change: KeyChange) -> pb.ChangeKeyReply:
    return pb.ChangeKeyReply(key=json.dumps(asdict(change.key)), is_told=change.is_told, problem=change.problem)
