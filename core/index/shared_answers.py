"""Messages that a deployment's replicas write for each other into one stream of Redis, which cannot read them.

    <name>:answers    stream, of one field to an entry: writer (16 bytes), number (8), the message, encrypted

Each writer has a key of its own, made of the deployment's and of its random name, and numbers its messages: so no nonce
is used twice, what was changed or written by a stranger does not open, and what is read again, copied into the stream
once more or left out is known by its number. Redis sees who is one writer, when it writes, and how much.
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
_MAX_ENTRIES = 1536  # of the stream, roughly: 24 MiB at most
_TTL_S = 3600  # after the last message: of a deployment that is gone nothing stays
_MAX_READ = 16  # entries in one look: the newest
_MAX_FIRST_READ = 128
_MAX_WRITERS = 4096  # whose last numbers are known
_WRITER_BYTES, _NUMBER_BYTES, _NONCE_BYTES, _TAG_BYTES = 16, 8, 12, 16
_HEAD_BYTES = _WRITER_BYTES + _NUMBER_BYTES
_FIELD = b"message"

# KEYS the stream. ARGV from where, how many entries at most, bytes of a value at most: larger ones come as nothing.
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
    """One replica's end of the stream `name`. Belongs to an event loop. Raises redis.RedisError when Redis is away;
    what was not read then is read later, as far as it is still there."""

    def __init__(self, redis: Redis, *, name: str, key: bytes) -> None:
        """key: 32 bytes, of the deployment, for this alone."""
        self._redis = redis
        self._stream = f"{name}:answers"
        self._words = name.encode()
        self._key = key
        self._writer = secrets.token_bytes(_WRITER_BYTES)
        self._cipher = self._cipher_of(self._writer)
        self._num_written = 0
        # Id and value that were read last; None: begin with what is there.
        self._last: tuple[bytes, bytes] | None = None
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # of each writer's last message, whoever is one
        self._look = redis.register_script(_LOOK)
        self.num_rejected = 0  # entries that nobody of this deployment has written so
        self.num_missed = 0  # messages that were not among those read

    async def write(self, message: bytes) -> None:
        """At most MAX_MESSAGE_BYTES."""
        assert len(message) <= MAX_MESSAGE_BYTES
        self._num_written += 1  # also of one that nobody gets: no nonce is used again
        head = self._writer + self._num_written.to_bytes(_NUMBER_BYTES, "big")
        entry: dict[Any, Any] = {_FIELD: head + self._cipher.encrypt(_nonce(head), message, self._words)}
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.xadd(self._stream, entry, maxlen=_MAX_ENTRIES, approximate=True)
            pipeline.expire(self._stream, _TTL_S)
            await pipeline.execute()

    async def read(self) -> list[bytes]:
        """What others have written since the last call, the oldest first; of much, the newest. The first call gives
        some of what is there."""
        last = self._last
        # From the one that was read last, which should be there: where it is not, the stream began anew.
        start, count = (last[0], _MAX_READ) if last else (b"-", _MAX_FIRST_READ)
        max_bytes = _HEAD_BYTES + MAX_MESSAGE_BYTES + _TAG_BYTES
        try:
            found = await self._look(keys=[self._stream], args=[start, count, max_bytes])
        except RedisError:
            self._last = None  # it may come back empty, and number its entries as it likes
            raise
        entries = list(zip(found[::2], found[1::2], strict=True))  # the newest first
        self._last = entries[0] if entries else None
        verified = [self._open(value) for id, value in reversed(entries) if (id, value) != last]
        return [message for message in verified if message is not None]

    def _open(self, value: bytes) -> bytes | None:
        """The message, if it is another replica's and was not read before."""
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
        """Count a message that is left out. It is said once: whoever writes one may write many."""
        if not self.num_rejected:
            logger.warning("a message about finished answers %s and is left out", reason)
        self.num_rejected += 1

    def _cipher_of(self, writer: bytes) -> AESGCM:
        return AESGCM(blake2b(writer, key=self._key, digest_size=32, person=b"writer").digest())


def _nonce(head: bytes) -> bytes:
    return head[_WRITER_BYTES:].rjust(_NONCE_BYTES, b"\0")
