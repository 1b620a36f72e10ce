"""Adoption of running replicas when the controller restarts: complete ones are taken over, others are removed."""

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
# `cluster status` waits for this.
_ADOPT_S = 30.0


async def adopt_all(name: str, desired: Desired | None) -> list[ReplicaLifecycle]:
    """Return the replicas that an earlier run of the controller started, ordered by number.

    Incomplete replicas are removed; so are all of them if `desired` is None. Takes at most 30 s. Raises RayError, for
    example while Ray itself is coming back; no adoption is running then.
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
    """Adopt the replica. Return False if the network failed; it may be back in a moment, as after a reboot of this
    host."""
    try:
        await life.adopt()
    except (RankUnreachable, TimeoutError) as error:
        logger.warning("cannot verify replica, retrying replica=%s reason=%s", life.view.id, str(error) or "no answer")
        return False
    return True
