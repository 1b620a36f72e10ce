"""Replica state that rank 0 publishes while the step thread is busy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from core.identity.deployment_secrets import DeploymentSecrets
from core.rpc import worker_pb2 as pb
from core.spec.loader import parse_spec
from core.types.errors import ReplicaLost
from core.types.launch import Launch
from core.types.request import Role
from core.wire.frames import FrameHub
from core.wire.rank_server import RankHost
from kvtransfer.transfer.rank_servicer import StepCount
from tests.support.identities import in_clear, rank
from tests.support.members import make_member
from tests.support.waiting import WITHIN_S, until
from worker.rank_group import OtherRanks
from worker.rank_setup import RankSetup
from worker.replica_service import ReplicaService


class SlowWorker:
    """Fake worker whose steps are continuous and take as long as the test wants."""

    def __init__(self) -> None:
        self.answers = SimpleNamespace(take_tokens=dict)
        self.tiers = SimpleNamespace(take_changes=dict, table=SimpleNamespace(held=dict))
        self.hub: FrameHub
        self.host: RankHost
        self.num_requests = 0
        self.num_steps = 0  # steps with work
        self.num_statuses = 0
        self.is_stepping = threading.Event()
        self.may_end = threading.Event()

    def heartbeat(self) -> None: ...

    def stop(self) -> None: ...

    def step(self) -> bool:
        if not self.num_requests:
            return False
        self.is_stepping.set()
        assert self.may_end.wait(WITHIN_S)
        self.num_steps += 1
        return True

    def status(self) -> pb.Status:
        self.num_statuses += 1
        return pb.Status(running=self.num_requests, totals=pb.Totals(generated_tokens=self.num_steps))


@pytest.fixture
def served(redis_url: str) -> Iterator[tuple[SlowWorker, ReplicaService]]:
    host, worker = RankHost("127.0.0.1", in_clear(rank("decode-0"))), SlowWorker()
    worker.hub, worker.host = FrameHub(), host
    launch = Launch(
        spec=parse_spec({"model": {"source": "hub:m"}}),
        log_dir="unused",
        credentials=DeploymentSecrets.new(index_url=redis_url),
    )
    setup = RankSetup(
        launch=launch, role=Role.DECODE, addresses=["127.0.0.1:1"], host=host, on_progress=lambda stage, fraction: None
    )
    others = OtherRanks(setup.addresses, identity=host.identity, steps=StepCount(), timeout_s=WITHIN_S)
    service = ReplicaService(setup, others, worker.hub)
    service.worker = worker  # type: ignore[assignment]
    service.start(make_member())
    try:
        yield worker, service
    finally:
        worker.may_end.set()
        service.stop()
        host.stop()


def test_request_accepted_before_a_drain_counts(served: tuple[SlowWorker, ReplicaService]) -> None:
    """A request accepted before a drain counts even before its first step has ended.

    Otherwise the replica would be reported as drained, and its processes would be ended.
    """
    worker, service = served
    service.check_takes_work()
    service.post(lambda: setattr(worker, "num_requests", 1))
    assert worker.is_stepping.wait(WITHIN_S)
    service.drain()
    assert service.status()["state"] == "draining"
    with pytest.raises(ReplicaLost, match="takes no new work"):
        service.check_takes_work()
    service.post(lambda: setattr(worker, "num_requests", 0))
    worker.may_end.set()
    until(lambda: service.status()["state"] == "drained")


def test_drain_is_published_before_the_current_step_ends(served: tuple[SlowWorker, ReplicaService]) -> None:
    """Otherwise routers would retry on it during the whole step."""
    worker, service = served

    async def drained() -> str:
        async for frame in worker.hub.frames("router"):
            if frame.status.draining:
                return frame.status.replica
        return ""

    service.post(lambda: setattr(worker, "num_requests", 1))
    assert worker.is_stepping.wait(WITHIN_S)
    hearing = worker.host.spawn(drained())
    service.drain()
    assert hearing.result(WITHIN_S) == "decode-0"
    assert not worker.may_end.is_set()


def test_status_is_published_when_requests_change_and_not_every_step(
    served: tuple[SlowWorker, ReplicaService],
) -> None:
    worker, service = served
    worker.may_end.set()
    for number in (1, 2):
        service.post(lambda number=number: setattr(worker, "num_requests", number))  # type: ignore[misc]
        until(lambda number=number: service.status()["running"] == number)  # type: ignore[misc]
    before = worker.num_steps, worker.num_statuses
    until(lambda: worker.num_steps >= before[0] + 5000)
    assert worker.num_statuses - before[1] < 2500
    service.post(lambda: setattr(worker, "num_requests", 0))
    until(lambda: service.status()["running"] == 0)
