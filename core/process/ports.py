"""TCP ports of this machine."""

from __future__ import annotations

import contextlib
import random
import socket

from core.types.errors import DeployError

# Below the range from which the kernel gives ports to outgoing connections, and above Ray's worker ports (10002-19999):
# so a server that restarts finds its port as it left it.
_RANGE = range(20_000, 32_000)


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Raises DeployError when `host` is no address of this machine."""
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
    """The first of `count` ports in a row on which nobody listens."""
    for first in random.sample(_RANGE, 200):
        if all(is_free(host, port) for port in range(first, first + count)):
            return first
    raise DeployError(f"{host}: no {count} free ports in a row between {_RANGE.start} and {_RANGE.stop}")


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nobody listens, at random so that two deployments that start together seldom meet."""
    return free_ports(1, host)
