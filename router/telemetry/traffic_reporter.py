"""What one router has seen of traffic, told to the controller, which answers with what its autoscaler has decided."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from core.trace.traffic import ReplicaReport, ShownDecision, TrafficAnswer, TrafficReport
from core.types.errors import ClusterError
from router.routing.replica_load import ReplicaLoad
from router.serving.replica import Replica
from router.telemetry.traffic import TrafficRecord

logger = logging.getLogger(__name__)

_TELL_S = 5.0


class TrafficReporter:
    """Lives on its router's event loop. While nobody collects, the record remembers what there is room for."""

    def __init__(
        self,
        record: TrafficRecord,
        replicas: Iterable[Replica],
        *,
        num_waiting: Callable[[], int],
        answered: Callable[[Sequence[ShownDecision]], None],
    ) -> None:
        """num_waiting: requests, at present. answered: called with the autoscaler's last decisions, latest first."""
        self._record = record
        self._replicas = replicas
        self._num_waiting = num_waiting
        self._answered = answered

    async def report_forever(self, tell: Callable[[TrafficReport], Awaitable[TrafficAnswer]]) -> None:
        """Every few seconds. tell: raises ClusterError. A controller with another life than it had before knows
        nothing yet, and is told everything that is remembered."""
        life, knows_all = "", False
        while True:
            await asyncio.sleep(_TELL_S)
            report = self._report(all_of_it=not knows_all)
            try:
                told = await tell(report)
            except ClusterError as error:
                if knows_all:
                    logger.warning("nobody collects what is told of the traffic: %s", error)
                life, knows_all = "", False
            else:
                life, knows_all = told.life, told.life == life or not life
                self._answered(told.scaling)

    def _report(self, *, all_of_it: bool) -> TrafficReport:
        loads = [replica.load() for replica in self._replicas if replica.is_usable]
        replicas = tuple(map(_report_of, loads))
        return self._record.report(replicas, num_waiting=self._num_waiting(), all_of_it=all_of_it)


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
        num_blocks=member.num_blocks,
        available_blocks=load.available_blocks,
        block_size=member.block_size,
        bytes_per_token=member.bytes_per_token,
        tokens_per_row=load.tokens_per_row,
        drafted_per_row=load.drafted_per_row,
    )
