"""What lives of a deployment when its controller starts: taken over where it is whole, removed where it is not."""

from __future__ import annotations

import asyncio
import logging

from cluster.control.desired_state import Desired
from cluster.control.gang import find_replicas, remove_leftovers
from cluster.control.replica import number_of, role_of
from cluster.control.replica_lifecycle import ReplicaLifecycle
from core.types.errors import RankUnreachable, ReplicaFailed

logger = logging.getLogger(__name__)

_TRY_AGAIN_S = 1.0
_ADOPT_S = 30.0  # `cluster status` waits for it


async def adopt_all(name: str, desired: Desired | None) -> list[ReplicaLifecycle]:
    """The replicas that an earlier life of the controller started, in the order of their numbers; what is not whole is
    removed, and all of it where nothing is desired. Within 30 s.

    Raises RayError, as when Ray has just come back itself; then none of it is being looked at any more.
    """
    found = sorted(find_replicas(name), key=number_of)  # they keep the order in which they were started
    lives = await asyncio.gather(*(_adopt(replica, name, desired) for replica in found), return_exceptions=True)
    if problems := [life for life in lives if isinstance(life, BaseException)]:
        raise problems[0]
    return [life for life in lives if isinstance(life, ReplicaLifecycle)]


async def _adopt(replica: str, name: str, desired: Desired | None) -> ReplicaLifecycle | None:
    try:
        if desired is None:
            raise ReplicaFailed("nothing is desired")
        life = ReplicaLifecycle(replica, desired.as_made(replica, role_of(replica)))
        async with asyncio.timeout(_ADOPT_S):
            while not await _is_reached(life):
                await asyncio.sleep(_TRY_AGAIN_S)
    except (ReplicaFailed, TimeoutError) as error:
        logger.warning("%s is removed, not adopted: %s", replica, error)
        remove_leftovers(replica, name)
        return None
    logger.info("%s is adopted", replica)
    return life


async def _is_reached(life: ReplicaLifecycle) -> bool:
    """Adopt it, unless the network is in the way: that may be for a moment, as where this host has just come back."""
    try:
        await life.adopt()
    except (RankUnreachable, TimeoutError) as error:
        logger.warning("%s serves, perhaps: %s", life.view.id, str(error) or "it does not answer")
        return False
    return True
