"""Where the receiving end of a tcp link waits for the sending one, among whoever else connects."""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

from kvtransfer.links.handshake import NONCE_BYTES, PROOF_BYTES, Handshake, new_nonce

_MAX_PENDING_PEERS = 64  # at once; one more, and the one that has said nothing for longest must go
_PENDING_PEER_S = 2.0  # in all, however it spends them: the other end of a link has nothing to think about


@dataclass(eq=False)
class _PendingPeer:
    connection: socket.socket
    nonce: bytes  # ours, for it
    leaves_at: float
    said: bytearray = field(default_factory=bytearray)


class Acceptor:
    """Owns a listening socket. Strangers are served beside each other, on the thread that waits; none is waited for."""

    def __init__(self, server: socket.socket, handshake: Handshake) -> None:
        self._server = server
        self._handshake = handshake
        self._selector = selectors.DefaultSelector()
        self._pending_peers: dict[int, _PendingPeer] = {}  # by file descriptor, in the order in which they came
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def wait(self, *, until: float) -> tuple[socket.socket, bytes]:
        """The connection of who proves to be the other end, and the session's key. Raises TimeoutError at `until`, on
        the monotonic clock. Everybody else is turned away."""
        try:
            while (now := time.monotonic()) < until:
                first_leaves = min(
                    (pending_peer.leaves_at for pending_peer in self._pending_peers.values()), default=until
                )
                for ready, _ in self._selector.select(max(0.0, min(first_leaves, until) - now)):
                    pending_peer = self._pending_peers.get(ready.fd)
                    if ready.fileobj is self._server:
                        self._greet()
                    elif pending_peer and (key := self._listen(pending_peer)):
                        return self._let_go(pending_peer), key
                for pending_peer in [s for s in self._pending_peers.values() if s.leaves_at <= time.monotonic()]:
                    self._turn_away(pending_peer)
            raise TimeoutError("nobody came")
        finally:
            for pending_peer in list(self._pending_peers.values()):
                self._turn_away(pending_peer)
            self._selector.close()

    def _greet(self) -> None:
        with suppress(OSError):  # it has gone again
            connection, _ = self._server.accept()
            if len(self._pending_peers) >= _MAX_PENDING_PEERS:
                self._turn_away(next(iter(self._pending_peers.values())))
            connection.setblocking(False)
            pending_peer = _PendingPeer(connection, new_nonce(), time.monotonic() + _PENDING_PEER_S)
            self._pending_peers[connection.fileno()] = pending_peer
            self._selector.register(connection, selectors.EVENT_READ)
            self._say(pending_peer, pending_peer.nonce)

    def _listen(self, pending_peer: _PendingPeer) -> bytes | None:
        """Take what it says; the session's key once it has proved who it is."""
        wanted = NONCE_BYTES + PROOF_BYTES
        try:
            said = pending_peer.connection.recv(wanted - len(pending_peer.said))
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        pending_peer.said += said
        if not said:
            self._turn_away(pending_peer)
        if len(pending_peer.said) < wanted:
            return None
        nonce, proof = bytes(pending_peer.said[:NONCE_BYTES]), bytes(pending_peer.said[NONCE_BYTES:])
        nonces = {"receiver_nonce": pending_peer.nonce, "sender_nonce": nonce}
        if not self._handshake.is_proved(proof, is_sender=True, **nonces):
            self._turn_away(pending_peer)
            return None
        self._say(pending_peer, self._handshake.proof(is_sender=False, **nonces))
        return self._handshake.session_key(**nonces)

    def _say(self, pending_peer: _PendingPeer, data: bytes) -> None:
        """A few bytes on a fresh connection never wait. If it is gone, its reader hears of that."""
        with suppress(OSError):
            pending_peer.connection.send(data)

    def _let_go(self, pending_peer: _PendingPeer) -> socket.socket:
        """It is none of ours any more."""
        self._selector.unregister(pending_peer.connection)
        return self._pending_peers.pop(pending_peer.connection.fileno()).connection

    def _turn_away(self, pending_peer: _PendingPeer) -> None:
        self._let_go(pending_peer).close()
