"""Fake listeners for requests and migrations, which record every event."""

from __future__ import annotations

from typing import Any

from core.rpc import transfer_pb2
from core.types.errors import ClusterError
from core.types.handoff import Handoff
from kvtransfer.protocol.ledger import Landing


class FakeAnswerListener:
    """Recording listener; implements worker.answers.RequestListener."""

    def __init__(self) -> None:
        self.handoff: Handoff | None = None
        self.opening: transfer_pb2.OpenRequest | None = None
        self.events: list[str] = []
        self.num_from_peers: int | None = None
        self.error: ClusterError | None = None

    def reserved(self, handoff: Handoff | None, opening: transfer_pb2.OpenRequest | None, num_cached: int) -> None:
        self.handoff, self.opening = handoff, opening
        self.events.append(f"reserved, {num_cached} cached")

    def started(self, num_tokens: int, *, epoch: int, num_from_peers: int) -> None:
        self.events.append(f"started at {num_tokens}, epoch {epoch}")
        self.num_from_peers = num_from_peers

    def ended(self, error: ClusterError | None) -> None:
        self.error = error
        self.events.append("ended")

    def landing(self, *next_tokens: int) -> Landing:
        assert self.handoff
        handoff = self.handoff
        return Landing(handoff=handoff.id, epoch=handoff.epoch, num_tokens=handoff.num_tokens, next_tokens=next_tokens)


class FakeMoveListener:
    """Recording listener; implements worker.migrations.MoveListener."""

    def __init__(self) -> None:
        self.stayed: list[str] = []
        self.num_tokens: int | None = None

    def moved(self, num_tokens: int, *_: Any) -> None:
        self.num_tokens = num_tokens

    def stays(self, reason: str) -> None:
        self.stayed.append(reason)
