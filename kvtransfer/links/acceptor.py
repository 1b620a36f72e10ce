"""Acceptor of a tcp link's receiving end: authenticates one peer among arbitrary incoming connections."""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

from kvtransfer.links.handshake import NONCE_BYTES, PROOF_BYTES, Handshake, new_nonce

_MAX_PENDING_PEERS = 64  # beyond this, the oldest is dropped
_PENDING_PEER_S = 2.0  # total time to complete the handshake


@dataclass(eq=False)
class _PendingPeer:
    connection: socket.socket
    nonce: bytes  # sent to this peer
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class Acceptor:
    """Handshakes with all connecting peers concurrently, on the waiting thread. Does not block on any one of them."""

    def __init__(self, server: socket.socket, handshake: Handshake) -> None:
        self._server = server
        self._handshake = handshake
        self._selector = selectors.DefaultSelector()
        self._pending_peers: dict[int, _PendingPeer] = {}  # by file descriptor, oldest first
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def wait(self, *, until: float) -> tuple[socket.socket, bytes]:
        """Return the authenticated peer's connection and the session key, and close all others.

        until: deadline on the monotonic clock. Raises TimeoutError.
        """
        try:
            while (now := time.monotonic()) < until:
                first_deadline = min(
                    (pending_peer.deadline for pending_peer in self._pending_peers.values()), default=until
                )
                for ready, _ in self._selector.select(max(0.0, min(first_deadline, until) - now)):
                    pending_peer = self._pending_peers.get(ready.fd)
                    if ready.fileobj is self._server:
                        self._accept()
                    elif pending_peer and (key := self._read(pending_peer)):
                        return self._detach(pending_peer), key
                for pending_peer in [s for s in self._pending_peers.values() if s.deadline <= time.monotonic()]:
                    self._drop(pending_peer)
            raise TimeoutError("timed out waiting for the peer")
        finally:
            for pending_peer in list(self._pending_peers.values()):
                self._drop(pending_peer)
            self._selector.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the peer hung up
            connection, _ = self._server.accept()
            if len(self._pending_peers) >= _MAX_PENDING_PEERS:
                self._drop(next(iter(self._pending_peers.values())))
            connection.setblocking(False)
            pending_peer = _PendingPeer(connection, new_nonce(), time.monotonic() + _PENDING_PEER_S)
            self._pending_peers[connection.fileno()] = pending_peer
            self._selector.register(connection, selectors.EVENT_READ)
            self._send(pending_peer, pending_peer.nonce)

    def _read(self, pending_peer: _PendingPeer) -> bytes | None:
        """Read from a pending peer. Returns the session key once it is authenticated."""
        num_expected = NONCE_BYTES + PROOF_BYTES
        try:
            received = pending_peer.connection.recv(num_expected - len(pending_peer.received))
        except BlockingIOError:
            return None
        except OSError:
            received = b""
        pending_peer.received += received
        if not received:
            self._drop(pending_peer)
        if len(pending_peer.received) < num_expected:
            return None
        nonce, proof = bytes(pending_peer.received[:NONCE_BYTES]), bytes(pending_peer.received[NONCE_BYTES:])
        nonces = {"receiver_nonce": pending_peer.nonce, "sender_nonce": nonce}
        if not self._handshake.is_proved(proof, is_sender=True, **nonces):
            self._drop(pending_peer)
            return None
        self._send(pending_peer, self._handshake.proof(is_sender=False, **nonces))
        return self._handshake.session_key(**nonces)

    def _send(self, pending_peer: _PendingPeer, data: bytes) -> None:
        """Send a few bytes, which never block on a fresh connection. `_read` detects a closed one."""
        with suppress(OSError):
            pending_peer.connection.send(data)

    def _detach(self, pending_peer: _PendingPeer) -> socket.socket:
        """Stop tracking a peer and return its connection."""
        self._selector.unregister(pending_peer.connection)
        return self._pending_peers.pop(pending_peer.connection.fileno()).connection

    def _drop(self, pending_peer: _PendingPeer) -> None:
        self._detach(pending_peer).close()
