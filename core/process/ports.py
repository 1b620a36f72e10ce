"""TCP ports of this machine."""

from __future__ import annotations

import contextlib
import random
import socket

from core.types.errors import DeployError

# Below the kernel's ephemeral ports and above Ray's worker ports (10002-19999), so that a server that restarts finds
# its port free.
_RANGE = range(20_000, 32_000)


def is_free(host: str, port: int) -> bool:
    """Return whether the port is free. Raises DeployError if `host` is not an address of this machine."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise DeployError(f"router.host {host}: {error.strerror}") from None
    with contextlib.closing(socket.socket(family, kind)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last server may linger
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError:
            return False
    return True


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """Return the first of `count` consecutive free ports. Raises DeployError if there are none."""
    for first in random.sample(_RANGE, 200):
        if all(is_free(host, port) for port in range(first, first + count)):
            return first
    raise DeployError(f"{host}: no {count} free ports in a row between {_RANGE.start} and {_RANGE.stop}")


def is_chosen(port: int) -> bool:
    """Return whether `free_ports` may have chosen this port."""
    return port in _RANGE


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port, chosen at random so that two deployments started together rarely collide."""
    return free_ports(1, host)
