"""Prefill replica of the deployment that interferes with transfers of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import torch
from grpc import aio

from core.identity.deployment_secrets import Purpose
from core.identity.process_name import ProcessName
from core.rpc import transfer_pb2 as pb
from core.rpc import transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from core.types.errors import TransferError
from core.types.handoff import Handoff
from core.types.prefix_hash import block_hashes, root_hash
from core.types.wire_version import WIRE_VERSION
from core.wire.channel import open_channel
from core.wire.messages import to_message
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from kvtransfer.links.link import LinkGuard
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.sender import Sender
from tests.support.local_cluster import LocalCluster, LocalReplica

_CALL_S = 20.0
_BLOCKS = 64
_ENDED = "the link is closed"


class Stranger:
    """Holder of valid credentials and link secrets of the deployment, like any replica."""

    def __init__(self, cluster: LocalCluster, layout: KVLayout) -> None:
        self._cluster = cluster
        self._layout = layout
        self._identity = cluster.identity(ProcessName.of_rank(cluster.spec.name, "prefill-900", 0))
        self._epoch = 0

    async def ship(self, handoff: Handoff, *, has_payload: bool = True) -> str:
        """Fill a ticket with arbitrary numbers, or only report it as filled. Returns the result."""
        shipments: asyncio.Queue[Shipment] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        pool = KVPool(self._layout, num_blocks=_BLOCKS, device=torch.device("cpu"))
        for codes in pool.codes:
            codes.fill_(1.5)
        config = LinkConfig(
            rank=0,
            identity=self._identity,
            pool=pool,
            wire_dtype="raw",
            backend=self._cluster.spec.kv.host_link,
            host="127.0.0.1",
            timeout_s=_CALL_S,
            guard=LinkGuard(self._cluster.credentials.key(Purpose.LINKS)),
        )

        def shipped(shipment: Shipment) -> None:
            loop.call_soon_threadsafe(shipments.put_nowait, shipment)

        sender = Sender(
            config,
            loop=loop,
            on_shipped=shipped,
        )
        try:
            transfer = sender.begin(handoff, range(_BLOCKS))
            assert transfer
            for layer in range(self._layout.num_layers if has_payload else 0):
                transfer.layer_ready(layer, 0, handoff.num_tokens)
            transfer.commit(handoff.num_tokens, [5])
            error: TransferError | None = (await asyncio.wait_for(shipments.get(), 2 * _CALL_S)).error
        finally:
            await sender.close()
        return str(error) if error else "landed"

    async def announce(self, replica: LocalReplica, frame: pb.SenderFrame) -> str:
        """Send this frame as a sender without any payload. Returns the reply after the welcome."""
        seen = self._cluster.seen(replica)
        self._epoch += 1
        hello = pb.Hello(
            wire_version=WIRE_VERSION,
            layout=self._layout.fingerprint,
            sender=str(self._identity.name),
            epoch=self._epoch,
            backend=self._cluster.spec.kv.host_link,
            wire_dtype="raw",
            sender_ranks=1,
        )
        answered, reply, is_known = asyncio.Event(), _ENDED, False

        async def frames() -> AsyncIterator[pb.SenderFrame]:
            yield pb.SenderFrame(hello=hello)
            yield frame
            await answered.wait()

        peer = self._identity.rank(seen.id, 0)
        async with open_channel(seen.member.address, peer=peer, identity=self._identity) as channel:
            call = transfer_pb2_grpc.RankStub(channel).Connect(frames(), timeout=_CALL_S)
            try:
                async for answer in call:
                    kind = answer.WhichOneof("frame")
                    is_known |= kind == "welcome"
                    reply = {"refused": answer.rejected.reason, "landed": "landed"}.get(kind, reply)
            except aio.AioRpcError as error:
                reply = error.details() or error.code().name
            finally:
                answered.set()
        assert is_known, f"no welcome received: {reply}"
        return reply

    async def fetch(self, replica: LocalReplica, prompt: list[int], *, salt: str) -> int:
        """Request a prefix by the hashes of these tokens under this salt. Returns the number of served positions."""
        seen, end = self._cluster.seen(replica), len(prompt) // 16 * 16
        handoff = Handoff(
            id=f"prefill-900/{salt}",
            epoch=1,
            replica=self._identity.name.replica,
            ranks=("127.0.0.1:1",),
            layout=self._layout.fingerprint,
            num_tokens=16,
            max_tokens=end,
            first_token=0,
            ttl_s=_CALL_S,
        )
        hashes = block_hashes(root_hash(self._cluster.model, salt=salt), prompt[:end], block_size=16)
        request = worker_pb2.FetchRequest(handoff=to_message(worker_pb2.Handoff, handoff), hashes=b"".join(hashes))
        peer = self._identity.rank(seen.id, 0)
        async with open_channel(seen.member.address, peer=peer, identity=self._identity) as channel:
            call = worker_pb2_grpc.PrefixFetchStub(channel).Fetch(request, timeout=_CALL_S)
            event = await anext(aiter(call))
            call.cancel()
        return int(event.served.num_tokens)
