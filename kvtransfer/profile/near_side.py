"""Sending process of a link measurement."""

from __future__ import annotations

import queue
import secrets
from dataclasses import asdict
from types import TracebackType
from uuid import uuid4

from core.identity.credentials import Identity
from core.identity.process_name import ProcessName
from core.process.child_process import ChildProcess
from core.types.errors import TransferError
from core.types.handoff import Handoff
from core.wire.rank_server import RankHost
from engine.kv.pool import KVPool
from kvtransfer.links.link import LinkGuard
from kvtransfer.protocol.rank_transfer import RankTransfer, Shipment
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.sender import Sender

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
NEAR = Identity(ProcessName.of_rank("bench", "prefill-0", 0), None)  # no TLS: only the links are measured
FAR = NEAR.rank("decode-0", 0)


class NearSide:
    """Starts the far side and ships handoffs to it with the workers' own classes."""

    def __init__(self, *, is_encrypted: bool = False, far: str = "kvtransfer.profile.far_side") -> None:
        """far: module of the far side."""
        self.host = RankHost(HOST, NEAR)
        self.guard = LinkGuard(secrets.token_bytes(32), is_encrypted=is_encrypted)
        self._senders: list[Sender] = []
        self.far = ChildProcess(far, answer_s=TIMEOUT_S)
        self.address: str = self.far.ask("agree", secret=self.guard.secret.hex(), is_encrypted=is_encrypted)

    def __enter__(self) -> NearSide:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for sender in self._senders:
            self.host.call(sender.close(), timeout_s=TIMEOUT_S)
        self.far.close()
        self.host.stop()

    def sender(self, pool: KVPool, *, wire_dtype: str, backend: str, group_bytes: int | None = None) -> MeasuredSender:
        """Create a sender from `pool` to an equal pool on the far side."""
        layout = asdict(pool.layout)
        self.far.ask("make_pool", layout=layout, num_blocks=pool.num_blocks, wire_dtype=wire_dtype, backend=backend)
        shipments: queue.SimpleQueue[Shipment] = queue.SimpleQueue()
        config = link_config(NEAR, pool, wire_dtype=wire_dtype, backend=backend, guard=self.guard)
        sender = Sender(config, loop=self.host.loop, on_shipped=shipments.put, group_bytes=group_bytes)
        self._senders.append(sender)
        return MeasuredSender(self, sender, shipments)


class MeasuredSender:
    """Sender whose handoffs are sequential and use the same blocks."""

    def __init__(self, near: NearSide, sender: Sender, shipments: queue.SimpleQueue[Shipment]) -> None:
        self._near = near
        self._sender = sender
        self._shipments = shipments

    def begin(self, num_tokens: int) -> RankTransfer:
        """Begin a handoff of positions [0, num_tokens) in the first blocks of both pools."""
        layout = self._sender.config.pool.layout
        num_blocks = -(-num_tokens // layout.block_size)
        handoff = Handoff(
            id=uuid4().hex,
            epoch=1,
            replica=FAR.replica,
            ranks=(self._near.address,),
            layout=layout.fingerprint,
            num_tokens=num_tokens,
            max_tokens=num_tokens,
            first_token=0,
            ttl_s=TIMEOUT_S,
        )
        self._near.far.ask("open", handoff=handoff.id, num_tokens=num_tokens, num_blocks=num_blocks)
        transfer = self._sender.begin(handoff, range(num_blocks))
        assert transfer
        return transfer

    def finish(self, transfer: RankTransfer) -> tuple[Shipment, float]:
        """Wait until a committed transfer has landed. Returns its shipment and landing time. Raises TransferError."""
        shipment = self._shipments.get(timeout=TIMEOUT_S)
        if shipment.error:
            raise TransferError(f"{transfer.handoff.id}: {shipment.error}")
        return shipment, self._near.far.ask("landed", handoff=transfer.handoff.id)


def link_config(identity: Identity, pool: KVPool, *, wire_dtype: str, backend: str, guard: LinkGuard) -> LinkConfig:
    return LinkConfig(
        rank=0,
        identity=identity,
        pool=pool,
        wire_dtype=wire_dtype,
        backend=backend,
        host=HOST,
        timeout_s=TIMEOUT_S,
        guard=guard,
    )
