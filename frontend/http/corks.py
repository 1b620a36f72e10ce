"""What is written to one connection in one turn of the event loop leaves together, where the turn before had several,
too; else but for the first of it, which may be alone.

gRPC writes by itself what each stream has, so a step of sixteen streams is sixteen segments, each of which wakes its
reader: a third of what sending costs (docs/benchmarks/router.md). The kernel holds them back if it is told to
(TCP_CORK in tcp(7)). But the socket is gRPC's, and gRPC shows it to nobody: so it is looked for among those of this
process, by the two ends that it has. Where it is not found, each message leaves as it is written.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass

_CORK = getattr(socket, "TCP_CORK", None)  # Linux
_OWN_FILES = "/proc/self/fd"
_LOOKED_AT = 64  # files in a turn, less than a millisecond
_MAX_HELD = 1024  # sockets: the files that a process may open are there for those who connect
_MAPPED = "::ffff:"  # an address of IPv4 at a socket of IPv6


@dataclass(eq=False)
class CorkedConnection:
    """Of gRPC's, as far as it is known here."""

    peer: str  # as gRPC writes it
    num_calls: int = 0
    num_written: int = 0  # in this turn
    had_several: bool = False  # in the last turn that had any
    socket: socket.socket | None = None  # a second descriptor of the same one, ours
    is_sought: bool = False  # once is enough
    is_held: bool = False


class Corks:
    """Belongs to the event loop. Holds no socket of a connection that has no call."""

    def __init__(self, *, max_held: int = _MAX_HELD) -> None:
        self._max_held = max_held
        self._ports: set[int] = set()
        self._connections: dict[str, CorkedConnection] = {}
        self._written: list[CorkedConnection] = []  # in this turn
        self._wanted: dict[str, CorkedConnection] = {}
        self._search: Iterator[None] | None = None
        self._num_held = 0  # sockets of ours

    def listen(self, port: int) -> None:
        """Connections come to this port, too."""
        self._ports.add(port)

    def join(self, peer: str) -> CorkedConnection:
        """A call has come."""
        connection = self._connections.setdefault(peer, CorkedConnection(peer))
        connection.num_calls += 1
        return connection

    def leave(self, connection: CorkedConnection) -> None:
        """It has ended."""
        connection.num_calls -= 1
        if not connection.num_calls:
            del self._connections[connection.peer]
            self._wanted.pop(connection.peer, None)
            self._let_go(connection)
            if connection.socket:
                connection.socket.close()
                connection.socket = None
                self._num_held -= 1

    def writes(self, connection: CorkedConnection) -> None:
        """A message follows. From the first or the second of a turn on they are held back, until `release`."""
        connection.num_written += 1
        if connection.num_written == 1:
            self._written.append(connection)
        if connection.num_written == (1 if connection.had_several else 2):
            if connection.socket and not connection.is_held:
                connection.is_held = _set_cork(connection.socket, True)
            elif not connection.is_sought and _CORK is not None:
                connection.is_sought = True
                self._wanted[connection.peer] = connection

    def release(self) -> None:
        """The turn is over."""
        for connection in self._written:
            connection.had_several = connection.num_written > 1
            connection.num_written = 0
            self._let_go(connection)
        self._written.clear()
        if self._search or self._wanted:
            self._search = self._search or self._look_through()
            next(self._search)

    def _let_go(self, connection: CorkedConnection) -> None:
        if connection.is_held and connection.socket:
            _set_cork(connection.socket, False)
        connection.is_held = False

    def _look_through(self) -> Iterator[None]:
        """All files of this process, some at a time, for the sockets of those that are wanted now."""
        wanted, self._wanted = self._wanted, {}
        try:
            names = os.listdir(_OWN_FILES)
        except OSError:  # there is no such place, or no file may be opened any more
            names = []
        for number, name in enumerate(names):
            if number % _LOOKED_AT == _LOOKED_AT - 1:
                yield
            if not wanted:
                break
            if (found := socket_at(int(name))) is None:
                continue
            connection = wanted.pop(_peer_of(found), None) if self._is_ours(found) else None
            if connection and connection.num_calls and self._num_held < self._max_held:
                connection.socket = found
                self._num_held += 1
            else:
                found.close()
        self._search = None
        yield

    def _is_ours(self, found: socket.socket) -> bool:
        try:
            return found.getsockname()[1] in self._ports
        except OSError:
            return False


def socket_at(descriptor: int) -> socket.socket | None:
    """By a descriptor of our own, for that one may be closed at any time, and be another's then. Of other files none is
    made: to close it would end locks that this process has on them (fcntl(2)), or wait for a disk far away."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        own = os.dup(descriptor)
    except OSError:
        return None
    try:
        found = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        return None
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        found.close()
        return None
    return found


def _peer_of(found: socket.socket) -> str:
    """As gRPC writes it; empty where there is none."""
    try:
        host, port = found.getpeername()[:2]
    except OSError:
        return ""
    if found.family == socket.AF_INET or host.startswith(_MAPPED):
        return f"ipv4:{host.removeprefix(_MAPPED)}:{port}"
    return f"ipv6:%5B{host}%5D:{port}"


def _set_cork(held: socket.socket, is_held: bool) -> bool:
    """Whether it is held back. What a connection that has ended says of that does not matter."""
    assert _CORK is not None
    try:
        held.setsockopt(socket.IPPROTO_TCP, _CORK, is_held)
    except OSError:
        return False
    return is_held
