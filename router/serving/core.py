"""A router without its doors and its text: it serves token requests on the replicas that it knows."""

from __future__ import annotations

from core.types.request import SequenceRequest
from router.generation import Generation
from router.serving.backup import Backup
from router.serving.decode_streams import DecodeStreams
from router.serving.dispatch import Dispatch
from router.serving.rebalance import Rebalancer
from router.serving.relay import Relay
from router.serving.request_state import RequestState


class RouterCore:
    """Implements router.generation.TokenService. Owns what runs, and the loops that move it and copy it."""

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch
        self._running: set[DecodeStreams] = set()

    def start(self, request: SequenceRequest) -> Generation:
        return Relay(request, self.dispatch, self._running, answered=self._answered)

    @property
    def num_running(self) -> int:
        """Attempts under way."""
        return len(self._running)

    async def rebalance_forever(self) -> None:
        """Keep the decode replicas about evenly filled with what runs."""
        dispatch = self.dispatch
        await Rebalancer(dispatch.replicas, dispatch.revisions, running=self._running).run_forever()

    async def back_up_forever(self, *, every: int) -> None:
        """Keep copies of what runs, no more than so many tokens behind, where prefill replicas are idle."""
        dispatch = self.dispatch
        await Backup(dispatch.replicas, dispatch.revisions, running=self._running, every=every).run_forever()

    def _answered(self, state: RequestState, revision: int | None) -> None:
        """Count latencies per revision while the deployment is updated; the controller reads the counts."""
        revisions = self.dispatch.revisions
        if not revisions.is_split:
            return
        ttft_s, itl_s = state.spread_s()
        counts = revisions.count(revision)
        counts.answered += 1
        counts.ttft_s += ttft_s
        counts.itl_s += itl_s
