"""Lifecycle of one replica: placed, started, loaded, serving, drained, gone.

When the controller restarts, it adopts the running replicas that are complete, and removes the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

from cluster.control.desired_state import Desired
from cluster.control.gang import Gang, Home, find_replicas, remove_leftovers
from cluster.control.placement import NO_FAILURES
from cluster.control.pool_plan import STABLE_S
from cluster.control.replica import ReplicaState, ReplicaStatus, number_of, role_of
from core.types.errors import RankUnreachable, ReplicaFailed
from core.types.rank_api import Binding, Progress, RankStatus

logger = logging.getLogger(__name__)

_POLL_S = 1.0
# While a caller waits for the change.
_POLL_EAGERLY_S = 0.2
# A rank 0 that has not answered for this long is taken to hang.
_SILENT_S = 60.0
# Pause between two tries to adopt a replica, and the limit of all tries; `cluster status` waits that long.
_TRY_AGAIN_S = 1.0
_ADOPT_S = 30.0


class ReplicaLifecycle:
    """State machine of one replica, owned by the controller's event loop. `view` can be shown at any time.

    A role switch is two lifecycles of one gang in sequence: the first drains and hands the gang to its successor. If
    that fails, the successor starts like any other replica.
    """

    def __init__(
        self, replica: str, desired: Desired, *, failures: Mapping[str, int] = NO_FAILURES, was: str = ""
    ) -> None:
        """failures: recent failed starts of this pool, by node name. was: id of the replica whose gang this one takes
        over."""
        self.view = ReplicaStatus(id=replica, was=was)
        # Time at which its pool asked it to drain.
        self.left_at: float | None = None
        self.created_at = time.monotonic()
        self.serving_since: float | None = None  # time.monotonic()
        # It served before this run of the controller, so routers already have it.
        self.is_adopted = False
        # Signed record by which routers find it; empty until it serves.
        self.member = b""
        self._answered_at = 0.0
        self._desired = desired
        self._timeouts = desired.spec.timeouts
        self._gang = Gang(replica, desired, failures=failures)
        self._leave = asyncio.Event()
        self._successor: ReplicaLifecycle | None = None
        self._awaits_gang = bool(was)
        # Set once it is decided whether there is a gang to take over.
        self._settled = asyncio.Event()
        self._inherited_at: float | None = None  # time.monotonic()

    @property
    def home(self) -> Home | None:
        return self._gang.home

    @property
    def gang(self) -> str:
        """Gang id in Ray's names."""
        return self._gang.name

    @property
    def is_leaving(self) -> bool:
        return self.view.state is ReplicaState.DRAINING

    @property
    def start_s(self) -> float | None:
        """Seconds until it served; None if it does not serve yet or was adopted."""
        if self.serving_since is None or self.is_adopted:
            return None
        return self.serving_since - self.created_at

    def is_stable(self, now: float) -> bool:
        return self.serving_since is not None and now - self.serving_since >= STABLE_S

    async def live(self) -> None:
        """Start, serve and drain when asked to. Returns after a regular end, else raises ReplicaFailed.

        In every case, including cancellation, everything that its successor has not taken over is removed.
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
        """Drain, then let live() return.

        A replica that does not serve yet has nothing to drain: the caller must also cancel live().

        successor: the replica that takes over this one's gang after the drain.
        """
        self._successor = successor
        self._enter(ReplicaState.DRAINING)
        self._leave.set()

    def inherit(self, gang: Gang | None) -> bool:
        """Take over the predecessor's gang. gang: None if the predecessor has none to give.

        Returns False if the gang was not taken; the caller must then remove it.
        """
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
        """Take over a running replica before live(). Raises ReplicaFailed if it is incomplete.

        After a role switch, the id becomes the one that its ranks report.
        """
        self._gang.find()
        if self._gang.name in self._desired.switched:
            self.view.id = await self._gang.present_id()
        self._note_bindings(await self._gang.ask_all("bind"))
        state = await self._refresh()
        if state == "loading":
            raise ReplicaFailed("was still loading")
        self._enter(ReplicaState.READY)
        self.is_adopted = True
        # From here on the caller has to drain it.
        self.serving_since = time.monotonic()
        if state != "ready":
            self.leave()

    async def _start(self) -> None:
        """Start and load all ranks, within timeouts.start_s of placement."""
        self._enter(ReplicaState.STARTING)
        try:
            async with asyncio.timeout(self._timeouts.start_s):
                bindings = await self._bind()
                self._note_bindings(bindings)
                self._enter(ReplicaState.LOADING)
                await self._load([binding["address"] for binding in bindings])
        except TimeoutError:
            at = f", at {self.view.stage!r}" if self.view.stage else ""
            reason = f"not ready {self._timeouts.start_s:g} s after placement (timeouts.start_s){at}"
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
        """Show the progress of the slowest rank."""
        # load() raises the same failure with a better message.
        with contextlib.suppress(ReplicaFailed):
            while True:
                with contextlib.suppress(TimeoutError):
                    answers: list[Progress] = await self._gang.ask_all("progress")
                    slowest = min(answers, key=lambda answer: answer["fraction"])
                    self.view.stage, self.view.fraction = slowest["stage"], slowest["fraction"]
                await asyncio.sleep(_POLL_EAGERLY_S)

    async def _serve(self) -> bool:
        """Serve until drained. Returns False if draining exceeded its limit.

        Raises ReplicaFailed if a rank ends before that.
        """
        self.serving_since = self._answered_at = time.monotonic()
        if self._inherited_at is not None:
            seconds = self.serving_since - self._inherited_at
            logger.info("role switch done replica=%s seconds=%.2f was=%s", self.view.id, seconds, self.view.was)
        await self._poll()
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
        """Refresh the view until leave(), then drain. Returns whether the drain finished in time."""
        while not await self._is_leaving_within(_POLL_S):
            await self._poll()
        try:
            async with asyncio.timeout(self._timeouts.drain_s):
                await self._gang.ask_all("drain", within_s=None)
                while await self._poll() != "drained":
                    await asyncio.sleep(_POLL_EAGERLY_S)
        except TimeoutError:
            logger.warning("drain timed out (timeouts.drain_s); removing replica=%s", self.view.id)
            return False
        return True

    async def _is_leaving_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._leave.wait()
        except TimeoutError:
            return False

    async def _poll(self) -> str:
        """Refresh the view, tolerating an unresponsive rank 0 for up to 60 s."""
        try:
            state = await self._refresh()
        except (TimeoutError, RankUnreachable):
            if time.monotonic() - self._answered_at > _SILENT_S:
                raise ReplicaFailed(f"rank 0 has been silent for {_SILENT_S:g} s") from None
            return ""
        self._answered_at = time.monotonic()
        return state

    async def _refresh(self) -> str:
        """Update the view and return the state that rank 0 reports. Raises TimeoutError."""
        status: RankStatus = await self._gang.ask(0, "status")
        self.view.blocks = status["blocks"]
        self.member = status.get("member", b"")
        self.view.running, self.view.waiting = status["running"], status["waiting"]
        return status["state"]

    def _enter(self, state: ReplicaState) -> None:
        if self.home:
            self.view.node = self.home.node
        logger.info("replica state replica=%s state=%s", self.view.id, state)
        self.view.state, self.view.stage, self.view.fraction = state, "", 0.0

    def _note_stage(self, stage: str) -> None:
        self.view.stage = stage

    def _note_bindings(self, bindings: list[Binding]) -> None:
        self.view.ranks = [{"pid": binding["pid"], "device": binding["device"]} for binding in bindings]


async def adopt_all(name: str, desired: Desired | None) -> list[ReplicaLifecycle]:
    """Return the replicas that an earlier run of the controller started, ordered by number.

    Incomplete replicas are removed; so are all of them if `desired` is None. Takes at most 30 s. Raises RayError, for
    example while Ray itself restarts; no adoption continues then.
    """
    # Sorted, so that they keep the order in which they were started.
    found = sorted(find_replicas(name), key=number_of)
    lives = await asyncio.gather(*(_adopt(replica, name, desired) for replica in found), return_exceptions=True)
    if problems := [life for life in lives if isinstance(life, BaseException)]:
        raise problems[0]
    return [life for life in lives if isinstance(life, ReplicaLifecycle)]


async def _adopt(replica: str, name: str, desired: Desired | None) -> ReplicaLifecycle | None:
    try:
        if desired is None:
            raise ReplicaFailed("no desired state is stored")
        life = ReplicaLifecycle(replica, desired.as_made(replica, role_of(replica)))
        async with asyncio.timeout(_ADOPT_S):
            while not await _try_to_adopt(life):
                await asyncio.sleep(_TRY_AGAIN_S)
    except (ReplicaFailed, TimeoutError) as error:
        logger.warning("replica removed, not adopted replica=%s reason=%s", replica, error)
        remove_leftovers(replica, name)
        return None
    logger.info("replica adopted replica=%s", replica)
    return life


async def _try_to_adopt(life: ReplicaLifecycle) -> bool:
    """Adopt the replica. Return False if the network failed: it may soon recover, as after a reboot of this host."""
    try:
        await life.adopt()
    except (RankUnreachable, TimeoutError) as error:
        logger.warning("cannot verify replica, retrying replica=%s reason=%s", life.view.id, str(error) or "no answer")
        return False
    return True
