"""File format of a KV block: a signed header and the bytes of the pool.

    0   8   magic
    8   4   version of this format
    12  4   rank                         of the replica that wrote it
    16  16  fingerprint of the layout    weights, layers, heads, block size, dtype
    32  4   tensor parallelism
    36  16  prefix hash
    52  32  signature of the payload     HMAC-SHA256 over the prefix hash and the bytes
    84  32  signature of the header      HMAC-SHA256
    116     payload, as KVPool.copy_out makes it

All numbers are little-endian. Files that differ from this, or are signed with another key, are rejected. An attacker
who can write files here but cannot read the key beside them (engine/tiers/directory_lock.py) can only cause misses.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from core.identity.deployment_secrets import SIGNATURE_BYTES, is_signed, sign
from engine.kv.layout import KVLayout

VERSION = 2

_FIELDS = struct.Struct("<8sII16sI16s32s")
_HEADER_BYTES = _FIELDS.size + SIGNATURE_BYTES
_MAGIC = b"KVBLOCK\n"


@dataclass(frozen=True)
class Stamp:
    """Layout, rank and key that a block file must match to be reused by a later process of the same rank."""

    layout: KVLayout
    rank: int
    # 32 bytes, stored in the directory's root.
    key: bytes = field(repr=False)

    @property
    def payload_bytes(self) -> int:
        return self.layout.place_bytes

    def header(self, prefix_hash: bytes, payload: Tensor) -> bytes:
        fields = _FIELDS.pack(*self._ours, prefix_hash, sign(self.key, b"payload", prefix_hash, payload.numpy().data))
        return fields + sign(self.key, b"header", fields)

    def read_header(self, data: bytes) -> Header | None:
        """Parse and verify a header. Returns None if it does not match."""
        fields, shown = data[: _FIELDS.size], data[_FIELDS.size :]
        if len(data) != _HEADER_BYTES or not is_signed(shown, self.key, b"header", fields):
            return None
        *ours, prefix_hash, payload_signature = _FIELDS.unpack(fields)
        return Header(prefix_hash, payload_signature) if tuple(ours) == self._ours else None

    def has_signed(self, header: Header, payload: memoryview) -> bool:
        """Return True if the header's payload signature matches `payload`."""
        return is_signed(header.payload_signature, self.key, b"payload", header.prefix_hash, payload)

    @property
    def _ours(self) -> tuple[bytes, int, int, bytes, int]:
        return _MAGIC, VERSION, self.rank, bytes.fromhex(self.layout.fingerprint), self.layout.tensor_parallel


@dataclass(frozen=True)
class Header:
    """Verified header of a block file."""

    prefix_hash: bytes
    payload_signature: bytes


def write_block(path: Path, stamp: Stamp, prefix_hash: bytes, payload: Tensor) -> None:
    """Write a block atomically. payload: (place_bytes,) uint8 on the CPU, contiguous. Raises OSError.

    Not synced: the signature detects a torn file after a power failure. The file mode is 0600.
    """
    header = stamp.header(prefix_hash, payload)
    partial = path.with_suffix(".part")
    try:
        # Left by a killed process, or placed by another user.
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0):
            for data in (header, payload.numpy().data):
                _write_all(descriptor, memoryview(data))
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def read_block(path: Path, stamp: Stamp, prefix_hash: bytes) -> Tensor | None:
    """Return the payload, (place_bytes,) uint8; None if the file is damaged or holds another block. Raises OSError."""
    with _open(path) as file:
        if os.fstat(file.fileno()).st_size != _HEADER_BYTES + stamp.payload_bytes:
            return None
        header = stamp.read_header(file.read(_HEADER_BYTES))
        if header is None or header.prefix_hash != prefix_hash:
            return None
        payload = np.fromfile(file, dtype=np.uint8)
    is_whole = len(payload) == stamp.payload_bytes and stamp.has_signed(header, payload.data)
    return torch.from_numpy(payload) if is_whole else None


def read_hash(path: Path, stamp: Stamp) -> bytes | None:
    """Return the prefix hash in the file's header, or None if header or size do not match. Raises OSError."""
    with _open(path) as file:
        header = stamp.read_header(file.read(_HEADER_BYTES))
        size = os.fstat(file.fileno()).st_size
    return header.prefix_hash if header and size == _HEADER_BYTES + stamp.payload_bytes else None


def _open(path: Path) -> BinaryIO:
    """Open for reading. Raises OSError, also for symbolic links; does not block on FIFOs or devices."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return cast(BinaryIO, os.fdopen(descriptor, "rb", buffering=0))


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
