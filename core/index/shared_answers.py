"""Encrypted messages between a deployment's replicas, in one Redis stream that Redis cannot read.

    <name>:answers    stream; one field per entry: writer (16 bytes), number (8), encrypted message

Each writer derives a key from the deployment's key and its own random name, and numbers its messages. So no nonce is
used twice, forged or modified entries fail to decrypt, and replayed or missing ones are detected by their number. Redis
sees the writers, the times and the sizes.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from redis.asyncio import Redis
from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 10
_MAX_ENTRIES = 1536  # of the stream, approximately: at most 24 MiB
_TTL_S = 3600  # after the last message, so that a deleted deployment leaves nothing behind
_MAX_READ = 16  # newest entries per read
_MAX_FIRST_READ = 128
_MAX_WRITERS = 4096  # writers whose last number is remembered
_WRITER_BYTES, _NUMBER_BYTES, _NONCE_BYTES, _TAG_BYTES = 16, 8, 12, 16
_HEAD_BYTES = _WRITER_BYTES + _NUMBER_BYTES
_FIELD = b"message"

# KEYS: the stream. ARGV: first id, maximum number of entries, maximum bytes of a value (larger ones return empty).
_LOOK = """
local found = {}
for _, entry in ipairs(redis.call('XREVRANGE', KEYS[1], '+', ARGV[1], 'COUNT', ARGV[2])) do
    local fields = entry[2]
    found[#found + 1] = entry[1]
    found[#found + 1] = #fields == 2 and #fields[2] <= tonumber(ARGV[3]) and fields[2] or ''
end
return found
"""


class AnswerStream:
    """One replica's end of the stream `name`. Belongs to an event loop.

    Raises redis.RedisError if Redis is unreachable; a later read returns the messages that still exist.
    """

    def __init__(self, redis: Redis, *, name: str, key: bytes) -> None:
        """key: 32 bytes of the deployment, for this purpose only."""
        self._redis = redis
        self._stream = f"{name}:answers"
        self._words = name.encode()
        self._key = key
        self._writer = secrets.token_bytes(_WRITER_BYTES)
        self._cipher = self._cipher_of(self._writer)
        self._num_written = 0
        # Id and value of the last entry read; None: start with the existing entries.
        self._last: tuple[bytes, bytes] | None = None
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # number of each writer's last message
        self._look = redis.register_script(_LOOK)
        self.num_rejected = 0  # entries that fail to decrypt or to parse
        self.num_missed = 0  # messages trimmed before they were read

    async def write(self, message: bytes) -> None:
        """Append a message of at most MAX_MESSAGE_BYTES."""
        assert len(message) <= MAX_MESSAGE_BYTES
        self._num_written += 1  # counts failed writes too: a nonce is never reused
        head = self._writer + self._num_written.to_bytes(_NUMBER_BYTES, "big")
        entry: dict[Any, Any] = {_FIELD: head + self._cipher.encrypt(_nonce(head), message, self._words)}
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.xadd(self._stream, entry, maxlen=_MAX_ENTRIES, approximate=True)
            pipeline.expire(self._stream, _TTL_S)
            await pipeline.execute()

    async def read(self) -> list[bytes]:
        """Return the messages of other writers since the last call, oldest first; of many, only the newest.

        The first call returns some of the existing messages.
        """
        last = self._last
        # Start at the last entry read. If it is missing, the stream was recreated.
        start, count = (last[0], _MAX_READ) if last else (b"-", _MAX_FIRST_READ)
        max_bytes = _HEAD_BYTES + MAX_MESSAGE_BYTES + _TAG_BYTES
        try:
            found = await self._look(keys=[self._stream], args=[start, count, max_bytes])
        except RedisError:
            self._last = None  # Redis may return empty and number its entries from the start
            raise
        entries = list(zip(found[::2], found[1::2], strict=True))  # newest first
        self._last = entries[0] if entries else None
        verified = [self._open(value) for id, value in reversed(entries) if (id, value) != last]
        return [message for message in verified if message is not None]

    def _open(self, value: bytes) -> bytes | None:
        """Decrypt an entry. Returns None for own, forged and repeated messages."""
        head, signed = value[:_HEAD_BYTES], value[_HEAD_BYTES:]
        writer, number = head[:_WRITER_BYTES], int.from_bytes(head[_WRITER_BYTES:], "big")
        if writer == self._writer:
            return None
        try:
            message = self._cipher_of(writer).decrypt(_nonce(head), signed, self._words)
        except InvalidTag:
            self.reject("is not of this deployment")
            return None
        last = self._numbers.get(writer)
        if last is not None and number <= last:
            return None
        self.num_missed += min(number - last - 1, _MAX_ENTRIES) if last is not None else 0
        self._numbers[writer] = number
        self._numbers.move_to_end(writer)
        if len(self._numbers) > _MAX_WRITERS:
            self._numbers.popitem(last=False)
        return message

    def reject(self, reason: str) -> None:
        """Count a rejected message. Logged once only: an attacker may write many."""
        if not self.num_rejected:
            logger.warning("ignored a message about finished answers: it %s", reason)
        self.num_rejected += 1

    def _cipher_of(self, writer: bytes) -> AESGCM:
        return AESGCM(blake2b(writer, key=self._key, digest_size=32, person=b"writer").digest())


def _nonce(head: bytes) -> bytes:
    return head[_WRITER_BYTES:].rjust(_NONCE_BYTES, b"\0")
