"""Reporter of one router's traffic to the controller, which replies with its autoscaler's decisions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import fields

from core.model.kv_memory import AnnouncedPool
from core.trace.traffic import ReplicaReport, ShownDecision, TrafficAnswer, TrafficReport
from core.types.errors import ClusterError
from router.routing.replica_load import ReplicaLoad
from router.serving.replica import Replica
from router.telemetry.traffic import TrafficRecord

logger = logging.getLogger(__name__)

_REPORT_S = 5.0


class TrafficReporter:
    """Periodic reporter. Lives on its router's event loop. While the controller is away, the record keeps what fits."""

    def __init__(
        self,
        record: TrafficRecord,
        replicas: Iterable[Replica],
        *,
        num_waiting: Callable[[], int],
        answered: Callable[[Sequence[ShownDecision]], None],
    ) -> None:
        """num_waiting: returns the number of queued requests. answered: called with the autoscaler's last decisions,
        newest first."""
        self._record = record
        self._replicas = replicas
        self._num_waiting = num_waiting
        self._answered = answered

    async def report_forever(self, send: Callable[[TrafficReport], Awaitable[TrafficAnswer]]) -> None:
        """Send a report every _REPORT_S seconds.

        send: delivers a report; raises ClusterError. A restarted controller (its reply has another `life`) has lost its
        state, so the next report is complete.
        """
        life, is_synced = "", False
        while True:
            await asyncio.sleep(_REPORT_S)
            report = self._report(is_full=not is_synced)
            try:
                answer = await send(report)
            except ClusterError as error:
                if is_synced:
                    logger.warning("traffic report failed: %s", error)
                life, is_synced = "", False
            else:
                life, is_synced = answer.life, answer.life == life or not life
                self._answered(answer.scaling)

    def _report(self, *, is_full: bool) -> TrafficReport:
        loads = [replica.load() for replica in self._replicas if replica.is_usable]
        replicas = tuple(map(_report_of, loads))
        return self._record.report(replicas, num_waiting=self._num_waiting(), is_full=is_full)


def _report_of(load: ReplicaLoad) -> ReplicaReport:
    member = load.member
    return ReplicaReport(
        replica=member.replica,
        role=member.role,
        timing=load.timing,
        link_bytes_per_s=load.link_bytes_per_s,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_step_s=load.decode_step_s,
        queued_tokens=load.queued_tokens,
        num_streams=load.num_streams,
        max_running=member.max_running,
        max_batch_tokens=member.max_batch_tokens,
        available_blocks=load.available_blocks,
        tokens_per_row=load.tokens_per_row,
        drafted_per_row=load.drafted_per_row,
        **{field.name: getattr(member, field.name) for field in fields(AnnouncedPool)},
    )
