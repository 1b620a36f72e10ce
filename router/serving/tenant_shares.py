"""Where requests wait until their tenant has less than its share: before the gate at which all wait for room.

So what one tenant waits for is in nobody else's way: neither in the queue, nor in the prediction of when a turn comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from router.routing.fair_shares import QueuedRequest
from router.routing.tenant_share import NO_PLACES, Places, is_within_share
from router.serving.admission_queue import AdmissionGate

_FRESH_S = 1.0


@dataclass(eq=False)
class Held:
    """By one request, of its tenant's share."""

    tenant: str
    places: Places
    is_booked: bool = False  # a replica counts them, too
    timer: asyncio.TimerHandle | None = None  # until it ends, they are not free for others either


class TenantShares:
    """Counts what each tenant has been let in with, by this router. Belongs to the event loop.

    A line of its own holds those of a tenant who wait, while there are any: with users' shares, priorities and turns as
    at the gate behind it.
    """

    def __init__(
        self, *, share: Callable[[], float], free: Callable[[], Places], max_waiting: int, queue_s: float
    ) -> None:
        """share: of what the others leave; now. free: places of all who answer, by their own word and what this
        router has booked there; now. max_waiting: of one tenant, as AdmissionQueue has it."""
        self._share = share
        self._free_at_replicas = free
        self._max_waiting = max_waiting
        self._queue_s = queue_s
        self._held: dict[str, Places] = {}
        self._unbooked = Counter[str]()  # requests of each tenant on their way to a replica
        self._fresh = NO_PLACES  # of these, of those that may well get there now
        self._loop = asyncio.get_running_loop()
        self._lines: dict[str, AdmissionGate[Held]] = {}
        self._last_free = NO_PLACES
        self._left: Places | None = None  # free, while the lines are asked in turn

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def num_lines(self) -> int:
        """Tenants of which somebody waits."""
        return len(self._lines)

    @property
    def held(self) -> Mapping[str, Places]:
        """By tenant, without those who have nothing."""
        return self._held

    @asynccontextmanager
    async def enter(self, queued: QueuedRequest, places: Places, *, within_s: float | None) -> AsyncIterator[Held]:
        """Hold so much of its tenant's share for as long as the block lasts, from its turn on.

        Raises CapacityError, as AdmissionGate.enter does.
        """
        take = partial(self._take, queued.tenant, places)
        held = self.take_now(queued.tenant, places) or await self._wait(queued, take, within_s)
        try:
            yield held
        finally:
            self.give_back(held)

    def take_now(self, tenant: str, places: Places) -> Held | None:
        """The same without a wait, for whoever gives it back; None where others of its tenant wait, or it would."""
        return None if tenant in self._lines else self._take(tenant, places)

    def give_back(self, held: Held, *, wakes: bool = True) -> None:
        """wakes: others may have what it had."""
        self.booked(held)
        left = self._held.pop(held.tenant).less(held.places)
        if left.num_streams:
            self._held[held.tenant] = left
        if wakes:
            self._wake()

    def booked(self, held: Held) -> None:
        """A replica counts it from now on."""
        self._settle(held)
        if not held.is_booked:
            held.is_booked = True
            self._unbooked[held.tenant] -= 1
            if not self._unbooked[held.tenant]:
                del self._unbooked[held.tenant]

    def room_changed(self) -> None:
        """The replicas have told something, or something that was booked there is over."""
        if not self._lines:
            return
        before, self._last_free = self._last_free, self._free()
        if self._last_free.num_streams > before.num_streams or self._last_free.num_blocks > before.num_blocks:
            self._wake()

    async def _wait(self, queued: QueuedRequest, take: Callable[[], Held | None], within_s: float | None) -> Held:
        line = self._lines.get(queued.tenant)
        if line is None:
            self._last_free = self._free()
            line = self._lines[queued.tenant] = AdmissionGate(
                max_waiting=self._max_waiting, queue_s=self._queue_s, lacking="its tenant had its share of the replicas"
            )
        try:
            return await line.enter(queued, take, within_s=within_s, give_back=self.give_back)
        finally:
            if not len(line) and self._lines.get(queued.tenant) is line:
                del self._lines[queued.tenant]

    def _take(self, tenant: str, places: Places) -> Held | None:
        own, is_on_its_way = self._held.get(tenant, NO_PLACES), self._unbooked[tenant] > 0
        if not is_within_share(own, places, self._free(), share=self._share(), is_on_its_way=is_on_its_way):
            return None
        self._held[tenant] = own.plus(places)
        self._unbooked[tenant] += 1
        self._fresh = self._fresh.plus(places)
        if self._left:
            self._left = self._left.less(places)
        held = Held(tenant, places)
        held.timer = self._loop.call_later(_FRESH_S, self._settle, held)
        return held

    def _settle(self, held: Held) -> None:
        """Who has found no place by now waits for one that others need not keep free."""
        if held.timer:
            held.timer.cancel()
            held.timer = None
            self._fresh = self._fresh.less(held.places)

    def _wake(self) -> None:
        """Each line asks for itself: whoever has least is let in by what is left first."""
        if not self._lines:
            return
        self._left = self._last_free = self._free()
        for line in list(self._lines.values()):
            line.wake()
        self._left = None

    def _free(self) -> Places:
        return self._left or self._free_at_replicas().less(self._fresh)
