"""The borrowers of one router: deployments that have no doors of their own, and whose models are served at these.

A borrower comes, fails and goes by itself: it is opened in a task of its own, its background tasks count for nobody
else, and what cannot be opened is tried again while the others go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from core.identity.credentials import Identity
from core.identity.deployment_secrets import Credentials
from core.process.supervisor import Supervisor
from core.spec.schema import Spec
from core.trace.traffic import TrafficAnswer, TrafficNews
from core.types.errors import ClusterError
from core.types.revisions import RevisionTable
from frontend.served_model import ServedModel
from frontend.text.models import Models
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_AGAIN_S = 5.0  # until what could not be opened is tried again
_CLOSE_S = 20.0
_SETTLE_S = 10.0
_OPENING = "it is just being taken up"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """By what a router is one of a borrower's."""

    identity: Identity  # of this router, as one of the borrower's deployment
    trail: Path | None = None
    revisions: RevisionTable | None = None
    tell: Callable[[TrafficNews], Awaitable[TrafficAnswer]] | None = None  # its controller
    leave: Callable[[], None] = lambda: None  # the identity is not needed any more; may block


@dataclass(frozen=True, kw_only=True)
class Borrower:
    """A deployment that names these doors for its own."""

    spec: Spec
    credentials: Credentials
    enter: Callable[[], Awaitable[Pass]]  # raises ClusterError

    @property
    def life(self) -> bytes:
        """Another one, of the same name, has another."""
        return self.credentials.secret


FindBorrowers: TypeAlias = Callable[[], Awaitable[Sequence[Borrower]]]  # raises ClusterError


@dataclass(eq=False)
class _Kept:
    """A borrower that is known here."""

    borrower: Borrower
    opening: asyncio.Task[None] | None = None
    was_tried: asyncio.Event = field(default_factory=asyncio.Event)
    served: ServedModel | None = None
    leave: Callable[[], None] = field(default=lambda: None)


class Borrowers:
    """Lives on its router's event loop. Owns the models that it has opened."""

    def __init__(
        self,
        models: Models,
        find: FindBorrowers | None,
        *,
        node: str,
        has_many_tenants: Callable[[], bool],
        tracing: Tracing | None = None,
    ) -> None:
        """find: None: nobody comes. The others as in ServedModel.open."""
        self._models = models
        self._find = find
        self._node = node
        self._has_many_tenants = has_many_tenants
        self._tracing = tracing
        self._kept: dict[str, _Kept] = {}  # by the deployment's name
        self._refused: set[str] = set()  # while another's model is called as theirs is
        self._is_closing = False
        self._changing = asyncio.Lock()  # while some are opened or closed: who closes all waits for that
        self._is_missing = False  # who they are could not be asked, the last time

    @property
    def may_come(self) -> bool:
        return self._find is not None

    def is_any_ready(self) -> bool:
        """Whether one of them has a replica that answers."""
        return any(kept.served and kept.served.is_ready() for kept in self._kept.values())

    async def settle(self) -> None:
        """Those of now are opened, or have failed once; or that takes too long."""
        await self._look()
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                for kept in [*self._kept.values()]:
                    await kept.was_tried.wait()

    async def follow_forever(self) -> None:
        """Those that come are opened, those that are gone are closed."""
        while not self._is_closing:
            await self._look()
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Before what follows is cancelled: else one may be left half closed."""
        self._is_closing = True
        async with self._changing:
            await asyncio.gather(*(self._end(name) for name in list(self._kept)))

    async def _look(self) -> None:
        if self._find is None:
            return
        try:
            found = {borrower.spec.name: borrower for borrower in await self._find()}
        except ClusterError as error:  # those that are here stay
            if not self._is_missing:
                logger.warning("which deployments are served at these doors, too, cannot be asked: %s", error)
            self._is_missing = True
            return
        self._is_missing = False
        async with self._changing:
            for name, kept in list(self._kept.items()):
                is_failing, now = kept.served is not None and kept.served.is_failing, found.get(name)
                if now is None or now.life != kept.borrower.life or is_failing:
                    await self._end(name, successor=now)
            self._refused &= found.keys()
            for name, borrower in sorted(found.items()):
                if not self._is_closing and name not in self._kept:
                    self._begin(borrower)

    def _begin(self, borrower: Borrower) -> None:
        name, model = borrower.spec.name, borrower.spec.model.name
        taken = [self._models.default.model.id, *(kept.borrower.spec.model.name for kept in self._kept.values())]
        if model in taken:
            if name not in self._refused:
                text = "borrower %s: its model is called %s, as another is: `model.served_name` says another"
                logger.error(text, name, model)
            self._refused.add(name)
            return
        self._refused.discard(name)
        kept = self._kept[name] = _Kept(borrower)
        self._models.say_away(model, _OPENING)
        kept.opening = asyncio.create_task(self._open(kept), name=f"borrower {name}")

    async def _open(self, kept: _Kept) -> None:
        spec, said = kept.borrower.spec, ""
        while True:
            try:
                await self._try_to_open(kept)
            except Exception as error:  # an edge: whatever it is, it is this borrower's
                if said != (said := str(error)):
                    is_ours = isinstance(error, ClusterError)
                    logger.error("borrower %s: not opened: %s", spec.name, error, exc_info=None if is_ours else error)
                self._models.say_away(spec.model.name, "its deployment cannot be reached, or its model not read")
                kept.was_tried.set()
                await asyncio.sleep(_AGAIN_S)
            else:
                logger.info("borrower %s: model %s is served", spec.name, spec.model.name)
                kept.was_tried.set()
                return

    async def _try_to_open(self, kept: _Kept) -> None:
        borrower, metrics = kept.borrower, Metrics()
        entered = await _entered(borrower)
        try:
            served = await ServedModel.open(
                borrower.spec,
                credentials=borrower.credentials,
                identity=entered.identity,
                metrics=metrics,
                tasks=Supervisor(died=lambda name: metrics.task_deaths.labels(name.partition(" ")[0]).inc()),
                node=self._node,
                trail=entered.trail,
                revisions=entered.revisions,
                has_many_tenants=self._has_many_tenants,
                tracing=self._tracing,
            )
        except BaseException:
            await asyncio.to_thread(entered.leave)
            raise
        kept.served, kept.leave = served, entered.leave
        if entered.tell:
            served.tell_traffic(entered.tell)
        self._models.add(served.completions)

    async def _end(self, name: str, *, successor: Borrower | None = None) -> None:
        """Nobody is sent there any more; what runs there is cut off. successor: who is opened next."""
        if (kept := self._kept.pop(name, None)) is None:
            return
        if kept.opening:
            kept.opening.cancel()
            await asyncio.gather(kept.opening, return_exceptions=True)
        self._models.forget_away(kept.borrower.spec.model.name)
        if kept.served:
            self._models.remove(kept.served.completions)
        if successor:
            self._models.say_away(successor.spec.model.name, _OPENING)
        try:
            if kept.served:
                async with asyncio.timeout(_CLOSE_S):
                    await kept.served.close()
        except Exception:  # an edge: the others go on
            logger.exception("borrower %s: not all of it could be closed", name)
        finally:
            await asyncio.to_thread(kept.leave)
        logger.info("borrower %s: gone", name)


async def _entered(borrower: Borrower) -> Pass:
    """Whoever is cancelled meanwhile leaves again as soon as it is in: a thread goes on to its end."""
    entering = asyncio.ensure_future(borrower.enter())
    try:
        return await asyncio.shield(entering)
    except asyncio.CancelledError:
        entering.add_done_callback(_leave)
        raise


def _leave(entered: asyncio.Future[Pass]) -> None:
    if not entered.cancelled() and not entered.exception():
        asyncio.get_running_loop().run_in_executor(None, entered.result().leave)
