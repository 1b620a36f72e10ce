"""Query parameters of paged lists."""

from __future__ import annotations

from collections.abc import Mapping

from core.types.errors import RequestError


def page_size(query: Mapping[str, str], *, default: int, most: int) -> int:
    """Return the `limit` parameter. Raises RequestError."""
    limit = query.get("limit", str(default))
    if not (limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise RequestError(f"limit: must be from 1 to {most}", param="limit")
    return int(limit)


def is_newest_first(query: Mapping[str, str]) -> bool:
    """Return whether `order` is desc, the default. Raises RequestError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order: must be asc or desc", param="order")
    return order == "desc"
