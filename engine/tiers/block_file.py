"""A KV block as a file: a header that says what it is, and the bytes of the pool.

    0   8   magic
    8   4   version of this format
    12  4   rank                         of the replica that wrote it
    16  16  fingerprint of the layout    weights, layers, heads, block size, dtype
    32  4   tensor parallelism
    36  4   CRC-32 of the header, with zero here
    40  16  prefix hash
    56  8   checksum of the payload
    64      payload, as KVPool.copy_out makes it

All numbers little-endian. A file that is not exactly that is none of ours.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.kv.checksum import checksum
from engine.kv.layout import KVLayout

VERSION = 1

_HEADER = struct.Struct("<8sII16sII16sQ")
_MAGIC = b"KVBLOCK\n"
_CRC = struct.Struct("<I")
_CRC_AT = 36


@dataclass(frozen=True)
class Stamp:
    """What the bytes of one rank must be for another life of that rank to use them."""

    layout: KVLayout
    rank: int

    @property
    def payload_bytes(self) -> int:
        return self.layout.block_bytes

    def header(self, prefix_hash: bytes, payload_checksum: int) -> bytes:
        fields = (_MAGIC, VERSION, self.rank, bytes.fromhex(self.layout.fingerprint), self.layout.tensor_parallel)
        return _seal(_HEADER.pack(*fields, 0, prefix_hash, payload_checksum))

    def read_header(self, data: bytes) -> tuple[bytes, int] | None:
        """(prefix hash, checksum of the payload); None if this is no header of ours."""
        if len(data) != _HEADER.size or data != _seal(data):
            return None
        *fields, _, prefix_hash, payload_checksum = _HEADER.unpack(data)
        fingerprint = bytes.fromhex(self.layout.fingerprint)
        ours = [_MAGIC, VERSION, self.rank, fingerprint, self.layout.tensor_parallel]
        return (prefix_hash, payload_checksum) if fields == ours else None


def write_block(path: Path, stamp: Stamp, prefix_hash: bytes, payload: Tensor) -> None:
    """Write a block whole, or not at all. payload: (block_bytes,) uint8 on the CPU, contiguous. Raises OSError.

    It is not synced: what a power failure leaves is seen by its checksum.
    """
    header = stamp.header(prefix_hash, checksum(payload))
    partial = path.with_suffix(".part")
    try:
        with partial.open("wb", buffering=0) as file:
            for data in (header, payload.numpy().data):
                _write_all(file.fileno(), memoryview(data))
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_block(path: Path, stamp: Stamp, prefix_hash: bytes) -> Tensor | None:
    """The payload, (block_bytes,) uint8; None unless the file is whole and holds this very block. Raises OSError."""
    data = np.fromfile(path, dtype=np.uint8)
    header = stamp.read_header(data[: _HEADER.size].tobytes())
    if header is None or header[0] != prefix_hash or len(data) != _HEADER.size + stamp.payload_bytes:
        return None
    payload = torch.from_numpy(data)[_HEADER.size :]
    return payload if checksum(payload) == header[1] else None


def read_hash(path: Path, stamp: Stamp) -> bytes | None:
    """Which block the file holds, by its header and size alone; None if it is none of ours. Raises OSError."""
    with path.open("rb") as file:
        header = stamp.read_header(file.read(_HEADER.size))
        size = os.fstat(file.fileno()).st_size
    return header[0] if header and size == _HEADER.size + stamp.payload_bytes else None


def _seal(header: bytes) -> bytes:
    """The header with its CRC in its place."""
    before, after = header[:_CRC_AT], header[_CRC_AT + _CRC.size :]
    return before + _CRC.pack(zlib.crc32(before + bytes(_CRC.size) + after)) + after


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
