"""HTTP CONNECT proxy to package indexes, for hosts without network access."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PIECE_BYTES = 1 << 16
_CONNECT_S = 30.0


@contextmanager
def package_proxy(host: str) -> Iterator[str]:
    """Yield its URL for pip."""
    with _Server((host, 0), _Tunnel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield "http://{}:{}".format(*server.server_address)
        finally:
            server.shutdown()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


class _Tunnel(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        verb, target, _ = self.rfile.readline(1024).decode().split()
        while self.rfile.readline(8192).strip():
            pass
        if verb != "CONNECT":
            self.wfile.write(b"HTTP/1.1 405 CONNECT only\r\n\r\n")
            return
        name, _, port = target.rpartition(":")
        with suppress(OSError), socket.create_connection((name, int(port)), _CONNECT_S) as far:
            far.settimeout(None)
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=_carry, args=(far, self.connection), daemon=True)
            back.start()
            _carry(self.connection, far)
            back.join()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            target.sendall(piece)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
