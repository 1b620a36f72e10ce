"""Length-prefixed messages over one asyncio connection, over TCP or TLS: the transport of token frames, for either end.

A message is a four-byte big-endian length and that many bytes. An empty message is a keep-alive.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import struct
from collections.abc import Callable
from typing import cast

from core.identity.credentials import TlsCredentials

_LENGTH = struct.Struct(">I")
_HIGH_WATER_BYTES = 64 << 10  # unsent bytes above which `drained` waits


class BadMessage(ValueError):
    """Violation of the message format by the peer."""


class MessageStream(asyncio.Protocol):
    """End of a connection, over TCP or TLS. Belongs to the event loop.

    `take` is called with each message inside the read callback, so that TCP flow control slows down a faster sender. An
    exception of `take` ends the connection. At most one incomplete message of `max_message_bytes` is buffered.
    """

    def __init__(self, take: Callable[[bytes], None], *, max_message_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Exception | None] = loop.create_future()  # None: closed between messages
        self.num_quiet = 0  # checks by the owner since the peer's last byte
        self._take = take
        self._max_message_bytes = max_message_bytes
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()

    def send(self, message: bytes) -> None:
        """Queue a message. Does nothing once the connection has ended."""
        if self._transport and not self.ended.done():
            self._transport.write(_LENGTH.pack(len(message)) + message)

    async def drained(self, within_s: float) -> None:
        """Wait until the peer has read most messages, or the connection has ended. Raises TimeoutError."""
        if not self._can_write.is_set():
            async with asyncio.timeout(within_s):
                await self._can_write.wait()

    def close(self) -> None:
        """Send the queued messages, then close this direction; the peer closes the other."""
        if not self._transport:
            return
        if self._transport.can_write_eof():  # TCP: a full close while bytes arrive would reset and lose the rest
            self._transport.write_eof()
        else:  # TLS: close() sends close_notify first
            self._transport.close()

    def abort(self, error: Exception | None = None) -> None:
        """Drop the connection at once. Idempotent; the first error wins."""
        if not self.ended.done():
            self.ended.set_result(error)
            self._can_write.set()
        if self._transport:
            self._transport.abort()

    # The methods below are called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        if self.ended.done():
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not exc and self._buffer:
            exc = BadMessage("the connection was closed within a message")
        self._transport = None
        self.abort(exc)

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        self.num_quiet = 0
        try:
            self._read(data)
        except Exception as error:  # ends this connection only
            self.abort(error)

    def _read(self, data: bytes) -> None:
        buffer, start = self._buffer, 0
        if not buffer and len(data) >= _LENGTH.size and len(data) == _LENGTH.size + self._length(data, 0):
            return self._hand_over(data[_LENGTH.size :])  # the common case, without a copy into the buffer
        buffer += data
        while not self.ended.done() and len(buffer) - start >= _LENGTH.size:
            end = start + _LENGTH.size + self._length(buffer, start)
            if len(buffer) < end:
                break
            self._hand_over(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]

    def _length(self, data: bytes | bytearray, start: int) -> int:
        """Return the length of the message that starts there. Raises BadMessage."""
        length: int = _LENGTH.unpack_from(data, start)[0]
        if length > self._max_message_bytes:
            raise BadMessage(f"a message of {length} bytes exceeds the limit of {self._max_message_bytes}")
        return length

    def _hand_over(self, message: bytes) -> None:
        if message and not self.ended.done():
            self._take(message)


def client_context(tls_credentials: TlsCredentials) -> ssl.SSLContext:
    """Return a client context with these credentials that verifies the peer's certificate and host name.

    Raises OSError; ssl.SSLError is a subclass.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, tls_credentials)


def server_context(tls_credentials: TlsCredentials) -> ssl.SSLContext:
    """Return a server context with these credentials that requires client certificates. Raises OSError."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, tls_credentials)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # no session resumption: each connection presents its certificate
    return context


def _context(protocol: int, tls_credentials: TlsCredentials) -> ssl.SSLContext:
    own = tls_credentials.certificate
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust each authority by itself, intermediates included
    context.load_verify_locations(cadata=own.authorities.decode())
    # Python loads a key only from a file. This one is in memory, and no other process can open it.
    file = os.memfd_create("credentials")
    try:
        with open(file, "wb", closefd=False) as written:
            written.write(tls_credentials.key + b"\n" + own.chain)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
