"""A deployment's controller as a person reaches it who has a certificate, and no part in Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

import grpc
from grpc import aio

from cluster.control.report import ControllerReport
from cluster.launch.person_file import PersonFile
from core.identity.process_name import ProcessName
from core.process.log import LogPart
from core.rpc import operate_pb2 as pb
from core.rpc import operate_pb2_grpc as rpc
from core.types.api_key import ApiKey, KeyChange, KeyRegistry, read_key
from core.types.errors import ClusterError, DeployError, ReplicaLost
from core.wire.call_errors import error_of
from core.wire.channel import open_channel


class CertifiedController:
    """A controller that is asked by a person's certificate: for cluster.launch.driver.ask, in place of Ray's handle.

    A connection for each call.
    """

    def __init__(self, file: PersonFile) -> None:
        self._file = file

    def ask(self, method: str, *args: Any, within_s: float, **kwargs: Any) -> Any:
        """Raises the controller's own ClusterError, or DeployError for anything else."""
        calls: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "status": _status,
            "logs": _logs,
            "scale": _scale,
            "drain": _drain,
            "switch": _switch,
            "keys": _keys,
            "add_key": _add_key,
            "revoke_key": _revoke_key,
        }
        assert method in calls, f"{method} is not for people with certificates"
        return asyncio.run(self._call(calls[method], *args, within_s=within_s, **kwargs))

    async def _call(self, call: Callable[..., Coroutine[Any, Any, Any]], *args: Any, within_s: float, **kw: Any) -> Any:
        name, address = self._file.identity.name, self._file.address
        peer = ProcessName.of_controller(name.deployment)
        async with open_channel(address, peer=peer, identity=self._file.identity) as channel:
            try:
                async with asyncio.timeout(within_s):
                    return await call(rpc.OperationsStub(channel), *args, **kw)
            except TimeoutError:
                raise DeployError(f"{name.deployment} at {address}: no answer within {within_s:g} s") from None
            except aio.AioRpcError as error:
                raise _meant(error, f"{name.deployment} at {address}", who=str(name)) from None


def _meant(error: aio.AioRpcError, where: str, *, who: str) -> ClusterError:
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return DeployError(f"{where} does not do this for {who}: {error.details()}")
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return DeployError(f"{where} does not answer {who}, or its certificate has ended: {error.details()}")
    found = error_of(error, peer=where)
    return DeployError(str(found)) if isinstance(found, ReplicaLost) else found


async def _status(stub: rpc.OperationsStub) -> ControllerReport:
    report: ControllerReport = json.loads((await stub.Status(pb.StatusRequest())).report)
    return report


async def _logs(
    stub: rpc.OperationsStub, replica: str, *, lines: int = 50, starts: dict[int, int] | None = None
) -> dict[int, LogPart]:
    reply = await stub.Logs(pb.LogsRequest(replica=replica, lines=lines, starts=starts))
    return {rank: LogPart(part.text, part.end) for rank, part in reply.ranks.items()}


async def _scale(
    stub: rpc.OperationsStub, replicas: dict[str, int], *, wait_for_nodes: bool = False
) -> dict[str, tuple[int, int]]:
    reply = await stub.Scale(pb.ScaleRequest(replicas=replicas, wait_for_nodes=wait_for_nodes))
    return {role: (reply.before[role], number) for role, number in replicas.items()}


async def _drain(stub: rpc.OperationsStub, replica: str) -> None:
    await stub.Drain(pb.DrainRequest(replica=replica))


async def _switch(stub: rpc.OperationsStub, replica: str) -> str:
    successor: str = (await stub.Switch(pb.SwitchRequest(replica=replica))).replica
    return successor


async def _keys(stub: rpc.OperationsStub) -> KeyRegistry:
    return KeyRegistry.from_json((await stub.ListKeys(pb.ListKeysRequest())).book)


async def _add_key(stub: rpc.OperationsStub, key: ApiKey) -> KeyChange:
    return _change_of(await stub.CreateKey(pb.CreateKeyRequest(name=key.name, key=json.dumps(asdict(key)))))


async def _revoke_key(stub: rpc.OperationsStub, key: ApiKey) -> KeyChange:
    return _change_of(await stub.RevokeKey(pb.RevokeKeyRequest(name=key.id)))


def _change_of(reply: pb.ChangeKeyReply) -> KeyChange:
    return KeyChange(key=read_key(reply.key), is_told=reply.is_told, problem=reply.problem)
