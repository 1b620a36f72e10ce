"""Attached deployments of one router: deployments without endpoints of their own, whose models this router serves.

Each is opened in a separate task and has its own background tasks, so a failure affects that deployment alone. A
deployment that fails to open is retried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from core.identity.deployment_secrets import DeploymentSecrets
from core.spec.schema import Spec
from core.types.errors import ClusterError
from frontend.served_model import RouterMembership, ServedModel, counting_supervisor
from frontend.text.completion import Models
from router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_REFRESH_S = 1.0
# Interval between two attempts to open a deployment.
_RETRY_S = 5.0
_CLOSE_S = 20.0
_SETTLE_S = 10.0
_OPENING = "the model is loading"


@dataclass(frozen=True, kw_only=True)
class AttachedDeployment:
    """Deployment whose spec names this router's deployment for its endpoints."""

    spec: Spec
    credentials: DeploymentSecrets
    enter: Callable[[], Awaitable[RouterMembership]]  # raises ClusterError

    @property
    def life(self) -> bytes:
        """Id of this instance of the deployment; an instance recreated under the same name has another id."""
        return self.credentials.secret


FindAttached: TypeAlias = Callable[[], Awaitable[Sequence[AttachedDeployment]]]  # raises ClusterError


@dataclass(eq=False)
class _Entry:
    """State of one attached deployment."""

    attached: AttachedDeployment
    opening: asyncio.Task[None] | None = None
    was_tried: asyncio.Event = field(default_factory=asyncio.Event)
    served: ServedModel | None = None
    leave: Callable[[], None] = field(default=lambda: None)


class AttachedDeployments:
    """Opens, serves and closes attached deployments. Owns their models. Bound to the router's event loop."""

    def __init__(
        self, models: Models, find: FindAttached | None, open_model: Callable[..., Awaitable[ServedModel]]
    ) -> None:
        """find: list the attached deployments; None disables them. open_model: ServedModel.open, bound to what all
        models share."""
        self._models = models
        self._find = find
        self._open_model = open_model
        self._entries: dict[str, _Entry] = {}  # by the deployment's name
        self._rejected: set[str] = set()  # names of deployments whose model name is taken
        self._is_closing = False
        # Held while deployments are opened or closed, so that `close` waits for that.
        self._changing = asyncio.Lock()
        self._is_missing = False  # the last listing failed

    @property
    def is_enabled(self) -> bool:
        return self._find is not None

    def is_any_ready(self) -> bool:
        """Return whether any attached deployment has a replica that can answer."""
        return any(entry.served and entry.served.is_ready() for entry in self._entries.values())

    async def settle(self) -> None:
        """Wait until each current deployment has opened or failed once, at most _SETTLE_S."""
        await self._refresh()
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                for entry in [*self._entries.values()]:
                    await entry.was_tried.wait()

    async def follow_forever(self) -> None:
        """Open new deployments and close removed ones until `close`."""
        while not self._is_closing:
            await self._refresh()
            await asyncio.sleep(_REFRESH_S)

    async def close(self) -> None:
        """Close all deployments. Call before cancelling `follow_forever`, which could leave one half closed."""
        self._is_closing = True
        async with self._changing:
            await asyncio.gather(*(self._remove(name) for name in list(self._entries)))

    async def _refresh(self) -> None:
        if self._find is None:
            return
        try:
            found = {attached.spec.name: attached for attached in await self._find()}
        except ClusterError as error:  # keep the deployments that are open
            if not self._is_missing:
                logger.warning("failed to list attached deployments: %s", error)
            self._is_missing = True
            return
        self._is_missing = False
        async with self._changing:
            for name, entry in list(self._entries.items()):
                is_failing, now = entry.served is not None and entry.served.is_failing, found.get(name)
                if now is None or now.life != entry.attached.life or is_failing:
                    await self._remove(name, successor=now)
            self._rejected &= found.keys()
            for name, attached in sorted(found.items()):
                if not self._is_closing and name not in self._entries:
                    self._add(attached)

    def _add(self, attached: AttachedDeployment) -> None:
        name, names = attached.spec.name, attached.spec.model.names
        others = [entry.attached.spec.model.names for entry in self._entries.values()]
        taken = set(self._models.default.model.names).union(*others)
        if shared := taken.intersection(names):
            if name not in self._rejected:
                text = "attached deployment %s: model name %s is taken; set model.served_name to another one"
                logger.error(text, name, min(shared))
            self._rejected.add(name)
            return
        self._rejected.discard(name)
        entry = self._entries[name] = _Entry(attached)
        self._models.report_unavailable(names, _OPENING)
        entry.opening = asyncio.create_task(self._open(entry), name=f"attached-deployment {name}")

    async def _open(self, entry: _Entry) -> None:
        spec, last_error = entry.attached.spec, ""
        while True:
            try:
                await self._try_to_open(entry)
            except Exception as error:  # boundary: any failure is this deployment's own
                if last_error != (last_error := str(error)):
                    is_ours = isinstance(error, ClusterError)
                    trace = None if is_ours else error
                    logger.error("attached deployment %s: not opened: %s", spec.name, error, exc_info=trace)
                self._models.report_unavailable(
                    spec.model.names, "its deployment is unreachable, or its model files cannot be read"
                )
                entry.was_tried.set()
                await asyncio.sleep(_RETRY_S)
            else:
                logger.info("attached deployment opened name=%s model=%s", spec.name, spec.model.name)
                entry.was_tried.set()
                return

    async def _try_to_open(self, entry: _Entry) -> None:
        attached, metrics = entry.attached, Metrics()
        entered = await _enter(attached)
        try:
            served = await self._open_model(
                attached.spec,
                credentials=attached.credentials,
                membership=entered,
                metrics=metrics,
                tasks=counting_supervisor(metrics),
            )
        except BaseException:
            await asyncio.to_thread(entered.leave)
            raise
        entry.served, entry.leave = served, entered.leave
        if entered.tell:
            served.report_traffic(entered.tell)
        self._models.add(served.completions)

    async def _remove(self, name: str, *, successor: AttachedDeployment | None = None) -> None:
        """Stop routing to the deployment and cut off its requests. successor: its recreation under the same name."""
        if (entry := self._entries.pop(name, None)) is None:
            return
        if entry.opening:
            entry.opening.cancel()
            await asyncio.gather(entry.opening, return_exceptions=True)
        self._models.forget_unavailable(entry.attached.spec.model.names)
        if entry.served:
            self._models.remove(entry.served.completions)
        if successor:
            self._models.report_unavailable(successor.spec.model.names, _OPENING)
        try:
            if entry.served:
                async with asyncio.timeout(_CLOSE_S):
                    await entry.served.close()
        except Exception:  # boundary: the other deployments are unaffected
            logger.exception("attached deployment %s: failed to close", name)
        finally:
            await asyncio.to_thread(entry.leave)
        logger.info("attached deployment closed name=%s", name)


async def _enter(attached: AttachedDeployment) -> RouterMembership:
    """Enter the deployment. If the caller is cancelled, the identity is released once entering has completed."""
    entering = asyncio.ensure_future(attached.enter())
    try:
        return await asyncio.shield(entering)
    except asyncio.CancelledError:
        entering.add_done_callback(_leave)
        raise


def _leave(entered: asyncio.Future[RouterMembership]) -> None:
    if not entered.cancelled() and not entered.exception():
        asyncio.get_running_loop().run_in_executor(None, entered.result().leave)
