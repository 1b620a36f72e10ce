"""A router without its doors and its text: it serves token requests on the replicas that it knows."""

from __future__ import annotations

from cluster.words.request import SequenceRequest
from router.generation import Generation
from router.serving.backup import Backup
from router.serving.decode_streams import DecodeStreams
from router.serving.dispatch import Dispatch
from router.serving.rebalance import Rebalancer
from router.serving.relay import Relay


class RouterCore:
    """Implements router.generation.TokenService. Owns what runs, and the loops that move it and copy it."""

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch
        self._running: set[DecodeStreams] = set()

    def start(self, request: SequenceRequest) -> Generation:
        return Relay(request, self.dispatch, self._running)

    @property
    def num_running(self) -> int:
        """Attempts under way."""
        return len(self._running)

    async def rebalance_forever(self) -> None:
        """Keep the decode replicas about evenly filled with what runs."""
        await Rebalancer(self.dispatch.replicas, running=self._running).run_forever()

    async def back_up_forever(self, *, every: int) -> None:
        """Keep copies of what runs, no more than so many tokens behind, where prefill replicas are idle."""
        await Backup(self.dispatch.replicas, running=self._running, every=every).run_forever()
