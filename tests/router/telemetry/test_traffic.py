"""Record of a router's traffic, the confidentiality of its prompt hashes, and its reports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from core.process.supervisor import Supervisor
from core.trace.traffic import ShownDecision, TrafficAnswer, TrafficReport
from core.types.errors import DeployError
from router.serving.grpc_worker import Worker
from router.serving.replicas import Replicas
from router.telemetry.traffic import TrafficRecord, TrafficReporter, prefix_ids
from tests.router.serving.virtual_time import VirtualTimeLoop

_KEY, _OTHER_KEY = b"k" * 32, b"o" * 32


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _arrive(record: TrafficRecord, tokens: int = 200, *, ttft_s: float = 0.0, num_choices: int = 1) -> range:
    return record.arrived(range(tokens), salt="", num_choices=num_choices, ttft_s=lambda: ttft_s)


def test_equal_prefixes_have_equal_ids_per_salt_and_key() -> None:
    long, short = prefix_ids(_KEY, "", range(200)), prefix_ids(_KEY, "", range(128))
    assert len(long) == 4 and list(long[:2]) == list(short)
    other = prefix_ids(_KEY, "", [*range(100), 7, *range(101, 200)])
    assert long[0] == other[0] and not set(long[1:]) & set(other[1:])
    for foreign in (prefix_ids(_KEY, "acme", range(200)), prefix_ids(_OTHER_KEY, "", range(200))):
        assert not set(long) & set(foreign)


def test_a_public_hash_does_not_reveal_the_next_one_without_the_key() -> None:
    """Otherwise an attacker could confirm a guess of 64 tokens after a known id."""
    from hashlib import blake2b
    from struct import pack

    first, second = (id.to_bytes(8, "little") for id in prefix_ids(_KEY, "", range(128)))
    packed = pack("<64i", *range(64, 128))
    assert blake2b(first + packed, digest_size=8).digest() != second
    assert blake2b(first + packed, digest_size=8, key=_KEY).digest() == second


def test_reports_are_incremental_and_full_on_request() -> None:
    clock = _Clock()
    record = TrafficRecord(_KEY, router="router-1", now=clock)
    first = _arrive(record, ttft_s=0.25, num_choices=2)
    clock.now += 3
    changes = record.report()
    assert [*changes.arrived] == [0, 1] and changes.arrived[0].arrival_s == 3 and not changes.changed
    assert changes.arrived[0].ttft_s == 0.25 and not changes.arrived[0].is_over
    assert not record.report().arrived
    record.over(first, [4, 5], ttft_s=0.25, itl_s=0.02)
    _arrive(record)
    changes = record.report()
    assert {number: seen.num_output for number, seen in changes.changed.items()} == {0: 4, 1: 5}
    assert [*changes.arrived] == [2]
    assert [*record.report(is_full=True).arrived] == [0, 1, 2]


def test_a_first_token_is_reported_before_the_end() -> None:
    record, ttft = TrafficRecord(_KEY), [0.0]
    record.arrived(range(10), salt="", num_choices=1, ttft_s=lambda: ttft[0])
    assert record.report().arrived[0].ttft_s is None
    ttft[0] = 0.5
    assert record.report().changed[0].ttft_s == 0.5
    assert not record.report().changed


def test_the_record_is_bounded() -> None:
    clock = _Clock()
    record = TrafficRecord(_KEY, now=clock)
    for _ in range(50_010):
        _arrive(record, 1)
    assert record.num_requests == len(record.report().arrived) == 50_000
    clock.now += 2000
    assert not record.report().arrived and record.num_requests == 0


def test_long_prompts_respect_the_bound_on_ids() -> None:
    record = TrafficRecord(_KEY)
    _arrive(record, 64 * 50_000, num_choices=45)
    assert record.num_requests == 40


_LIVES = ["a", "a", "", "a", "b", "b"]  # `life` in each reply; empty: the call fails


def test_a_restarted_controller_gets_one_full_report() -> None:
    sizes: list[int] = []
    shown: list[Sequence[ShownDecision]] = []

    async def run() -> None:
        record = TrafficRecord(b"k" * 32, router="r")
        over = asyncio.Event()

        async def send(report: TrafficReport) -> TrafficAnswer:
            sizes.append(len(report.arrived))
            life = _LIVES[len(sizes) - 1]
            if len(sizes) == len(_LIVES):
                over.set()
            if not life:
                raise DeployError("the controller starts")
            decision = ShownDecision(at=0.0, text="1P1D -> 2P1D", reason="queue grows")
            return TrafficAnswer(life=life, scaling=(decision,))

        for _ in range(3):
            record.arrived([1, 2, 3], salt="", num_choices=1, ttft_s=lambda: 0.0)
        reporter = TrafficReporter(record, _replicas(), num_waiting=lambda: 0, answered=shown.append)
        task = asyncio.create_task(reporter.report_forever(send))
        await over.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())
    # full, no changes, failed, full again, no changes (the reply shows a new life), full again
    assert sizes == [3, 0, 0, 3, 0, 3]
    assert [decisions[0].text for decisions in shown] == ["1P1D -> 2P1D"] * 5


def _replicas() -> Replicas:
    def connect(member: object) -> Worker:
        raise AssertionError("no replica may be connected")

    return Replicas(connect, tasks=Supervisor())
