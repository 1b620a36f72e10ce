"""A KV block as a file: a header that says what it is, and the bytes of the pool.

    0   8   magic
    8   4   version of this format
    12  4   rank                         of the replica that wrote it
    16  16  fingerprint of the layout    weights, layers, heads, block size, dtype
    32  4   tensor parallelism
    36  16  prefix hash
    52  32  seal of the payload          HMAC-SHA256, of the prefix hash and the bytes
    84  32  seal of all this             HMAC-SHA256
    116     payload, as KVPool.copy_out makes it

All numbers little-endian. A file that is not exactly that is none of ours. Nor is one that was sealed with another key:
who can write files here, but not read the key beside them (engine/tiers/directory_lock.py), can make us miss a block
and no more.
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

from core.identity.signing import SIGNATURE_BYTES, is_signed, sign
from engine.kv.layout import KVLayout

VERSION = 2

_FIELDS = struct.Struct("<8sII16sI16s32s")
_HEADER_BYTES = _FIELDS.size + SIGNATURE_BYTES
_MAGIC = b"KVBLOCK\n"


@dataclass(frozen=True)
class Stamp:
    """What the bytes of one rank must be for another life of that rank to use them."""

    layout: KVLayout
    rank: int
    key: bytes = field(repr=False)  # 32 bytes, of whoever owns the directory

    @property
    def payload_bytes(self) -> int:
        return self.layout.block_bytes

    def header(self, prefix_hash: bytes, payload: Tensor) -> bytes:
        fields = _FIELDS.pack(*self._ours, prefix_hash, sign(self.key, b"payload", prefix_hash, payload.numpy().data))
        return fields + sign(self.key, b"header", fields)

    def read_header(self, data: bytes) -> Header | None:
        """None if this is no header of ours."""
        fields, shown = data[: _FIELDS.size], data[_FIELDS.size :]
        if len(data) != _HEADER_BYTES or not is_signed(shown, self.key, b"header", fields):
            return None
        *ours, prefix_hash, payload_signature = _FIELDS.unpack(fields)
        return Header(prefix_hash, payload_signature) if tuple(ours) == self._ours else None

    def has_signed(self, header: Header, payload: memoryview) -> bool:
        """Whether this is the payload that the header was written for."""
        return is_signed(header.payload_signature, self.key, b"payload", header.prefix_hash, payload)

    @property
    def _ours(self) -> tuple[bytes, int, int, bytes, int]:
        return _MAGIC, VERSION, self.rank, bytes.fromhex(self.layout.fingerprint), self.layout.tensor_parallel


@dataclass(frozen=True)
class Header:
    """What a file says of itself, and has proved."""

    prefix_hash: bytes
    payload_signature: bytes


def write_block(path: Path, stamp: Stamp, prefix_hash: bytes, payload: Tensor) -> None:
    """Write a block whole, or not at all. payload: (block_bytes,) uint8 on the CPU, contiguous. Raises OSError.

    It is not synced: what a power failure leaves is seen by its seal. Nobody else may read it.
    """
    header = stamp.header(prefix_hash, payload)
    partial = path.with_suffix(".part")
    try:
        partial.unlink(missing_ok=True)  # what a killed process has left, or somebody else has put there
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
    """The payload, (block_bytes,) uint8; None unless the file is whole and holds this very block. Raises OSError."""
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
    """Which block the file holds, by its header and size alone; None if it is none of ours. Raises OSError."""
    with _open(path) as file:
        header = stamp.read_header(file.read(_HEADER_BYTES))
        size = os.fstat(file.fileno()).st_size
    return header.prefix_hash if header and size == _HEADER_BYTES + stamp.payload_bytes else None


def _open(path: Path) -> BinaryIO:
    """Raises OSError, also for a link to elsewhere, and never waits for what is no file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return cast(BinaryIO, os.fdopen(descriptor, "rb", buffering=0))


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
