"""Where the receiving end of a tcp link waits for the sending one, among whoever else connects."""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

from kvtransfer.links.handshake import NONCE_BYTES, PROOF_BYTES, Handshake, new_nonce

_MAX_STRANGERS = 64  # at once; one more, and the one that has said nothing for longest must go
_STRANGER_S = 2.0  # in all, however it spends them: the other end of a link has nothing to think about


@dataclass(eq=False)
class _Stranger:
    connection: socket.socket
    nonce: bytes  # ours, for it
    leaves_at: float
    said: bytearray = field(default_factory=bytearray)


class Doorway:
    """Owns a listening socket. Strangers are served beside each other, on the thread that waits; none is waited for."""

    def __init__(self, server: socket.socket, handshake: Handshake) -> None:
        self._server = server
        self._handshake = handshake
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[int, _Stranger] = {}  # by file descriptor, in the order in which they came
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def wait(self, *, until: float) -> tuple[socket.socket, bytes]:
        """The connection of who proves to be the other end, and the session's key. Raises TimeoutError at `until`, on
        the monotonic clock. Everybody else is turned away."""
        try:
            while (now := time.monotonic()) < until:
                first_leaves = min((stranger.leaves_at for stranger in self._strangers.values()), default=until)
                for ready, _ in self._selector.select(max(0.0, min(first_leaves, until) - now)):
                    stranger = self._strangers.get(ready.fd)
                    if ready.fileobj is self._server:
                        self._greet()
                    elif stranger and (key := self._listen(stranger)):
                        return self._let_go(stranger), key
                for stranger in [s for s in self._strangers.values() if s.leaves_at <= time.monotonic()]:
                    self._turn_away(stranger)
            raise TimeoutError("nobody came")
        finally:
            for stranger in list(self._strangers.values()):
                self._turn_away(stranger)
            self._selector.close()

    def _greet(self) -> None:
        with suppress(OSError):  # it has gone again
            connection, _ = self._server.accept()
            if len(self._strangers) >= _MAX_STRANGERS:
                self._turn_away(next(iter(self._strangers.values())))
            connection.setblocking(False)
            stranger = _Stranger(connection, new_nonce(), time.monotonic() + _STRANGER_S)
            self._strangers[connection.fileno()] = stranger
            self._selector.register(connection, selectors.EVENT_READ)
            self._say(stranger, stranger.nonce)

    def _listen(self, stranger: _Stranger) -> bytes | None:
        """Take what it says; the session's key once it has proved who it is."""
        wanted = NONCE_BYTES + PROOF_BYTES
        try:
            said = stranger.connection.recv(wanted - len(stranger.said))
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        stranger.said += said
        if not said:
            self._turn_away(stranger)
        if len(stranger.said) < wanted:
            return None
        nonce, proof = bytes(stranger.said[:NONCE_BYTES]), bytes(stranger.said[NONCE_BYTES:])
        nonces = {"receiver_nonce": stranger.nonce, "sender_nonce": nonce}
        if not self._handshake.is_proved(proof, is_sender=True, **nonces):
            self._turn_away(stranger)
            return None
        self._say(stranger, self._handshake.proof(is_sender=False, **nonces))
        return self._handshake.session_key(**nonces)

    def _say(self, stranger: _Stranger, data: bytes) -> None:
        """A few bytes on a fresh connection never wait. If it is gone, its reader hears of that."""
        with suppress(OSError):
            stranger.connection.send(data)

    def _let_go(self, stranger: _Stranger) -> socket.socket:
        """It is none of ours any more."""
        self._selector.unregister(stranger.connection)
        return self._strangers.pop(stranger.connection.fileno()).connection

    def _turn_away(self, stranger: _Stranger) -> None:
        self._let_go(stranger).close()
