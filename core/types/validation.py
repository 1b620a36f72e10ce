"""Bounds checks of message fields that every process applies before it uses a message."""

from __future__ import annotations

import ipaddress
import re

from core.types.errors import RequestError

MAX_RANKS = 64  # of a replica; see PoolSpec.tensor_parallel
_MAX_NAME = 1024  # a handoff's id contains its request's id
_HOST = re.compile(r"localhost|[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})+")


def check(is_met: bool, param: str, rule: str) -> None:
    """Raise RequestError that names the field, unless the rule is met."""
    if not is_met:
        raise RequestError(f"{param}: {rule}", param=param)


def check_name(name: str, param: str, *, may_be_empty: bool = False, most: int = _MAX_NAME) -> None:
    """Check an id or key of at most `most` characters. Raises RequestError."""
    check(may_be_empty or bool(name), param, "must not be empty")
    check(len(name) <= most, param, f"must have at most {most} characters")


def check_address(address: str, param: str) -> None:
    """Check that `address` is HOST:PORT and not another kind of gRPC target. Raises RequestError."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65_536
    check(len(address) <= _MAX_NAME and is_port and _is_host(host), param, "must be HOST:PORT")


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return bool(_HOST.fullmatch(host))
    return True
