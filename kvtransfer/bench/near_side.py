"""The sending process of a measurement, as it speaks with the receiving one."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
from dataclasses import asdict
from types import TracebackType
from typing import Any

from cluster.wire.rank_host import RankHost
from cluster.words.errors import ReplicaLost, TransferError
from cluster.words.handoff import Handoff
from engine.kv.pool import KVPool
from kvtransfer.movers.link_config import LinkConfig
from kvtransfer.movers.sender import Sender
from kvtransfer.protocol.passage import Passage, Shipment

HOST = "127.0.0.1"
TIMEOUT_S = 60.0


class NearSide:
    """Starts the far side, and ships handoffs to it by the classes that the workers use."""

    def __init__(self) -> None:
        self.host = RankHost(HOST)
        self._senders: list[Sender] = []
        with socket.create_server((HOST, 0)) as server:
            server.settimeout(TIMEOUT_S)
            port = server.getsockname()[1]
            self._process = subprocess.Popen([sys.executable, "-m", "kvtransfer.bench.far_side", str(port)])
            try:
                self._connection, _ = server.accept()
            except TimeoutError as error:
                self._process.kill()
                raise ReplicaLost("the receiving process does not start") from error
        self._connection.settimeout(TIMEOUT_S)
        self._lines = self._connection.makefile("rw")
        self.address: str = self.ask("address")

    def __enter__(self) -> NearSide:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for sender in self._senders:
            self.host.call(sender.close(), timeout_s=TIMEOUT_S)
        self._lines.close()
        self._connection.close()
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self.host.stop()

    def ask(self, order: str, **arguments: Any) -> Any:
        """Give an order, and wait for its answer. Raises ReplicaLost."""
        self.tell(order, **arguments)
        return self.answer()

    def tell(self, order: str, **arguments: Any) -> None:
        """Give an order, whose `answer` is waited for later."""
        self._lines.write(json.dumps([order, arguments]) + "\n")
        self._lines.flush()

    def answer(self) -> Any:
        try:
            if line := self._lines.readline():
                return json.loads(line)
        except TimeoutError as error:
            raise ReplicaLost(f"the receiving process did not answer within {TIMEOUT_S} s") from error
        raise ReplicaLost("the receiving process is gone")

    def sender(self, pool: KVPool, *, wire_dtype: str, backend: str, group_bytes: int | None = None) -> MeasuredSender:
        """Ships from this pool to one like it on the far side."""
        layout = asdict(pool.layout)
        self.ask("make_pool", layout=layout, num_blocks=pool.num_blocks, wire_dtype=wire_dtype, backend=backend)
        shipments: queue.SimpleQueue[Shipment] = queue.SimpleQueue()
        sender = Sender(
            LinkConfig(rank=0, pool=pool, wire_dtype=wire_dtype, backend=backend, host=HOST, timeout_s=TIMEOUT_S),
            name=f"near{len(self._senders)}",
            loop=self.host.loop,
            on_shipped=shipments.put,
            **({} if group_bytes is None else {"group_bytes": group_bytes}),
        )
        self._senders.append(sender)
        return MeasuredSender(self, sender, shipments)


class MeasuredSender:
    """One sender, whose handoffs go one after the other into the same blocks."""

    def __init__(self, near: NearSide, sender: Sender, shipments: queue.SimpleQueue[Shipment]) -> None:
        self._near = near
        self._sender = sender
        self._shipments = shipments
        self._count = 0

    def begin(self, num_tokens: int) -> Passage:
        """A handoff of positions [0, num_tokens), which lie in the first blocks of either pool."""
        layout = self._sender.config.pool.layout
        num_blocks = -(-num_tokens // layout.block_size)
        self._count += 1
        handoff = Handoff(
            id=f"{self._sender.name}/{self._count}",
            epoch=1,
            replica="far",
            ranks=(self._near.address,),
            layout=layout.fingerprint,
            num_tokens=num_tokens,
            max_tokens=num_tokens,
            first_token=0,
            ttl_s=TIMEOUT_S,
        )
        self._near.ask("open", handoff=handoff.id, num_tokens=num_tokens, num_blocks=num_blocks)
        passage = self._sender.begin(handoff, range(num_blocks))
        assert passage
        return passage

    def finish(self, passage: Passage) -> tuple[Shipment, float]:
        """Wait until a committed passage has landed: its shipment, and when. Raises TransferError."""
        shipment = self._shipments.get(timeout=TIMEOUT_S)
        if shipment.error:
            raise TransferError(f"{passage.handoff.id}: {shipment.error}")
        return shipment, self._near.ask("landed", handoff=passage.handoff.id)
