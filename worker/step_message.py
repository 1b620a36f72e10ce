"""Encoding of a step's orders and rows, broadcast from rank 0 to the other ranks.

The message has no version, because the ranks of a replica run the same code.
"""

from __future__ import annotations

import struct

import msgspec
import numpy as np

from core.types.errors import ReplicaFailed
from engine.batch.rows import RowChanges
from engine.scheduler.step_commands import Orders

_HEADER = struct.Struct("<I")  # length of the orders; padding after them aligns the rows
_ALIGNED = 8
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Orders)


def encode_step(changes: RowChanges | None, orders: Orders) -> bytes:
    """Encode the orders and the row changes, if any."""
    packed = _encoder.encode(orders)
    padding = bytes(-(_HEADER.size + len(packed)) % _ALIGNED)
    return b"".join((_HEADER.pack(len(packed)), packed, padding, changes.encode().tobytes() if changes else b""))


def decode_step(data: bytes) -> tuple[RowChanges | None, Orders]:
    """Decode a step. Raises ReplicaFailed for a malformed message, because a rank cannot skip a step."""
    try:
        (length,) = _HEADER.unpack_from(data)
        end = _HEADER.size + length
        orders = _decoder.decode(data[_HEADER.size : end])
        end += -end % _ALIGNED
        changes = RowChanges.decode(np.frombuffer(data, dtype=np.int64, offset=end).copy()) if len(data) > end else None
    except (struct.error, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise ReplicaFailed(f"malformed step message from rank 0: {error}") from error
    return changes, orders
