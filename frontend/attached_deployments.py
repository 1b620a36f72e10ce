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
from core.identity.deployment_secrets import DeploymentSecrets
from core.process.supervisor import Supervisor
from core.spec.schema import Spec
from core.trace.traffic import TrafficAnswer, TrafficReport
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
class AttachedIdentity:
    """By what a router is one of a borrower's."""

    identity: Identity  # of this router, as one of the borrower's deployment
    audit_log: Path | None = None
    revisions: RevisionTable | None = None
    tell: Callable[[TrafficReport], Awaitable[TrafficAnswer]] | None = None  # its controller
    leave: Callable[[], None] = lambda: None  # the identity is not needed any more; may block


@dataclass(frozen=True, kw_only=True)
class AttachedDeployment:
    """A deployment that names these doors for its own."""

    spec: Spec
    credentials: DeploymentSecrets
    enter: Callable[[], Awaitable[AttachedIdentity]]  # raises ClusterError

    @property
    def life(self) -> bytes:
        """Another one, of the same name, has another."""
        return self.credentials.secret


FindAttached: TypeAlias = Callable[[], Awaitable[Sequence[AttachedDeployment]]]  # raises ClusterError


@dataclass(eq=False)
class _Kept:
    """A borrower that is known here."""

    attached: AttachedDeployment
    opening: asyncio.Task[None] | None = None
    was_tried: asyncio.Event = field(default_factory=asyncio.Event)
    served: ServedModel | None = None
    leave: Callable[[], None] = field(default=lambda: None)


class AttachedDeployments:
    """Lives on its router's event loop. Owns the models that it has opened."""

    def __init__(
        self,
        models: Models,
        find: FindAttached | None,
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
        self._rejected: set[str] = set()  # while another's model is called as theirs is
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
            found = {attached.spec.name: attached for attached in await self._find()}
        except ClusterError as error:  # those that are here stay
            if not self._is_missing:
                logger.warning("which deployments are served at these doors, too, cannot be asked: %s", error)
            self._is_missing = True
            return
        self._is_missing = False
        async with self._changing:
            for name, kept in list(self._kept.items()):
                is_failing, now = kept.served is not None and kept.served.is_failing, found.get(name)
                if now is None or now.life != kept.attached.life or is_failing:
                    await self._end(name, successor=now)
            self._rejected &= found.keys()
            for name, attached in sorted(found.items()):
                if not self._is_closing and name not in self._kept:
                    self._begin(attached)

    def _begin(self, attached: AttachedDeployment) -> None:
        name, model = attached.spec.name, attached.spec.model.name
        taken = [self._models.default.model.id, *(kept.attached.spec.model.name for kept in self._kept.values())]
        if model in taken:
            if name not in self._rejected:
                text = "borrower %s: its model is called %s, as another is: `model.served_name` says another"
                logger.error(text, name, model)
            self._rejected.add(name)
            return
        self._rejected.discard(name)
        kept = self._kept[name] = _Kept(attached)
        self._models.report_unavailable(model, _OPENING)
        kept.opening = asyncio.create_task(self._open(kept), name=f"borrower {name}")

    async def _open(self, kept: _Kept) -> None:
        spec, said = kept.attached.spec, ""
        while True:
            try:
                await self._try_to_open(kept)
            except Exception as error:  # an edge: whatever it is, it is this borrower's
                if said != (said := str(error)):
                    is_ours = isinstance(error, ClusterError)
                    logger.error("borrower %s: not opened: %s", spec.name, error, exc_info=None if is_ours else error)
                self._models.report_unavailable(
                    spec.model.name, "its deployment cannot be reached, or its model not read"
                )
                kept.was_tried.set()
                await asyncio.sleep(_AGAIN_S)
            else:
                logger.info("borrower %s: model %s is served", spec.name, spec.model.name)
                kept.was_tried.set()
                return

    async def _try_to_open(self, kept: _Kept) -> None:
        attached, metrics = kept.attached, Metrics()
        entered = await _entered(attached)
        try:
            served = await ServedModel.open(
                attached.spec,
                credentials=attached.credentials,
                identity=entered.identity,
                metrics=metrics,
                tasks=Supervisor(died=lambda name: metrics.task_deaths.labels(name.partition(" ")[0]).inc()),
                node=self._node,
                audit_log=entered.audit_log,
                revisions=entered.revisions,
                has_many_tenants=self._has_many_tenants,
                tracing=self._tracing,
            )
        except BaseException:
            await asyncio.to_thread(entered.leave)
            raise
        kept.served, kept.leave = served, entered.leave
        if entered.tell:
            served.report_traffic(entered.tell)
        self._models.add(served.completions)

    async def _end(self, name: str, *, successor: AttachedDeployment | None = None) -> None:
        """Nobody is sent there any more; what runs there is cut off. successor: who is opened next."""
        if (kept := self._kept.pop(name, None)) is None:
            return
        if kept.opening:
            kept.opening.cancel()
            await asyncio.gather(kept.opening, return_exceptions=True)
        self._models.forget_unavailable(kept.attached.spec.model.name)
        if kept.served:
            self._models.remove(kept.served.completions)
        if successor:
            self._models.report_unavailable(successor.spec.model.name, _OPENING)
        try:
            if kept.served:
                async with asyncio.timeout(_CLOSE_S):
                    await kept.served.close()
        except Exception:  # an edge: the others go on
            logger.exception("borrower %s: not all of it could be closed", name)
        finally:
            await asyncio.to_thread(kept.leave)
        logger.info("borrower %s: gone", name)


async def _entered(attached: AttachedDeployment) -> AttachedIdentity:
    """Whoever is cancelled meanwhile leaves again as soon as it is in: a thread goes on to its end."""
    entering = asyncio.ensure_future(attached.enter())
    try:
        return await asyncio.shield(entering)
    except asyncio.CancelledError:
        entering.add_done_callback(_leave)
        raise


def _leave(entered: asyncio.Future[AttachedIdentity]) -> None:
    if not entered.cancelled() and not entered.exception():
        asyncio.get_running_loop().run_in_executor(None, entered.result().leave)
