"""The life of one replica: placed, started, loaded, serving, drained, gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import cast

from cluster.control.desired_state import Desired
from cluster.control.gang import Gang, Home
from cluster.control.placement import NO_FAILURES
from cluster.control.replica import ReplicaState, ReplicaStatus, role_of
from core.process.log import LogPart
from core.types.errors import RankUnreachable, ReplicaFailed
from core.types.rank_api import Binding, Progress, RankStatus

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_POLL_EAGERLY_S = 0.2  # while somebody waits for a change
_SILENT_S = 60.0  # rank 0 has not answered for so long: it hangs


class ReplicaLifecycle:
    """Owned by the controller's event loop. `view` is always fit to show.

    A replica that changes its role is two lives, one after the other, of one gang: the first drains, and hands it to
    its heir. Where that does not come to pass, the heir starts like any other replica.
    """

    def __init__(
        self, replica: str, desired: Desired, *, failures: Mapping[str, int] = NO_FAILURES, was: str = ""
    ) -> None:
        """failures: how many of its pool's last starts failed on each node, by its name. was: the replica whose heir
        this one is."""
        self.view = ReplicaStatus(id=replica, role=role_of(replica), was=was)
        self.serving_since: float | None = None  # time.monotonic()
        self.is_adopted = False  # served before this life of the controller: routers know of it
        self._heard_at = 0.0
        self._desired = desired
        self._timeouts = desired.spec.timeouts
        self._gang = Gang(replica, desired, failures=failures)
        self._leave = asyncio.Event()
        self._successor: ReplicaLifecycle | None = None
        self._awaits_gang = bool(was)
        self._settled = asyncio.Event()  # whether there is a gang to take over
        self._inherited_at: float | None = None  # time.monotonic()

    @property
    def home(self) -> Home | None:
        return self._gang.home

    @property
    def gang(self) -> str:
        """What Ray calls its gang."""
        return self._gang.name

    async def live(self) -> None:
        """Start, serve and, once asked to, drain. Returns when it has left as it should, or raises ReplicaFailed.

        However it ends, by cancellation too, nothing of the replica is left but what its heir has taken.
        """
        is_handed_on = False
        try:
            if self.view.state is ReplicaState.PENDING:
                if self._awaits_gang:
                    self.view.stage = f"waits for {self.view.was} to drain"
                    await self._settled.wait()
                if self._inherited_at is None:
                    await self._gang.place(self._note_stage)
                await self._start()
            is_drained = await self._serve()
            is_handed_on = is_drained and self._successor is not None and self._successor.inherit(self._gang)
        finally:
            self._awaits_gang = False
            if self._successor and not is_handed_on:
                self._successor.inherit(None)
            if not is_handed_on:
                await asyncio.shield(self._gang.remove(is_serving=self.serving_since is not None))

    def leave(self, successor: ReplicaLifecycle | None = None) -> None:
        """Drain, then let live() return. One that does not serve yet has nothing to drain: cancel live(), too.

        heir: another life, which goes on with this one's gang, once that has drained.
        """
        self._successor = successor
        self._enter(ReplicaState.DRAINING)
        self._leave.set()

    def inherit(self, gang: Gang | None) -> bool:
        """From the life before this one: its gang, or that there is none to be had. False: it is not wanted any
        more, and whoever has it removes it."""
        if not self._awaits_gang:
            return False
        self._awaits_gang = False
        if gang:
            self._gang, self._inherited_at = gang, time.monotonic()
        else:
            self.view.was = ""
        self._settled.set()
        return gang is not None

    async def adopt(self) -> None:
        """Before live(): take over what an earlier life of the controller started, or raise ReplicaFailed. One that has
        changed its role has the id then that its ranks have."""
        self._gang.find()
        if self._gang.name in self._desired.switched:
            replica = await self._gang.present_id()
            self.view.id, self.view.role = replica, role_of(replica)
        self._note_bindings(await self._gang.ask_all("bind"))
        state = await self._refresh()
        if state == "loading":
            raise ReplicaFailed("was still loading")
        self._enter(ReplicaState.READY)
        self.is_adopted = True
        self.serving_since = time.monotonic()  # whoever lets it go has to let it drain
        if state != "ready":
            self.leave()

    async def read_log(self, rank: int, *, lines: int, start: int | None) -> LogPart:
        """From the rank's own process. Raises ReplicaFailed or TimeoutError when that does not answer."""
        return cast(LogPart, await self._gang.ask(rank, "read_log", lines, start))

    async def _start(self) -> None:
        """Within timeouts.start_s of being placed, every rank serves."""
        self._enter(ReplicaState.STARTING)
        try:
            async with asyncio.timeout(self._timeouts.start_s):
                bindings = await self._bind()
                self._note_bindings(bindings)
                self._enter(ReplicaState.LOADING)
                await self._load([binding["address"] for binding in bindings])
        except TimeoutError:
            at = f", at {self.view.stage!r}" if self.view.stage else ""
            reason = f"not ready {self._timeouts.start_s:g} s after it was placed (timeouts.start_s){at}"
            raise ReplicaFailed(reason, will_repeat=True) from None

    async def _bind(self) -> list[Binding]:
        if self._inherited_at is not None:
            return await self._gang.become(self.view.id, self._desired)
        self._gang.spawn()
        bindings: list[Binding] = await self._gang.ask_all("bind", within_s=None)
        return bindings

    async def _load(self, addresses: list[str]) -> None:
        progress = asyncio.create_task(self._follow_progress())
        try:
            await self._gang.ask_all("load", addresses, within_s=None)
        finally:
            progress.cancel()

    async def _follow_progress(self) -> None:
        """The slowest rank's progress is the replica's."""
        with contextlib.suppress(ReplicaFailed):  # load() will say it better
            while True:
                with contextlib.suppress(TimeoutError):
                    answers: list[Progress] = await self._gang.ask_all("progress")
                    slowest = min(answers, key=lambda answer: answer["fraction"])
                    self.view.stage, self.view.fraction = slowest["stage"], slowest["fraction"]
                await asyncio.sleep(_POLL_EAGERLY_S)

    async def _serve(self) -> bool:
        """Until it has drained, as asked, or may not take longer for that: False. Raises ReplicaFailed when a rank ends
        before."""
        self.serving_since = self._heard_at = time.monotonic()
        if self._inherited_at is not None:
            seconds = self.serving_since - self._inherited_at
            logger.info("%s serves %.2f s after %s had drained", self.view.id, seconds, self.view.was)
        await self._hear()
        if not self._leave.is_set():
            self._enter(ReplicaState.READY)
        watch = asyncio.create_task(self._gang.watch())
        stay = asyncio.create_task(self._stay_until_drained())
        try:
            await asyncio.wait({watch, stay}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                await watch
            return await stay
        finally:
            watch.cancel()
            stay.cancel()

    async def _stay_until_drained(self) -> bool:
        """Keep the view fresh until told to leave; then drain, and return when nothing is left or, False, the time is
        up."""
        while not await self._is_leaving_within(_POLL_S):
            await self._hear()
        try:
            async with asyncio.timeout(self._timeouts.drain_s):
                await self._gang.ask_all("drain", within_s=None)
                while await self._hear() != "drained":
                    await asyncio.sleep(_POLL_EAGERLY_S)
        except TimeoutError:
            logger.warning("%s is still busy after timeouts.drain_s; it leaves now", self.view.id)
            return False
        return True

    async def _is_leaving_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._leave.wait()
        except TimeoutError:
            return False

    async def _hear(self) -> str:
        """_refresh() that forgives a rank which does not answer at once, but not for ever."""
        try:
            state = await self._refresh()
        except (TimeoutError, RankUnreachable):
            if time.monotonic() - self._heard_at > _SILENT_S:
                raise ReplicaFailed(f"rank 0 has been silent for {_SILENT_S:g} s") from None
            return ""
        self._heard_at = time.monotonic()
        return state

    async def _refresh(self) -> str:
        """Bring the view up to date; returns rank 0's own word for the replica's state. Raises TimeoutError."""
        status: RankStatus = await self._gang.ask(0, "status")
        self.view.blocks = status["blocks"]
        self.view.running, self.view.waiting = status["running"], status["waiting"]
        return status["state"]

    def _enter(self, state: ReplicaState) -> None:
        if self.home:
            self.view.node = self.home.node
        logger.info("%s is %s", self.view.id, state)
        self.view.state, self.view.stage, self.view.fraction = state, "", 0.0

    def _note_stage(self, stage: str) -> None:
        self.view.stage = stage

    def _note_bindings(self, bindings: list[Binding]) -> None:
        self.view.ranks = [{"pid": binding["pid"], "device": binding["device"]} for binding in bindings]
