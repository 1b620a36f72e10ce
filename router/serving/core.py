"""Serving core of a router: token requests on replicas, without endpoints and text processing."""

from __future__ import annotations

from collections.abc import Callable, Set

from core.types.request import SequenceRequest
from router.generation import Generation
from router.routing.chooser import Chooser, Culprit
from router.routing.decisions import Decisions
from router.routing.revisions import Revisions
from router.serving.admission import Admission
from router.serving.attempt import Attempt
from router.serving.backup import Backup
from router.serving.decode_streams import DecodeStreams
from router.serving.flows import Flows
from router.serving.rebalance import Rebalancer
from router.serving.relay import Relay
from router.serving.replicas import Replicas
from router.serving.request_state import RequestState
from router.serving.reservations import Pair, Reservations
from router.telemetry.metrics import Metrics


class RouterCore:
    """Implementation of router.generation.TokenService. Owns the running attempts and their background loops."""

    def __init__(
        self,
        replicas: Replicas,
        chooser: Chooser,
        *,
        model: str,
        block_size: int,
        vocab_size: int,
        queue_s: float,
        max_waiting: int,
        metrics: Metrics,
        tenant_share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """model: fingerprint, as in the prefix hashes. queue_s: maximum wait for a replica with room.
        tenant_share: returns the share of the decode capacity that one tenant may take beside others."""
        self.replicas = replicas
        self.revisions = Revisions()
        self.decisions = Decisions()
        self.flows = Flows()
        self.reservations = Reservations(
            replicas,
            chooser,
            model=model,
            block_size=block_size,
            queue_s=queue_s,
            metrics=metrics,
            revisions=self.revisions,
            decisions=self.decisions,
        )
        self.admission = Admission(
            self.reservations, queue_s=queue_s, max_waiting=max_waiting, tenant_share=tenant_share, metrics=metrics
        )
        self._vocab_size = vocab_size
        self._running: set[DecodeStreams] = set()

    def start(self, request: SequenceRequest) -> Generation:
        relay = Relay(
            request,
            self.admission,
            self.reservations,
            begin=self.attempt,
            running=self._running,
            counts_of=self.revisions.count,
            answered=self._answered,
        )
        self.decisions.live(request.id, relay.life, tenant=request.tenant, drafts=relay.route.drafts)
        return relay

    def attempt(self, state: RequestState, request: SequenceRequest, pair: Pair, avoid: Set[Culprit]) -> Attempt:
        """Create an attempt at the rest of a request; the caller runs it."""
        return Attempt(
            state,
            request,
            pair,
            reservations=self.reservations,
            flows=self.flows,
            vocab_size=self._vocab_size,
            avoid=avoid,
        )

    @property
    def num_running(self) -> int:
        """Number of running attempts."""
        return len(self._running)

    async def rebalance_forever(self) -> None:
        """Keep the running answers spread evenly over the decode replicas."""
        await Rebalancer(self.replicas, self.revisions, running=self._running).run_forever()

    async def back_up_forever(self, *, every: int) -> None:
        """Copy running answers to idle prefill replicas, every `every` tokens."""
        await Backup(self.replicas, self.revisions, running=self._running, every=every).run_forever()

    def _answered(self, state: RequestState, revision: int | None) -> None:
        """Count latencies per revision while the deployment is updated; the controller reads the counts."""
        if not self.revisions.is_split:
            return
        ttft_s, itl_s = state.spread_s()
        counts = self.revisions.count(revision)
        counts.answered += 1
        counts.ttft_s += ttft_s
        counts.itl_s += itl_s
