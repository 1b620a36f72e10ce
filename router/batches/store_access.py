"""The store of batches as doors ask it: what it says, as errors that a client understands."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError

from core.types.errors import CapacityError, RequestError, StoreUnavailable
from router.batches.bounds import BatchBounds

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def asked(ask: Callable[[], Awaitable[T]]) -> T:
    """Raises StoreUnavailable."""
    try:
        return await ask()
    except RedisError as error:
        logger.warning("Redis does not answer for batches: %s", error)
        raise store_unavailable() from None


def check_room(told: str, bounds: BatchBounds) -> None:
    """told: by RedisBatches. Raises RequestError or CapacityError where there is none."""
    if told == "tenant":
        text = f"your files and answers of batches have the {bounds.max_of_tenant} bytes that they may; delete files"
        raise RequestError(text, param="file")
    if told == "all":
        raise CapacityError("there is no room for more batches at present", retry_after_s=60.0)


def store_unavailable() -> StoreUnavailable:
    return StoreUnavailable("where batches are kept cannot be reached at present; try again in a moment")


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"
